"""pyvene: what attention returns, exchanged between two texts while the model runs."""

import pytest
import torch

from test_huggingface import CAUSAL, pair, some_tokens

pyvene = pytest.importorskip("pyvene", reason="pyvene is not installed")


@pytest.mark.parametrize("component", ["attention_output", "attention_value_output", "head_attention_value_output"])
@torch.no_grad()
def test_an_exchange_between_two_texts_is_eagers(component, same):
    base, source = some_tokens(batch=1), some_tokens(batch=1)
    kind, sizes = CAUSAL["GPT-2"]
    found = []
    for model in reversed(pair(kind, sizes)):
        unit = {"unit": "h.pos"} if component.startswith("head") else {}
        config = pyvene.IntervenableConfig(
            [{"layer": 1, "component": component, "intervention_type": pyvene.VanillaIntervention, **unit}]
        )
        watched = pyvene.IntervenableModel(config, model)
        where = [[[[2]], [[4]]]]  # head 2 at position 4
        locations = {"sources->base": (where, where) if unit else 4}
        before, after = watched(
            {"input_ids": base}, [{"input_ids": source}], unit_locations=locations, output_original_output=True
        )
        assert not torch.equal(before.logits, after.logits)
        found.append(after.logits)
    same(component, *found)
