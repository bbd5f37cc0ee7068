"""Transforms of torch.func: one call for all that vmap adds, gradients for each, and what is refused."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

from comparing import assert_close
from regard import (
    Additive,
    Alibi,
    Causal,
    Decoder,
    Dense,
    Document,
    Encoder,
    KernelError,
    ModelConfig,
    Padding,
    RelativeBias,
    Where,
    Window,
    attention,
    attention_with_lse,
    plan,
)
from regard.kernels.strips import binding, transforms

pytestmark = pytest.mark.skipif(binding.compiled(torch.float32) is None, reason="there is no compiled library")

TEXTS, BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 3, 2, 4, 2, 37, 45


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of some texts."""
    draw = torch.Generator().manual_seed(0)
    sizes = (HEADS, QUERIES, 16), (KV_HEADS, KEYS, 16), (KV_HEADS, KEYS, 24)
    return [torch.randn(TEXTS, BATCH, *size, generator=draw).to(dtype) for size in sizes]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": Causal()},
    "window, softcap": {"mask": Causal() & Window(7), "softcap": 2.0},
    "documents": {"mask": Document(torch.arange(QUERIES) // 11, torch.arange(KEYS) // 11)},
    "padding": {"mask": Padding([5, 31])},
    "cells of each batch index": {"mask": Dense(torch.rand(BATCH, 1, QUERIES, KEYS) < 0.4)},
    "ALiBi": {"bias": Alibi(HEADS), "mask": Causal()},
    "bias": {"bias": torch.randn(HEADS, QUERIES, KEYS)},
    "bias of each batch index": {"bias": torch.randn(BATCH, HEADS, QUERIES, KEYS)},
    "sink": {"sink": torch.linspace(-1, 2, HEADS), "mask": Causal()},
}


DATA: dict[str, tuple[Tensor, Any]] = {
    "cells": (torch.rand(TEXTS, QUERIES, QUERIES) < 0.4, lambda data: {"mask": Dense(data)}),
    "padding": (torch.tensor([[5, 9], [37, 20], [1, 2]]), lambda data: {"mask": Causal() & Padding(data)}),
    "real tokens": (torch.rand(TEXTS, BATCH, QUERIES) < 0.5, lambda data: {"mask": Padding(data)}),
    "documents": (torch.arange(QUERIES).repeat(TEXTS, 1) // 5, lambda data: {"mask": Document(data)}),
    "offset": (torch.tensor([[0, 3], [9, 1], [0, 0]]), lambda data: {"mask": Causal(offset=data)}),
    "bias": (torch.randn(TEXTS, HEADS, QUERIES, QUERIES), lambda data: {"bias": data}),
    "slopes": (torch.rand(TEXTS, HEADS), lambda data: {"bias": Alibi(slopes=data), "mask": Causal()}),
    "table": (torch.randn(TEXTS, 32, HEADS), lambda data: {"bias": RelativeBias(data)}),
    "sink": (torch.randn(TEXTS, HEADS), lambda data: {"sink": data}),
}
"""What may be another for each text."""


def expected(function: Any, *stacked: Tensor) -> Any:
    """What vmap of a function is: its results of one after another."""
    found = [function(*one) for one in zip(*stacked, strict=True)]
    if isinstance(found[0], Tensor):
        return torch.stack(found)
    return tuple(map(torch.stack, zip(*found, strict=True)))


def assert_all_close(ours: Any, right: Any, **options: Any) -> None:
    if isinstance(ours, Tensor):
        ours, right = (ours,), (right,)
    for one, other in zip(ours, right, strict=True):
        assert_close(one, other, **options)


@pytest.mark.parametrize("name", CALLS)
def test_vmap_and_gradients_are_those_of_one_after_another(name: str) -> None:
    def of(kernel: str) -> Any:
        return lambda *three: attention(*three, kernel=kernel, **CALLS[name])

    def loss(kernel: str) -> Any:
        return lambda *three: of(kernel)(*three).sin().sum()

    texts = drawn()
    every = 0, 1, 2
    assert_all_close(vmap(of("native"))(*texts), expected(of("reference"), *texts))
    right = expected(grad(loss("reference"), every), *texts)
    assert_all_close(vmap(grad(loss("native"), every))(*texts), right)
    assert_all_close(grad(lambda *all_of: vmap(loss("native"))(*all_of).sum(), every)(*texts), right)
    learning = [text.requires_grad_() for text in texts]
    vmap(loss("native"))(*learning).sum().backward()
    assert_all_close(tuple(text.grad for text in learning), right)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_vmap_has_the_gradients_of_every_dtype(dtype: torch.dtype) -> None:
    def loss(*three: Tensor) -> Tensor:
        return attention(*three, mask=Causal(), kernel="native").float().square().sum()

    texts = drawn(dtype)
    assert_all_close(vmap(grad(loss, (0, 1, 2)))(*texts), expected(grad(loss, (0, 1, 2)), *texts))
    for ours, right in zip(
        vmap(grad(loss, (0, 1, 2)))(*texts),
        zip(*(torch.autograd.grad(loss(*one), one) for one in _leaves(texts)), strict=True),
        strict=True,
    ):
        assert_close(ours, torch.stack(right))


def _leaves(texts: list[Tensor]) -> list[list[Tensor]]:
    return [[tensor.detach().clone().requires_grad_() for tensor in one] for one in zip(*texts, strict=True)]


def test_what_all_texts_have_in_common_is_given_once() -> None:
    query, key, value = drawn()

    def of(kernel: str) -> Any:
        return lambda query: attention(query, key[0], value[0], mask=Causal(), kernel=kernel)

    assert_close(vmap(of("native"))(query), expected(of("reference"), query))
    moved = query.movedim(0, 2)
    assert_close(vmap(of("native"), in_dims=2, out_dims=1)(moved).movedim(1, 0), expected(of("reference"), query))


def test_vmap_in_vmap_and_the_lse_of_each() -> None:
    three = [tensor.unflatten(0, (1, TEXTS)).expand(2, -1, -1, -1, -1, -1) for tensor in drawn()]

    def of(kernel: str) -> Any:
        return lambda *one: tuple(attention_with_lse(*one, mask=Causal(), kernel=kernel))

    ours = vmap(vmap(of("native")))(*three)
    assert_all_close(ours, expected(lambda *some: expected(of("reference"), *some), *three))


def test_each_text_has_a_gradient_of_its_own_of_a_sink_and_a_bias_that_all_have() -> None:
    texts, sink, bias = drawn(), torch.linspace(-1, 2, HEADS), torch.randn(HEADS, QUERIES, KEYS)

    def of(kernel: str) -> Any:
        def loss(sink: Tensor, *three: Tensor) -> Tensor:
            return attention(*three, sink=sink, bias=bias, kernel=kernel).sin().sum()

        return lambda *three: grad(loss)(sink, *three)

    assert_close(vmap(of("native"))(*texts), expected(of("reference"), *texts))
    learning = bias.clone().requires_grad_()

    def of_bias(kernel: str) -> Tensor:
        total = vmap(lambda *three: attention(*three, bias=learning, kernel=kernel).sin().sum())(*texts).sum()
        return torch.autograd.grad(total, learning)[0]

    assert_close(of_bias("native"), of_bias("reference"))


def test_the_rows_of_a_jacobian_are_gradients_by_vmap() -> None:
    query, key, value = (tensor[0, :, :, :5] for tensor in drawn())

    def of(kernel: str) -> Any:
        return lambda query: attention(query, key, value, mask=Causal(), kernel=kernel)

    assert_close(jacrev(of("native"))(query), jacrev(of("reference"))(query))


def test_many_texts_are_one_call_of_the_library_and_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    names, batches = [], []
    planned = transforms._Form.planned

    def planning(form: Any, *given: Any) -> Any:
        batches.append(form.grid.batch)
        return planned(form, *given)

    def of(*three: Tensor) -> Tensor:
        names.append(plan(*three).kernel)
        return attention(*three)

    monkeypatch.setattr(transforms._Form, "planned", planning)
    texts = [tensor.expand(300, *tensor.shape[1:]) for tensor in (t[:1] for t in drawn())]
    assert_close(vmap(of)(*texts)[-1], attention(*(text[-1] for text in texts)))
    vmap(of)(*(text[:3] for text in texts))
    assert names == ["native", "direct"]
    assert batches == [300 * BATCH]


@pytest.mark.parametrize("kernel", ["native", "strips", "direct"])
@pytest.mark.parametrize("name", DATA)
def test_masks_and_biases_may_be_of_each_text(name: str, kernel: str) -> None:
    data, made = DATA[name]
    texts = [tensor[..., :QUERIES, :] for tensor in drawn()]

    def of(kernel: str) -> Any:
        return lambda data, *three: attention(*three, kernel=kernel, **made(data))

    def loss(kernel: str) -> Any:
        return lambda data, *three: of(kernel)(data, *three).sin().sum()

    every = (0, 1, 2, 3) if data.is_floating_point() else (1, 2, 3)
    assert_all_close(vmap(of(kernel))(data, *texts), expected(of("reference"), data, *texts))
    right = expected(grad(loss("reference"), every), data, *texts)
    assert_all_close(vmap(grad(loss(kernel), every))(data, *texts), right)
    given = grad(lambda *given: vmap(loss(kernel))(*given).sum(), every)(data, *texts)
    assert_all_close(given, right)


@pytest.mark.parametrize("kernel", ["native", "strips"])
def test_a_mask_that_is_a_function_of_the_text_is_left_to_operators(kernel: str) -> None:
    cells, texts = torch.rand(TEXTS, QUERIES, KEYS) < 0.5, drawn()

    def of(kernel: str, here: Tensor | None = None) -> Any:
        def one(cells: Tensor, *three: Tensor) -> Tensor:
            seen = cells if here is None else here
            return attention(*three, mask=Where(lambda batch, head, query, key: seen[query, key]), kernel=kernel)

        return one

    with pytest.raises(KernelError, match="made of"):
        vmap(of(kernel))(cells, *texts)
    assert_close(vmap(of("auto"))(cells, *texts), expected(of("reference"), cells, *texts))
    one = cells[0]
    assert_close(vmap(of(kernel, one))(cells, *texts), expected(of("reference", one), cells, *texts))


@pytest.mark.parametrize("kernel", ["native", "strips", "direct"])
def test_dropout_is_the_same_or_another_for_each_text_as_vmap_is_told(kernel: str) -> None:
    def of(*three: Tensor) -> Tensor:
        return attention(*three, dropout=0.5, kernel=kernel)

    texts = [tensor[:1].expand(TEXTS, *tensor.shape[1:]) for tensor in drawn()]
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(of)(*texts)
    same = vmap(of, randomness="same")(*texts)
    assert_close(same, same[:1].expand_as(same))
    torch.manual_seed(3)
    first = vmap(of, randomness="same")(*texts)
    torch.manual_seed(3)
    assert_close(first[0], of(*(text[0] for text in texts)))
    others = vmap(of, randomness="different")(*texts)
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(others, 2))
    kept, (query, key, _) = torch.eye(KEYS).expand(BATCH, KV_HEADS, KEYS, KEYS), (text[0] for text in texts)

    def weights(key: Tensor) -> Tensor:
        return attention(query, key, kept, dropout=0.5, kernel=kernel)

    def loss(key: Tensor) -> Tensor:
        return (weights(key) * torch.arange(KEYS)).sum()

    keys = key.expand(TEXTS, *key.shape)
    torch.manual_seed(5)
    dropped = vmap(weights, randomness="different")(keys) == 0
    torch.manual_seed(5)
    ours = vmap(grad(loss), randomness="different")(keys)
    for n in range(TEXTS):  # the backward pass drops what the forward pass dropped
        leaf = key.clone().requires_grad_()
        right = attention(query, leaf, kept).masked_fill(dropped[n], 0.0) * 2
        assert_close(ours[n], torch.autograd.grad((right * torch.arange(KEYS)).sum(), leaf)[0])


def test_additive_similarity_is_left_to_operators() -> None:
    query, key, value = drawn()
    additive = Additive(torch.randn(HEADS, 16))

    def of(kernel: str) -> Any:
        return lambda *three: attention(*three, additive=additive, kernel=kernel)

    for kernel in ("native", "strips"):
        with pytest.raises(KernelError, match="additive"):
            vmap(of(kernel))(query, key, value)
    assert_close(vmap(of("auto"))(query, key, value), expected(of("reference"), query, key, value))


@pytest.mark.filterwarnings("ignore:attention. a gradient of a gradient")
@pytest.mark.parametrize("kernel", ["auto", "strips"])
def test_gradients_of_gradients(kernel: str) -> None:
    query, key, value = (tensor[0] for tensor in drawn())
    bias = torch.randn(HEADS, QUERIES, KEYS)

    def of(kernel: str) -> Any:
        return lambda query, bias: attention(query, key, value, bias=bias, mask=Causal(), kernel=kernel).sin().sum()

    which = (0, 1) if kernel == "auto" else (0,)  # with strips, of a bias they would be third derivatives

    def twice(kernel: str) -> Any:
        return grad(lambda *given: sum(x.square().sum() for x in grad(of(kernel), which)(*given)), which)

    assert_all_close(twice(kernel)(query, bias), twice("reference")(query, bias))
    texts = drawn()[0].requires_grad_()

    def penalty(kernel: str) -> Tensor:
        loss = vmap(of(kernel), in_dims=(0, None))(texts, bias).sum()
        of_texts = torch.autograd.grad(loss, texts, create_graph=True)[0]
        return torch.autograd.grad(of_texts.square().sum(), texts)[0]

    assert_close(penalty(kernel), penalty("reference"))


def test_the_library_takes_no_second_gradients_in_torch_func() -> None:
    query, key, value = (tensor[0] for tensor in drawn())

    def of(query: Tensor) -> Tensor:
        return attention(query, key, value, kernel="native").sum()

    with pytest.raises(KernelError, match="one grad"):
        grad(lambda query: grad(of)(query).sum())(query)


@pytest.mark.parametrize("preset", ["gpt2", "llama", "bert", "original"])
def test_models_have_the_gradients_of_each_text_and_may_be_stacked(preset: str) -> None:
    kind = Encoder if preset == "bert" else Decoder
    config = ModelConfig.preset(preset, vocab_size=50, dim=64, heads=8, layers=2)
    models = [kind(config).eval() for _ in range(3)]
    tokens, model = torch.randint(50, (4, 9)), kind(config).eval()

    def loss(parameters: dict[str, Tensor], text: Tensor) -> Tensor:
        found: Tensor = functional_call(model, parameters, (text[None],))
        return found.square().sum()

    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    of_each = vmap(grad(loss), in_dims=(None, 0))(parameters, tokens)
    for name, right in grad(loss)(parameters, tokens[2]).items():
        assert_close(of_each[name][2], right, name, tolerance=1e-4)
    stacked, buffers = stack_module_state(models)
    given = {name: tensor.detach() for name, tensor in (stacked | buffers).items()}
    outputs = vmap(lambda state: functional_call(model, state, (tokens,)))(given)
    for output, one in zip(outputs, models, strict=True):
        assert_close(output, one(tokens))
    drops = kind(ModelConfig.preset(preset, vocab_size=50, dim=64, heads=8, layers=2, dropout=0.5)).train()
    text = tokens[:1].expand(3, -1)
    found = vmap(lambda text: drops(text[None]), randomness="different")(text)
    assert not torch.equal(found[0], found[1])
