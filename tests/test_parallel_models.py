"""Whole models over many processes are the models: logits, loss and gradients, and what cannot be so is refused."""

import pytest
import torch

import regard
from comparing import assert_close
from ranks import Raised, Ranks
from regard import Causal, Document, Padding
from regard.parallel import Shards
from sharded_models import (
    call,
    cuts,
    grid_step,
    made,
    recorded,
    records_nothing,
    refused,
    regard_model,
    resume,
    share_step,
    step_and_save,
    whole_step,
)
from small import VOCAB


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(4)
    yield started
    started.close()


LENGTH = 12
PIECES = Shards([[range(5), range(9, 11)], [range(5, 9), range(11, 12)]])


def text(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def targets(batch=2, length=LENGTH):
    """With some that do not count, unevenly between ranks."""
    found = text(batch, length)
    found[0, :4] = -100
    return found


def assert_is_the_whole(ranks, kind, changes, given, shards, source_shards=None, train=False, size=2, tolerance=1e-9):
    wanted = targets()
    answers = ranks.results(share_step, kind, changes, given, wanted, shards, source_shards, train, ranks=size)
    loss, logits, grads = whole_step(kind, changes, given, wanted, train)
    joined = shards.join([part for _, part, _ in answers], dim=1)
    assert_close(joined, logits, f"logits of {kind}", tolerance=tolerance)
    for rank, (of_all, _, found) in enumerate(answers):
        assert_close(of_all, loss, f"loss on rank {rank}", tolerance=tolerance)
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert_close(found[name], grad, f"{name} of {kind} on rank {rank}", tolerance=tolerance)


# --- models of regard -------------------------------------------------------------------------------------------------

MODELS = {
    "rotary positions, grouped heads and a window": ("decoder", {"kv_heads": 2, "window": 4}, {}),
    "learned positions, and packed documents": (
        "decoder", {"positions": "learned"}, {"mask": Document.from_lengths([5, 1, 6])}),
    "a rotation of its own in every other layer, with a window": (
        "decoder", {"window": (4, None), "window_theta": 100.0}, {}),
    "alibi, and a softcap": ("decoder", {"positions": "alibi", "softcap": 5.0, "head_norm": True}, {}),
    "rotary positions that depend on the longest": (
        "decoder", {"rotary_scaling": {"kind": "dynamic", "factor": 2.0, "original_context": 6}}, {}),
    "fixed waves, in an encoder with padding and segments": (
        "encoder", {"positions": "sinusoidal", "segments": 2, "norm_first": False},
        {"mask": Padding([12, 7]), "segments": torch.arange(12).expand(2, -1) // 6}),
    "layers of one's own that are checkpointed": ("mine", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_regard_computes_on_its_ranks_what_it_computes_on_one_process(ranks, name):
    kind, changes, given = MODELS[name]
    assert_is_the_whole(ranks, kind, changes, {"tokens": text(), **given}, PIECES)


def test_more_ranks_than_some_have_tokens_for(ranks):
    shards = Shards([[range(3, 7)], [], [range(7, 12)], [range(3)]])
    assert_is_the_whole(ranks, "decoder", {"kv_heads": 3}, {"tokens": text()}, shards, size=4)


def test_an_encoder_decoder_reads_a_text_in_other_shards(ranks):
    given = {"tokens": text(), "source": text(length=9), "source_mask": Padding([9, 4]), "mask": Causal()}
    assert_is_the_whole(
        ranks, "translator", {"positions": "learned"}, given, PIECES, Shards([[range(4, 9)], [range(4)]])
    )


def test_dropout_of_weights_is_that_of_one_process(ranks):
    given = {"tokens": text()}
    assert_is_the_whole(ranks, "decoder", {"attention_dropout": 0.3}, given, Shards.zigzag(12, 2), train=True)


# --- models of transformers -------------------------------------------------------------------------------------------

FOREIGN = {
    "Llama": {},
    "GPT2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "n_inner": 24,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
        "resid_pdrop": 0,
    },
    "Gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "GptOss": {
        "sliding_window": 4,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
    "ModernBert": {"head_dim": None, "local_attention": 6, "global_attn_every_n_layers": 2},
}
RESTARTING = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
REAL = torch.arange(12) >= torch.tensor([[0], [5]])
GIVEN = {
    "whole texts": {},
    "packed texts, told by positions": {"position_ids": RESTARTING, "use_cache": False},
    "padding at the start": {"attention_mask": REAL.long()},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_model_of_transformers_computes_on_its_ranks_what_it_computes_on_one_process(ranks, kind):
    for given in GIVEN.values():
        if kind == "ModernBert" and "position_ids" in given:
            continue
        # norms compute in float32 inside these models
        assert_is_the_whole(ranks, kind, FOREIGN[kind], {"input_ids": text(), **given}, PIECES, tolerance=1e-5)


# --- recordings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "given", "heads"),
    [
        ("decoder", {"kv_heads": 2, "window": 4}, {"tokens": text(), "mask": Document.from_lengths([5, 7])}, [0, 5]),
        ("GptOss", {"sliding_window": 4, "num_local_experts": 3, "num_experts_per_tok": 2,
                    "experts_implementation": "eager"}, {"input_ids": text(), "attention_mask": REAL.long()}, None),
    ],
)  # fmt: skip
def test_what_ranks_recorded_opens_as_one_recording_of_the_whole(ranks, tmp_path, kind, changes, given, heads):
    path = tmp_path / "recording.safetensors"
    names = ranks.results(recorded, kind, changes, given, PIECES, path, heads, ranks=2)
    model = made(kind, changes).eval()
    with regard.record(model, values=True, heads=heads) as alone:
        call(model, given)
    whole = regard.load_recording(path)
    assert list(whole) == list(alone) == list(names[0])
    for name, expected in alone.items():
        found = whole[name]
        assert found.heads == expected.heads
        assert torch.equal(found.tokens, expected.tokens)
        for part in ("query", "key", "value", "lse"):
            assert_close(getattr(found, part), getattr(expected, part), f"{part} of {name}", tolerance=1e-5)
        assert_close(found.weights(), expected.weights(), f"weights of {name}", tolerance=1e-5)
        assert_close(found.entropy(), expected.entropy(), f"entropy of {name}", tolerance=1e-5)


def test_a_recording_without_a_call_is_refused_on_every_rank(ranks):
    assert {answer.kind for answer in ranks.run(records_nothing, ranks=2)} == {"ValueError"}


# --- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_cut_after_its_labels_were_shifted(ranks):
    batch = {
        "input_ids": torch.arange(12)[None], "labels": 100 + torch.arange(12)[None], "name": "a",
        "lengths": torch.ones(3),
    }  # fmt: skip
    first, second = ranks.results(cuts, [batch], PIECES, ranks=2)
    assert first["input_ids"].tolist() == [[0, 1, 2, 3, 4, 9, 10]]
    assert first["targets"].tolist() == [[101, 102, 103, 104, 105, 110, 111]]
    assert second["targets"].tolist() == [[106, 107, 108, 109, -100]]
    assert second["name"] == "a"
    assert second["lengths"].shape == (3,)
    for answer in ranks.run(cuts, [batch, {**batch, "input_ids": batch["input_ids"] + 1}], PIECES, ranks=2):
        assert answer.kind == "ParallelError"
        assert "the ranks must agree on input_ids" in answer.text


# --- data parallelism beside it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_step_on_a_mesh_of_data_and_context_is_that_of_one_process(ranks, way):
    tokens, wanted = text(4), targets(4)
    answers = ranks.results(grid_step, way, {"kv_heads": 2}, tokens, wanted, 0.1)
    model = regard_model("decoder", {"kv_heads": 2})
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for found, parameters in answers:
        assert_close(found, loss.detach())
        for name, parameter in model.named_parameters():
            assert_close(parameters[name], parameter.detach(), f"{name} by {way}", tolerance=1e-9)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # in the process that opens it alone
def test_a_checkpoint_goes_on_with_another_number_of_ranks(ranks, tmp_path):
    changes, batches = {"kv_heads": 2}, [(text(4), targets(4)) for _ in range(2)]
    first, second = (tmp_path / name for name in ("first", "second"))
    ranks.results(step_and_save, changes, *batches[0], first)  # 2 x 2
    ranks.results(step_and_save, changes, *batches[1], second, first, ranks=2)
    model, opened = (regard_model("decoder", changes, seed) for seed in (1, 2))
    optimizer, moments = (torch.optim.AdamW(of.parameters(), lr=0.01) for of in (model, opened))
    for folder, (tokens, wanted) in zip((first, second), batches, strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
        resume(folder, opened, moments)  # in one process
        for (name, here), there in zip(model.named_parameters(), opened.parameters(), strict=True):
            assert_close(there.detach(), here.detach(), f"{name}, {folder.name} step", tolerance=1e-6)
            assert_close(moments.state[there]["exp_avg"], optimizer.state[here]["exp_avg"], name, tolerance=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------

REFUSED = {
    "a cache": ("decoder", {}, {}, "cache", "a cache would hold one rank's tokens as if they were all"),
    "a recording": ("decoder", {}, {}, "recording", "record, gather, intervene and another sharded block cannot"),
    "tokens that were not cut": ("decoder", {}, {}, "whole", "this rank holds 6 of the 12 tokens, got 12; cut"),
    "a classifier": ("classifier", {}, {}, "", "a Classifier reads the state of the first token"),
    "a convolution": ("convolution", {}, {}, "", "0 (Conv1d) mixes tokens outside of regard's attention"),
    "cross-attention without shards": ("translator", {}, {}, "", "source_shards has to say"),
    "a text too long": ("decoder", {"context_length": 11}, {}, "", "12 tokens are more than context_length=11"),
    "generation by transformers": ("Llama", {}, {}, "generate", "a cache, which would hold one rank's tokens"),
    "a loss by transformers": ("Llama", {}, {"labels": text(1)}, "", "the mean over one rank's tokens; take"),
    "weights": ("Llama", {}, {"output_attentions": True}, "", "output_attentions=True, which needs the tokens"),
    "a checkpoint around all": ("Llama", {}, {}, "checkpointed", "runs inside activation checkpointing as a whole"),
    "frequencies of the longest": (
        "Llama", {"max_position_embeddings": 8, "rope_parameters": {
            "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, {}, "", "frequencies of the longest"),
    "positions that are counted": (
        "Roberta", {"pad_token_id": 1, "max_position_embeddings": 20}, {}, "", "counts positions by rules of its own"),
    "packed texts and a cache": ("Llama", {}, {"position_ids": RESTARTING[:1]}, "", "pass use_cache=False"),
    "packed texts in chunks": (
        "Llama4Text", {"attention_chunk_size": 4, "intermediate_size_mlp": 24},
        {"position_ids": RESTARTING[:1], "use_cache": False}, "", "the model's mask has chunks"),
    "positions that padding decides": (
        "OPT", {"word_embed_proj_dim": 16, "ffn_dim": 24}, {"attention_mask": REAL[1:].long()}, "",
        "counts positions by its padding; pass position_ids"),
    "a mask of four axes": ("Llama", {}, {"attention_mask": torch.ones(1, 12, 6, 6)}, "", "attention_mask that is"),
    "recurrence": ("Lfm2", {"layer_types": ["conv", "full_attention"]}, {}, "", "cannot be run on a share of a text"),
    "another implementation": ("Llama", {"attn_implementation": "sdpa"}, {}, "", "attn_implementation='sdpa', whose"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_on_every_rank(ranks, name):
    kind, changes, given, how, said = REFUSED[name]
    for answer in ranks.run(refused, kind, changes, given, how, ranks=2):
        assert isinstance(answer, Raised), answer
        assert answer.kind in ("ValueError", "ShapeError"), answer.trace
        assert said in answer.text, answer.trace


def test_a_rank_with_other_tokens_is_an_error_on_every_rank(ranks):
    first, second = ranks.run(refused, "decoder", {}, {}, "uneven", ranks=2)
    assert second.kind == "ShapeError"
    assert first.kind == "ParallelError"
    assert "rank 1 refused the call" in first.text
