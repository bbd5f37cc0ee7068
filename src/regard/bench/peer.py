"""The implementations that are compared, and why some cannot do some tasks."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bench.task import Task, sdpa, torch_causal
from regard.extras import how
from regard.functional import attention
from regard.layouts import from_torch
from regard.masks import Causal, Padding

MAX_DENSE_NUMBERS = 1 << 28
"""Most numbers of query_len x key_len that a peer may hold: 1 GiB in float32, a few times over."""


class Prepared(NamedTuple):
    """A call ready to run, and the tensors that were prepared for it."""

    call: Callable[[], Tensor]
    holds: tuple[Tensor, ...] = ()


class Peer(NamedTuple):
    """An implementation: why it cannot do a task, if so, and how to prepare a call."""

    name: str
    cannot: Callable[[Task], str | None]
    prepare: Callable[[Task, tuple[Tensor, ...]], Prepared]


def _regard(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    return Prepared(lambda: attention(*inputs, mask=task.mask, dropout=task.dropout))


def _torch(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    if task.torch_form is None:
        return _torch_dense(task, inputs)
    form = partial(task.torch_form, dropout_p=task.dropout) if task.dropout else task.torch_form
    return Prepared(lambda: form(*inputs))


def _torch_dense(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    mask = task.allowed()
    return Prepared(lambda: sdpa(*inputs, attn_mask=mask), (mask,))


def _no_torch(task: Task) -> str | None:
    return _too_large(task) if task.torch_form is None else None


def _no_torch_dense(task: Task) -> str | None:
    if task.torch_form is None:
        return "a dense bool mask is torch's best form here"
    if task.mask is None or task.torch_form is torch_causal or task.query_len == 1:
        return "no dense mask is needed here"
    return _too_large(task)


def _too_large(task: Task) -> str | None:
    size = task.batch * task.num_scores
    if size <= MAX_DENSE_NUMBERS:
        return None
    return f"a dense mask of {task.queries:,} x {task.length:,} would take {size / 2**30:.0f} GiB"


def _formula(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    query, key, value = inputs
    hidden = None if task.mask is None else ~task.allowed()
    group = task.heads // task.kv_heads

    def call() -> Tensor:
        keys, values = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (key, value))
        scores = query @ keys.transpose(2, 3) / math.sqrt(task.head_dim)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return F.dropout(scores.softmax(-1), task.dropout) @ values

    return Prepared(call, () if hidden is None else (hidden,))


def _no_formula(task: Task) -> str | None:
    scores = task.batch * task.heads * task.num_scores
    return f"its scores alone would take {scores * 4 / 2**30:.1f} GiB" if scores > MAX_DENSE_NUMBERS else None


def _flex(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if task.rule is not None:
        batch = task.batch if task.batch > 1 else None
        blocks = create_block_mask(task.rule, batch, None, task.queries, task.length, device=task.device)
    run = compiled(flex_attention)
    return Prepared(lambda: run(*inputs, block_mask=blocks, enable_gqa=task.heads != task.kv_heads))


def _no_flex(task: Task) -> str | None:
    if task.dropout:
        return "it has no dropout"
    if task.backward and task.device.type == "cpu":
        return "it has no backward pass on the CPU"
    if task.rule is not None and task.batch * task.num_scores > MAX_DENSE_NUMBERS:
        return f"making its block mask looks at {task.queries:,} x {task.length:,} cells"
    return None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for exactly these shapes, without caches from earlier tasks."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _flash(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    if inputs[0].dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"it takes float16 and bfloat16, not {inputs[0].dtype}")
    run = import_module("flash_attn").flash_attn_func
    more: dict[str, Any] = {"causal": task.mask is not None, "dropout_p": task.dropout}
    if task.window is not None:
        more["window_size"] = (task.window - 1, 0)

    def call() -> Tensor:
        output: Tensor = run(*(tensor.transpose(1, 2) for tensor in inputs), **more)
        return output.transpose(1, 2)

    return Prepared(call)


def _no_flash(task: Task) -> str | None:
    if not find_spec("flash_attn"):
        return "flash-attn is not installed"
    if task.mask is None or task.window is not None or isinstance(task.mask, Causal):
        return None
    return "of flash-attn's masks, causal and window alone are compared"


def _torch_layer(task: Task, dtype: torch.dtype) -> nn.MultiheadAttention:
    """The layer whose weights all peers use. Its biases are zero, since x-transformers has none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = nn.MultiheadAttention(task.heads * task.head_dim, task.heads, batch_first=True)
    return layer.to(task.device, dtype).eval()


def _regard_layer(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    (x,) = inputs
    layer = from_torch(_torch_layer(task, x.dtype))
    return Prepared(lambda: layer(x, mask=task.mask))


def _nn_layer(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    (x,) = inputs
    layer = _torch_layer(task, x.dtype)
    if task.mask is None:
        return Prepared(lambda: layer(x, x, x, need_weights=False)[0])
    hidden = ~task.allowed()  # there, True hides
    arguments: dict[str, Any] = {"attn_mask": hidden[0, 0], "is_causal": isinstance(task.mask, Causal)}
    if isinstance(task.mask, Padding):
        hidden = hidden[:, 0, 0].contiguous()
        arguments = {"key_padding_mask": hidden}
    return Prepared(lambda: layer(x, x, x, need_weights=False, **arguments)[0], (hidden,))


def _x_layer(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    (x,) = inputs
    source = _torch_layer(task, x.dtype)
    causal = isinstance(task.mask, Causal)
    make = import_module("x_transformers.x_transformers").Attention
    layer = make(dim=source.embed_dim, heads=task.heads, dim_head=task.head_dim, causal=causal, flash=True)
    layer = layer.to(x.device, x.dtype).eval()
    with torch.no_grad():
        for mine, weight in zip((layer.to_q, layer.to_k, layer.to_v), source.in_proj_weight.chunk(3), strict=True):
            mine.weight.copy_(weight)
        layer.to_out.weight.copy_(source.out_proj.weight)
    if task.mask is None or causal:
        return Prepared(lambda: layer(x))
    allowed = task.allowed()
    arguments = {"attn_mask": allowed[0, 0]}
    if isinstance(task.mask, Padding):
        allowed = allowed[:, 0, 0].contiguous()
        # as `context_mask`: passed as `mask` it would also zero the output of padding, which is extra work
        arguments = {"context_mask": allowed}
    return Prepared(lambda: layer(x, **arguments), (allowed,))


def _no_x_layer(task: Task) -> str | None:
    return None if find_spec("x_transformers") else f"x-transformers is not installed: {how('bench')}"


FUNCTIONS = (
    Peer("regard", lambda task: None, _regard),
    Peer("torch", _no_torch, _torch),
    Peer("torch, dense mask", _no_torch_dense, _torch_dense),
    Peer("FlexAttention", _no_flex, _flex),
    Peer("formula", _no_formula, _formula),
)
ON_A_GPU = (Peer("flash-attn", _no_flash, _flash),)
LAYERS = (
    Peer("regard", lambda task: None, _regard_layer),
    Peer("nn.MultiheadAttention", lambda task: None, _nn_layer),
    Peer("x-transformers", _no_x_layer, _x_layer),
)


def peers(task: Task) -> tuple[Peer, ...]:
    """The implementations for this kind of task, regard first."""
    if task.layer:
        return LAYERS
    return FUNCTIONS + ON_A_GPU if task.device.type == "cuda" else FUNCTIONS


Results = tuple[Tensor, ...]


def work(task: Task, peer: Peer, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Results], tuple[Tensor, ...]]:
    """A function that does a peer's whole work, output and gradients if needed; and the tensors prepared for it."""
    with torch.set_grad_enabled(task.backward), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of other libraries
        prepared = peer.prepare(task, inputs)

    def run() -> Results:
        with torch.set_grad_enabled(task.backward):
            output = prepared.call()
            if not task.backward:
                return (output,)
            return (output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output)))

    return run, prepared.holds


def difference(ours: Results, theirs: Results) -> float:
    """The largest difference between two results, relative to the largest number in ours."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return math.inf
        most = (a.float() - b.float()).abs().max() / a.float().abs().max()
        shares.append(math.inf if most.isnan() else float(most))
    return max(shares)
