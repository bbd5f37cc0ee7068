"""inseq: attributions of what a model generates to its prompt, by gradients and by attention."""

import pytest

from test_huggingface import CAUSAL, pair

inseq = pytest.importorskip("inseq", reason="inseq is not installed")

PROMPT, ANSWER = "the cat sat on a", "the cat sat on a mat over the sea"
TOKENS = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
@pytest.mark.parametrize("method", ["saliency", "input_x_gradient", "integrated_gradients", "attention"])
def test_attributions_to_a_prompt_are_eagers(method, name, tokenizer, same):
    kind, sizes = CAUSAL[name]
    found = []
    for model in reversed(pair(kind, {**sizes, **TOKENS})):
        wrapped = inseq.load_model(model, method, tokenizer=tokenizer)
        output = wrapped.attribute(PROMPT, ANSWER, show_progress=False)
        scores = output.sequence_attributions[0].target_attributions
        found.append(scores[~scores.isnan()])
    same(method, *found)
