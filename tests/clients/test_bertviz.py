"""BertViz: head view and model view, whose pages hold all weights as numbers."""

import json
import re

import pytest
import torch

from test_huggingface import CAUSAL, ENCODERS, SEQ2SEQ, pair, some_tokens

bertviz = pytest.importorskip("bertviz", reason="bertviz is not installed")
util = pytest.importorskip("bertviz.util", reason="bertviz is not installed")

VIEWS = {"head view": bertviz.head_view, "model view": bertviz.model_view}

every_view = pytest.mark.parametrize("view", VIEWS)


def drawn(html) -> list:
    """All weights in a page, in order; its script holds them once or twice."""
    found = re.findall(r'"attention": (\[.*?\]), "default_filter"', html.data)
    assert len(set(found)) == 1
    return [shown["attn"] for shown in json.loads(found[0])]


@every_view
@pytest.mark.parametrize("family", [CAUSAL["GPT-2"], ENCODERS["BERT"]], ids=lambda family: family[0])
@torch.no_grad()
def test_a_page_holds_eagers_weights(family, view, same):
    tokens = some_tokens(batch=1)
    expected, actual = (model(tokens, output_attentions=True).attentions for model in pair(*family))
    same("format_attention", util.format_attention(actual), util.format_attention(expected))
    words = [str(int(token)) for token in tokens[0]]
    pages = [VIEWS[view](each, words, html_action="return") for each in (actual, expected)]
    same(view, *map(drawn, pages))


@every_view
@torch.no_grad()
def test_a_page_with_cross_attention_holds_eagers_weights(view, same):
    tokens = {"input_ids": some_tokens(batch=1), "decoder_input_ids": some_tokens(7, batch=1)}
    pages = []
    for model in reversed(pair(*SEQ2SEQ["BART"])):
        output = model(**tokens, output_attentions=True)
        pages.append(
            VIEWS[view](
                encoder_attention=output.encoder_attentions,
                decoder_attention=output.decoder_attentions,
                cross_attention=output.cross_attentions,
                encoder_tokens=[str(int(token)) for token in tokens["input_ids"][0]],
                decoder_tokens=[str(int(token)) for token in tokens["decoder_input_ids"][0]],
                html_action="return",
            )
        )
    same(f"{view} with cross-attention", *map(drawn, pages))
