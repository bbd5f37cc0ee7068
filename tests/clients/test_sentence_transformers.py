"""sentence-transformers: embeddings of texts by BERT, pooled, and a step of training."""

import pytest
import torch
import transformers

from test_huggingface import SIZES, drawn

sentences = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules", reason="it has no modules")

TEXTS = ["the cat sat on a mat", "a dog runs far over the old sea", "moon shines bright"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory, tokenizer):
    """One model twice, read from a folder: by regard and by "eager"."""
    folder = tmp_path_factory.mktemp("bert")
    drawn(transformers.BertModel(transformers.BertConfig(**SIZES))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made = []
    for implementation in ("regard", "eager"):
        words = parts.Transformer(str(folder), model_kwargs={"attn_implementation": implementation})
        pooling = parts.Pooling(words.get_word_embedding_dimension(), "mean")
        made.append(sentences.SentenceTransformer(modules=[words, pooling], device="cpu"))
    return made


def test_embeddings_of_texts_of_other_lengths(encoders, same):
    assert encoders[0][0].auto_model.config._attn_implementation == "regard"
    same("encode", *(encoder.encode(TEXTS) for encoder in encoders))
    same("encode, normalized", *(encoder.encode(TEXTS, normalize_embeddings=True) for encoder in encoders))
    same("token embeddings", *(
        [row.clone() for row in encoder.encode(TEXTS, output_value="token_embeddings")] for encoder in encoders
    ))  # fmt: skip


def test_gradients_of_a_similarity(encoders, same):
    found = []
    for encoder in encoders:
        encoder.zero_grad()
        vectors = encoder(encoder.tokenize(TEXTS))["sentence_embedding"]
        torch.cosine_similarity(vectors[:1], vectors[1:]).sum().backward()
        found.append([p.grad for p in encoder.parameters() if p.grad is not None])
    same("gradients of a similarity", *found)
