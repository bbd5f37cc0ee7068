"""Weights of transformers' models as other libraries use them: pointers, copies, gradients, loops over rows."""

import copy
import ctypes
import gc
import io
import pickle
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import send_to_device
from einops import rearrange, reduce
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from comparing import assert_close
from regard.huggingface import LazyWeights, attend, mask_for_transformers
from regard.huggingface import weights as module
from regard.huggingface.parts import LazyGradient, Place
from regard.observation import MAX_NUMBERS_AT_ONCE
from test_huggingface import CAUSAL, ENCODERS, SEQ2SEQ, Layer, heads, pair, some_tokens, state, weights

LONG = 8209  # of one head, more weights than are made at once


def long() -> tuple[LazyWeights, Tensor, Tensor]:
    query, key = torch.randn(1, 1, LONG, 5), torch.randn(1, 1, LONG, 5)
    lazy = attend(Layer(), query, key, key, mask_for_transformers(1, LONG, LONG), output_attentions=True)[1]
    assert isinstance(lazy, LazyWeights)
    assert lazy.numel() > MAX_NUMBERS_AT_ONCE
    return lazy, query, key


def read_at(pointer: int, shape: torch.Size) -> Tensor:
    return torch.tensor(list((ctypes.c_float * shape.numel()).from_address(pointer))).view(shape)


# --- pointers and copies ------------------------------------------------------------------------------------------


def test_what_a_pointer_points_to_lives_as_long_as_the_weights():
    lazies = [weights(), weights(), weights()[0]]
    pointers = [lazy.data_ptr() for lazy in lazies]
    gc.collect()
    _ = [torch.randn(lazies[0].shape) for _ in range(50)]  # which take whatever was given back
    for lazy, pointer in zip(lazies, pointers, strict=True):
        assert_close(read_at(pointer, lazy.shape), lazy.dense())
        assert lazy.data_ptr() == pointer == lazy.untyped_storage().data_ptr()


def test_safetensors_writes_the_weights(tmp_path):
    lazies = {"0": weights(), "1": weights(), "head": weights()[0, 3]}
    save_file(lazies, tmp_path / "weights.safetensors")
    for name, read in load_file(tmp_path / "weights.safetensors").items():
        assert_close(read, lazies[name].dense())


def test_what_is_written_through_a_pointer_or_into_a_copy_is_not_in_the_weights():
    lazy = weights()
    before = lazy.dense()
    (ctypes.c_float * lazy.numel()).from_address(lazy.data_ptr())[0] = 7.0
    lazy.untyped_storage().fill_(1)
    lazy.numpy()[:] = 2.0
    lazy.dense().zero_()
    for _ in range(3):
        lazy[0, 1, 2].zero_()
        lazy[0, 1, 2].numpy()[:] = 3.0
        lazy[0, 1, :, 2].fill_(4.0)
    assert torch.equal(lazy.dense(), before)
    assert torch.equal(lazy[0, 1, 2], before[0, 1, 2])


def test_after_a_cache_what_is_kept_is_not_written_into():
    lazy = weights(query_len=1)
    before = lazy.dense()
    lazy[0, 1].dense().zero_()
    lazy[0, 1, 0].zero_()
    lazy.dense().zero_()
    assert before.sum() > 1
    assert torch.equal(lazy.dense(), before)


def test_pointers_to_many_weights_are_refused_with_advice(tmp_path):
    lazy, *_ = long()
    for use in (lazy.data_ptr, lazy.untyped_storage, lazy.numpy, lambda: save_file({"w": lazy}, tmp_path / "w")):
        with pytest.raises(ValueError, match=r"not made.*weights\[0, 3, -64:, -64:\]"):
            use()


def test_who_asks_in_c_for_a_pointer_is_refused():
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(weights())


def test_every_way_to_copy_or_send_gives_the_numbers():
    lazy = weights()
    whole = lazy.dense()
    torch.save((lazy, lazy[0]), file := io.BytesIO())
    file.seek(0)
    for copied in (
        torch.load(file)[0], pickle.loads(pickle.dumps(lazy)), pickle.loads(ForkingPickler.dumps(lazy)),
        copy.copy(lazy), copy.deepcopy(lazy), torch.from_dlpack(lazy), torch.from_numpy(np.from_dlpack(lazy)),
        torch.as_tensor(np.asarray(lazy)), torch.as_tensor(np.array(lazy, dtype="float64")),
        torch.tensor(lazy.tolist()),
    ):  # fmt: skip
        assert_close(copied, whole.to(copied.dtype))


def test_layers_are_stacked_squeezed_unpacked_and_rearranged_as_tensors_are():
    layers = [weights()[:1] for _ in range(3)]
    whole = [layer.dense() for layer in layers]
    assert_close(torch.stack([layer.squeeze(0) for layer in layers]), torch.stack(whole).squeeze(1))
    assert_close(torch.stack([layer.squeeze() for layer in layers]).mean((0, 1)), torch.stack(whole).mean((0, 2))[0])
    assert_close(torch.cat(layers, 1).amax(1), torch.cat(whole, 1).amax(1))
    assert_close(rearrange(layers[0], "b h i j -> b i j h"), whole[0].permute(0, 2, 3, 1))
    assert_close(reduce(layers, "l b h i j -> b i j", "mean"), torch.stack(whole).mean((0, 2)))
    first, *others = layers[0][0]
    assert_close(first, whole[0][0, 0])
    assert_close(torch.stack(others), whole[0][0, 1:])
    assert_close(layers[0].unbind(0)[0], whole[0][0])
    assert bool((layers[0] == whole[0]).all())
    assert (
        f"{layers[0][0]} {layers[0]}"
        == "LazyWeights([6, 11, 11], torch.float32) LazyWeights([1, 6, 11, 11], torch.float32)"
    )


# --- what changes no number stays lazy ----------------------------------------------------------------------------

SAME: dict[str, Any] = {
    "to device": lambda x: x.to("cpu"), "to dtype": lambda x: x.to(torch.float32),
    "to tensor": lambda x: x.to(torch.ones(1)), "copied": lambda x: x.to("cpu", copy=True),
    "to both": lambda x: x.to(device="cpu", dtype=torch.float32, non_blocking=True),
    "cpu": Tensor.cpu, "float": Tensor.float, "detach": Tensor.detach, "data": lambda x: x.data, "clone": Tensor.clone,
    "torch.clone": torch.clone, "contiguous": Tensor.contiguous, "no gradient": lambda x: x.requires_grad_(False),
    "type": lambda x: x.type(torch.float32), "type_as": lambda x: x.type_as(torch.ones(1)), "deepcopy": copy.deepcopy,
    "accelerate": lambda x: send_to_device({"w": (x,)}, "cpu")["w"][0],
    "all": lambda x: x[...], "row of one": lambda x: x[0],
    "head": lambda x: x[0][0], "unbind": lambda x: x.unbind(0)[0], "squeeze": lambda x: x.squeeze(0),
    "half": Tensor.half, "double": Tensor.double, "bfloat16": Tensor.bfloat16, "elsewhere": lambda x: x.to("meta"),
}  # fmt: skip


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_changes_no_number_stays_lazy_at_any_length(change):
    lazy, *_ = long()
    changed = change(lazy)
    assert isinstance(changed, LazyWeights)
    small = weights()[:1, :1]
    expected = change(small.dense())
    assert (change(small).shape, change(small).dtype, change(small).device) == (
        expected.shape, expected.dtype, expected.device
    )  # fmt: skip
    if expected.device.type != "meta":
        assert torch.equal(change(small).dense(), expected)


def test_an_empty_tensor_like_the_weights_needs_none_of_them():
    lazy, *_ = long()
    assert lazy.double().new_zeros(3).dtype == torch.float64


def test_weights_without_a_graph_are_no_leaf_of_one():
    for use in (lambda: weights().requires_grad_(), lambda: setattr(weights(), "requires_grad", True)):
        with pytest.raises(ValueError, match=r"made without a graph.*\.dense\(\)\.requires_grad_\(\)"):
            use()
    with pytest.raises(ValueError, match="would write into a tensor that holds no numbers"):
        weights().data = torch.zeros(2, 6, 11, 11)


# --- loops over layers, heads and rows ----------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch) -> list[Place]:
    """The rectangles that are computed."""
    places: list[Place] = []
    compute = module.WeightsOfCall._made

    def counted(self: Any, place: Place) -> Tensor:
        places.append(place)
        return compute(self, place)

    monkeypatch.setattr(module.WeightsOfCall, "_made", counted)
    return places


def test_a_head_is_computed_alone(made):
    lazy = weights()
    for use in (lambda: lazy[0][3][5], lambda: lazy[0, 3].mean(), lambda: lazy.squeeze(1)[0][3, :, 4:6]):
        made.clear()
        use()
        assert {place[:2] for place in made} <= {(range(1), range(3, 4))}
    lazy[0], lazy[:, 2], lazy[1][4]
    assert sum(place.cells() for place in made) <= 11 * 11


def test_some_heads_have_their_own_observation():
    lazy = weights()
    whole = lazy.dense()
    assert_close(lazy[1, 3].observation.received(), whole[1:, 3:4].sum(2))
    assert_close(lazy[:, 2:4].observation.max_score(), lazy.observation.max_score()[:, 2:4])


LOOPS: dict[str, Any] = {
    "rows": lambda w, n: [w[0, 3, i] for i in range(n)],
    "rows of a head": lambda w, n: [w[0][3][i] for i in range(n)],
    "backwards": lambda w, n: [w[0, 3, i] for i in reversed(range(n))],
    "at random": lambda w, n: [w[0, 3, 89 * i % n] for i in range(n)],
    "columns": lambda w, n: [w[0, 3, :, i] for i in range(n)],
    "numbers": lambda w, n: [w[0, 3, i, j] for i in range(0, n, 50) for j in range(n)],
    "heads of rows": lambda w, n: [w[0, h, i] for i in range(n) for h in range(w.shape[1])],
    "rows of heads": lambda w, n: [row for h in w[0] for row in [h[i] for i in range(n)]],
    "strips": lambda w, n: [w[0, 3, i : i + 7, 5:] for i in range(n)],
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop_computes_hardly_more_than_all_at_once(made, loop):
    length = 211
    lazy = weights(length, length)
    given = loop(lazy, length)
    heads_seen = len({place[:2] for place in made})
    assert len(made) <= 10 * heads_seen  # and not one for each of hundreds of rows
    assert sum(place.cells() for place in made) <= 3 * heads_seen * length * length
    for one, expected in zip(given, loop(lazy.dense(), length), strict=True):
        assert_close(one, expected)


def test_what_is_kept_for_loops_has_a_bound(monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT_WEIGHTS", 5000)
    lazy = weights(37, 37)
    whole = lazy.dense()
    for row in range(2):
        for i in range(37):
            for head in range(6):
                assert_close(lazy[row, head, i], whole[row, head, i])
                assert sum(kept.numel() for _, kept in lazy.parts._blocks.values()) <= 5000


def test_numbers_that_were_kept_in_inference_mode_are_ordinary_ones():
    lazy, factor = weights(), torch.ones(11, requires_grad=True)
    with torch.inference_mode():
        lazy[0, 1, 2], lazy[0, 1, 3]
    (lazy[0, 1, 2] * factor).sum().backward()
    assert_close(factor.grad, lazy[0, 1, 2])


# --- gradients ----------------------------------------------------------------------------------------------------

FAMILIES = {
    **{name: CAUSAL[name] for name in ("GPT-2", "Llama", "Gemma2, softcap", "GPT-OSS, sinks", "Mistral, windows")},
    "BERT": ENCODERS["BERT"],
    "T5": SEQ2SEQ["T5, position bias"],
}


def ran(model: nn.Module, tokens: Tensor, **inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """A loss of the output alone, and all attentions."""
    output = model(tokens, output_attentions=True, **inputs)
    found = [layer for name in output if name.endswith("attentions") for layer in output[name]]
    return (state(output) * torch.linspace(-1, 1, state(output).numel()).view_as(state(output))).sum(), found


def both(family: str) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    experts = family.startswith("GPT-OSS")  # which torch computes in float32 at most
    theirs, ours = pair(*FAMILIES[family], dtype=torch.float32 if experts else torch.float64)
    given = {"tokens": some_tokens()}
    if family == "T5":
        given["decoder_input_ids"] = some_tokens(7)
    return theirs, ours, given


def close(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    if theirs is None:
        return
    scale = theirs.abs().max().clamp(min=1e-6)
    assert_close(torch.as_tensor(ours) / scale, theirs / scale, tolerance=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_with_respect_to_attentions_is_eagers(family):
    theirs, ours, given = both(family)
    results = []
    for model in (theirs, ours):
        loss, found = ran(model, **given)
        results.append(torch.autograd.grad(loss, found))
    for actual, expected in zip(results[1], results[0], strict=True):
        assert isinstance(actual, LazyGradient)
        close(actual, expected)
        close(actual[0, 1, 2:4, 3], expected[0, 1, 2:4, 3])
        close(actual[1][2], expected[1][2])


def retained(model: nn.Module, given: dict[str, Any]) -> list[Tensor]:
    """Gradients of attentions, of parts of them, and of parameters, of a loss in which both take part."""
    loss, found = ran(model, **given)
    row, head = found[0][0], found[-1][1][2]
    kept = [*found, row, head]
    seen: list[Tensor] = []
    for one in kept:
        one.retain_grad()
    found[0].register_hook(seen.append)
    loss = loss + row.pow(2).sum() + (head[3:5] + 1e-3).log().sum() + found[0][:, 2, -1].sum()
    loss = loss + found[-1][..., 0].pow(2).sum() + sum(found[0][0, 3, i].pow(2).sum() for i in range(7))
    model.zero_grad()
    loss.backward()
    return [one.grad for one in kept] + seen + [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FAMILIES)
def test_attentions_retain_their_gradients_and_those_of_parameters_are_eagers(family):
    theirs, ours, given = both(family)
    for actual, expected in zip(retained(ours, given), retained(theirs, given), strict=True):
        close(actual, expected)


def test_a_hook_that_changes_the_gradient_changes_what_goes_on():
    theirs, ours, given = both("GPT-2")
    results = []
    for model in (theirs, ours):
        loss, found = ran(model, **given)
        found[0].register_hook(lambda gradient: 0.5 * gradient)
        found[1].register_hook(lambda gradient: gradient.clamp(min=0))
        loss.backward()
        results.append([p.grad for p in model.parameters()])
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected)


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_gradients_of_attentions_can_be_differentiated_again(family):
    theirs, ours, given = both(family)
    results = []
    for model in (theirs, ours):
        loss, found = ran(model, **given)
        gradients = torch.autograd.grad(loss, [*found, found[0]], create_graph=True)[:-1]
        sum((one[0] * of[0]).pow(2).sum() for one, of in zip(gradients, found, strict=True)).backward()
        results.append([p.grad for p in model.parameters()])
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected)


def test_gradients_add_up_over_backward_passes_and_within_one_graph():
    theirs, ours, given = both("GPT-2")
    results = []
    for model in (theirs, ours):
        loss, found = ran(model, **given)
        found[0].retain_grad()
        loss.backward(retain_graph=True)
        (loss + found[0].pow(2).sum()).backward()
        results.append(found[0].grad)
    close(results[1], results[0])


def test_hooks_on_saved_tensors_change_no_gradient():
    theirs, ours, given = both("GPT-2")
    loss, found = ran(theirs, **given)
    expected = torch.autograd.grad(loss, found)
    with torch.autograd.graph.save_on_cpu():
        loss, found = ran(ours, **given)
    for actual, of_eager in zip(torch.autograd.grad(loss, found), expected, strict=True):
        close(actual, of_eager)


def test_a_gradient_at_any_length_holds_no_square():
    query, key, value, given = torch.randn(4, 1, 2, LONG, 5)
    query.requires_grad_()
    output, lazy = attend(
        Layer(), query, key[:, :1], value[:, :1], mask_for_transformers(1, LONG, LONG), output_attentions=True
    )
    lazy.retain_grad()
    row = lazy[0, 1, -2]
    ((output.transpose(1, 2) * given).sum() + row.pow(2).sum()).backward()
    expected = given[0, 1, -3:] @ value[0, 0].T
    expected[1] += 2 * row.detach()
    assert_close(lazy.grad[0, 1, -3:], expected)
    with pytest.raises(ValueError, match=r"LazyGradient.*not made.*gradient\[0, 3, -64:, -64:\]"):
        lazy.grad.sum()


def test_in_training_the_gradient_is_that_of_weights_before_dropout():
    given = heads(11, 11)
    given.query.requires_grad_()
    layer = Layer().train()
    torch.manual_seed(3)
    output, lazy = attend(layer, *given, None, dropout=0.4, output_attentions=True)
    torch.manual_seed(3)
    plain, _ = attend(layer, *given, None, dropout=0.4)
    assert torch.equal(output, plain)
    weight = torch.randn_like(output)
    (gradient,) = torch.autograd.grad((output * weight).sum(), lazy, retain_graph=True)
    # the output is linear in the weights: summed over keys, gradient times weight is what each query gives
    of_queries = (output * weight).sum(-1).transpose(1, 2)
    assert_close((gradient.dense() * lazy).sum(-1), of_queries, tolerance=1e-5)
    assert 0.2 < (gradient == 0).float().mean() < 0.6
    assert_close(gradient[1, 2:5, 3:9, 4:], gradient.dense()[1, 2:5, 3:9, 4:])
    (again,) = torch.autograd.grad((output * weight).sum(), lazy, create_graph=True)
    assert_close(again, gradient.dense())


def test_after_a_cache_gradients_are_those_without_one():
    given = heads(4, 11)
    given.key.requires_grad_()
    output, lazy = attend(Layer(), *given, mask_for_transformers(2, 4, 11, q_offset=7), output_attentions=True)
    (gradient, of_key) = torch.autograd.grad(output.pow(2).sum() + lazy.pow(3).sum(), [lazy, given.key])
    dense = regard.observe(given.query, given.key, mask=regard.Causal(7)).weights()
    grouped = given.value.repeat_interleave(dense.shape[1] // given.value.shape[1], 1)
    loss = (dense @ grouped).pow(2).sum() + dense.pow(3).sum()
    for actual, expected in zip((gradient, of_key), torch.autograd.grad(loss, [dense, given.key]), strict=True):
        close(actual, expected)


def test_a_recorded_model_has_gradients_of_attentions_and_a_head_taken_out_has_none():
    theirs, ours, given = both("GPT-2")
    loss, found = ran(theirs, **given)
    expected = torch.autograd.grad(loss, found)
    with regard.record(ours):
        loss, found = ran(ours, **given)
    for actual, of_eager in zip(torch.autograd.grad(loss, found), expected, strict=True):
        close(actual, of_eager)
    with regard.intervene(ours, regard.Ablate(0, 1)):
        loss, found = ran(ours, **given)
    gradient = torch.autograd.grad(loss, found)[0]
    assert (gradient[:, 1] == 0).all()
    assert (gradient[:, 2] != 0).any()


def enable_checkpointing(model: Any) -> None:
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def test_under_activation_checkpointing_losses_of_attentions_are_eagers_and_gradients_of_them_are_refused():
    theirs, ours, given = both("GPT-2")
    results = []
    for model in (theirs, ours):
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        enable_checkpointing(model.train())
        loss, found = ran(model, **given, use_cache=False)
        (loss + found[0].pow(2).sum() + found[1][0, 3, 2].sum()).backward()
        results.append([p.grad for p in model.parameters()])
    for actual, expected in zip(results[1], results[0], strict=True):
        close(actual, expected)
    loss, found = ran(ours, **given, use_cache=False)
    for use in (found[0].retain_grad, lambda: found[0].register_hook(print), lambda: found[1][0].retain_grad(),
                lambda: torch.autograd.grad(loss, found, allow_unused=True),
                lambda: torch.autograd.grad(loss, inputs=found[0])):  # fmt: skip
        with pytest.raises(ValueError, match="not on the way to the model's output"):
            use()


def test_weights_of_no_output_have_no_gradient_of_one():
    given = heads(11, 11)
    given.query.requires_grad_()
    scoring = {"mask": None, "bias": None, "scale": None, "softcap": None, "sink": None, "additive": None}
    lazy = LazyWeights(given, scoring)
    lazy.pow(2).sum().backward()
    assert given.query.grad is not None
    with pytest.raises(ValueError, match="not on the way"):
        lazy.retain_grad()


def test_functional_transforms_have_eagers_gradients():
    theirs, ours, _ = both("GPT-2")
    given = torch.randn(1, 5, 48, dtype=torch.float64)
    results = []
    for model in (theirs, ours):

        def loss(x: Tensor, model: nn.Module = model) -> Tensor:
            output = model(inputs_embeds=x, output_attentions=True, use_cache=False)
            return output.logits.pow(2).sum() + output.attentions[0].pow(2).sum()

        results.append(torch.func.grad(loss)(given))
    close(results[1], results[0])


def test_without_gradients_weights_are_on_no_graph():
    _, ours, given = both("GPT-2")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss, found = ran(ours, **given)
        assert not loss.requires_grad
        assert not found[0].requires_grad
        assert found[0].grad_fn is None
        with pytest.raises(RuntimeError):
            found[0].retain_grad()


def test_after_the_backward_pass_a_loss_keeps_no_query_alive():
    _, ours, given = both("GPT-2")
    gc.collect()
    gc.disable()
    try:
        loss, found = ran(ours, **given)
        found[0][0, 1, 2]
        query = weakref.ref(found[0].parts.call[0])
        loss.backward()
        del found
        assert query() is None
    finally:
        gc.enable()
