"""Inspectus: attention charts, whose matrices it takes from the tuple of all layers."""

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

viz = pytest.importorskip("inspectus.attention_viz", reason="inspectus is not installed")


@torch.no_grad()
def test_the_matrices_of_a_chart_are_eagers(same):
    tokens = some_tokens(batch=1)
    charts = []
    for model in reversed(pair(*CAUSAL["GPT-2"])):
        maps, dimensions = viz.parse_attn(model(tokens, output_attentions=True).attentions)
        assert len(maps) == 12
        assert {one["name"] for one in dimensions} == {"layer", "head"}
        charts.append([one.matrix for one in maps])
    same("matrices of a chart, by layer and head", *charts)
