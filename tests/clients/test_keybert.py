"""KeyBERT: words of a text that are nearest to it, by embeddings."""

import pytest
import torch
import transformers

from test_huggingface import SIZES, drawn

keybert = pytest.importorskip("keybert", reason="keybert is not installed")
backend = pytest.importorskip("keybert.backend", reason="keybert is not installed")


class Means(backend.BaseEmbedder):
    """A text as the mean of the states of its tokens."""

    def __init__(self, model, tokenizer):
        super().__init__()
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def embed(self, documents, verbose=False):
        texts = self.tokenizer(list(documents), padding=True, return_tensors="pt")
        real = texts["attention_mask"][..., None]
        return ((self.model(**texts).last_hidden_state * real).sum(1) / real.sum(1)).numpy()


def test_keywords_and_their_distances_are_eagers(tokenizer, same):
    text = "the cat sat on a mat, a dog runs far over the old sea, moon shines bright"
    model = drawn(transformers.BertModel(transformers.BertConfig(**SIZES)))
    found = []
    for implementation in ("regard", "eager"):
        model.set_attn_implementation(implementation)
        found.append(keybert.KeyBERT(Means(model, tokenizer)).extract_keywords(text, keyphrase_ngram_range=(1, 2)))
    assert [phrase for phrase, _ in found[0]] == [phrase for phrase, _ in found[1]]
    same("extract_keywords", *([distance for _, distance in one] for one in found))
