"""The strips of a call as a custom operator, one node in a graph of torch.compile, with its backward pass.

The graph holds what stays of a call as a line of text, with the tensors and numbers of mask and bias
(`regard.rules.serialise`), so that one graph works for every length. When the node runs, the compiled library is called
as without a graph, so that lengths and data may be others in every call; the gradients are of strips that are planned
then.
"""

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, library

from regard.biases import Bias, Given
from regard.dropout import Dropout
from regard.kernels.call import Call, learns
from regard.kernels.fused import HALF
from regard.kernels.known import keep
from regard.kernels.strips.engines import ENGINES, NATIVE, Engine, able
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.order import as_laid, by_form, laid_like, likeness_of
from regard.masks import EVERYTHING, Mask
from regard.numerics import wide
from regard.rules import Positioned, Rule, deserialise, serialise, settled
from regard.scores import Scoring
from regard.shapes import Grid
from regard.versions import MAX_HELD_BYTES, equal


def line_of(rule: Rule | None) -> tuple[str | None, list[Tensor], list[int]]:
    """A mask or bias as a line, with its tensors and numbers."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    return None if rule is None else serialise(rule, tensors, numbers), tensors, numbers


attention: Callable[..., Tensor] | None = None
attention_with_lse: Callable[..., tuple[Tensor, Tensor]] | None = None
"""Those of `regard.functional`, which is made of what is here, and sets them."""


class Line(NamedTuple):
    """What a node is told in one line: each argument takes torch time to hand on, and between the layers of a model
    several times as long.

    Attributes:
        mask, bias: as lines of `regard.rules.serialise`. split: how many of the numbers are the mask's.
        by: the name of the engine. learns: whether there will be a backward pass. wants_lse: whether that or the call
            does.
    """

    mask: str
    bias: str | None
    split: int
    by: str
    learns: bool
    wants_lse: bool


def write(call: Call, by: str) -> tuple[list[Tensor], list[Tensor], list[int], str]:
    """The tensors of mask and bias, the numbers of both, and the line of a call."""
    mask, of_mask, numbers = line_of(call.scoring.mask_or_everything)
    bias, of_bias, more = line_of(call.scoring.bias)
    flags = f"{int(call.learns)} {int(call.learns or call.wants_lse)}"
    return of_mask, of_bias, [*numbers, *more], f"{mask}\n{bias or ''}\n{by} {len(numbers)} {flags}"


MAX_LINES = 64
"""Lines of nodes that are read once."""


@functools.lru_cache(MAX_LINES)
def read(line: str) -> Line:
    """What `write` wrote."""
    mask, bias, rest = line.split("\n")
    by, split, learns, wants_lse = rest.split()
    return Line(mask, bias or None, int(split), by, learns == "1", wants_lse == "1")


def attended(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, of_mask: list[Tensor], of_bias: list[Tensor],
    numbers: list[int], line: Line, scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Output and lse of a node without dropout, of which nothing is kept for gradients, as without a graph."""
    assert attention is not None
    assert attention_with_lse is not None
    last = key.shape[2] - query.shape[2]
    mask = _mask(line.mask, of_mask, numbers[: line.split], last)
    bias = _bias(line.bias, of_bias, numbers[line.split :], last)
    seen, rest = None if mask is EVERYTHING else mask, {"scale": scale, "softcap": softcap, "sink": sink}
    if line.wants_lse:
        return attention_with_lse(query, key, value, mask=seen, bias=bias, **rest)
    return attention(query, key, value, mask=seen, bias=bias, **rest), None


def _strips(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, of_mask: list[Tensor], of_bias: list[Tensor],
    numbers: list[int], line: str, scale: float, softcap: float | None, seed: Tensor | None, rate: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`Strips` as a custom operator: output, log-sum-exp, and the output in float32 if the backward pass takes that,
    else nothing. A graph wants to know how they lie in memory: as `laid_like` the query, and gradients likewise.

    Args:
        of_mask, of_bias, numbers, line: as of `write`. seed, rate: of the dropout.
    """
    said, none = read(line), query.new_empty(0, 0, 0, dtype=torch.float32)
    rules = of_mask, of_bias, numbers, said, scale, softcap
    keeps_exact = _keeps_exact(query, said)
    if said.by == NATIVE.name and seed is None and not keeps_exact:
        output, lse = attended(query, key, value, sink, *rules)
        return as_laid(query, output), cast(Tensor, lse), none
    engine, scoring, plan = _of_node(query, key, value, sink, *rules, rate)
    dropout = _dropout(seed, rate)
    output, lse, kept = engine.forward(query, key, value, sink, scoring, dropout, plan, learns=said.learns)
    return as_laid(query, output), lse, as_laid(query, kept.float()) if keeps_exact else none


def _keeps_exact(query: Tensor, line: Line) -> bool:
    return line.learns and line.by == NATIVE.name and query.dtype in HALF


def _strips_backward(
    grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, query: Tensor, key: Tensor,
    value: Tensor, sink: Tensor | None, seed: Tensor | None, of_mask: list[Tensor], of_bias: list[Tensor],
    numbers: list[int], line: str, scale: float, softcap: float | None, rate: float, learns: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """`Gradients` likewise; the gradient of a sink, or of a tensor of the bias, is empty if there is none.

    Args:
        learns: whether each tensor of the bias does.
    """
    leaves = [one.detach().requires_grad_(wants) for one, wants in zip(of_bias, learns, strict=True)]
    rules = of_mask, leaves, numbers, read(line), scale, softcap, rate
    with _recording() if any(learns) else contextlib.nullcontext():
        engine, scoring, plan = _of_node(query, key, value, sink, *rules)
        learned = scoring.learned()
        with torch.no_grad():
            grads = engine.backward(
                query, key, value, sink, scoring, _dropout(seed, rate), plan, *learned,
                output=output, lse=lse, grad_output=grad_output, grad_lse=grad_lse,
            )  # fmt: skip
        of_leaves = gradients_of(leaves, learned, grads[4:])
    of_query, of_key, of_value = (
        as_laid(tensor, grad) for tensor, grad in zip((query, key, value), grads, strict=False) if grad is not None
    )
    none = query.new_empty(0)
    of_sink, *of_bias = (none if grad is None else grad for grad in (grads[3], *of_leaves))
    return of_query, of_key, of_value, of_sink, of_bias


def gradients_of(
    leaves: Sequence[Tensor], learned: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a node's tensors, from those of what a bias made of them: views, mostly."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    pairs = [(tensor, grad) for tensor, grad in zip(learned, grads, strict=True) if grad is not None]
    if not wanted:
        return [None] * len(leaves)
    outputs, given = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, given))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Autograd records again, as it does not where an operator runs: from it are the gradients of few numbers, of which
    a bias makes those of many scores."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    keys = torch._C.DispatchKey
    for key in (keys.AutogradCPU, keys.AutogradCUDA, keys.ADInplaceOrView):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _dropout(seed: Tensor | None, rate: float) -> Dropout | None:
    return None if seed is None else Dropout(rate, int(seed))


MAX_NODES = 16
"""Nodes that are kept: those of a model whose layers differ, at a few lengths."""

MAX_RULES = 16
"""Masks of nodes that are kept."""

_masks: dict[Hashable, tuple[list[Tensor], Mask]] = {}
"""Masks of copies of the tensors that nodes were given, by all else that they are made of."""


def _mask(line: str, tensors: Sequence[Tensor], numbers: Sequence[int], last: int) -> Mask:
    """The mask of a node, without the offset that a call fixes: the same object as before for the same numbers in its
    tensors. In a graph, a view is another tensor in every call, and so is what the backward pass is given.

    Args:
        last: that offset.
    """
    alike: Hashable = (line, *numbers, *((tensor.dtype, tensor.shape) for tensor in tensors), last)
    found = _masks.get(alike)
    if found is not None and all(map(equal, found[0], tensors)):
        return found[1]
    with torch.inference_mode(False):
        if not _are_copied(tensors):
            return cast(Mask, settled(_unbound(deserialise(line, tensors, numbers), last)))
        copies = [tensor.clone() for tensor in tensors]
        mask: Mask = _unbound(deserialise(line, copies, numbers), last)
    return keep(_masks, alike, (copies, mask), MAX_RULES)[1]


def _are_copied(tensors: Sequence[Tensor]) -> bool:
    """Whether they are small enough for a mask of copies to be kept."""
    return all(tensor.is_cpu and tensor.nbytes <= MAX_HELD_BYTES for tensor in tensors)


def _bias(line: str | None, tensors: Sequence[Tensor], numbers: Sequence[int], last: int) -> Bias | Tensor | None:
    """The same of a bias, of the tensors themselves, and as a tensor where it is one."""
    if line is None:
        return None
    bias: Bias = _unbound(deserialise(line, tensors, numbers), last)
    return bias.numbers if isinstance(bias, Given) else bias


def _unbound(rule: Rule, last: int) -> Any:
    arguments = rule.arguments()
    changed: dict[str, Any] = {name: _unbound(part, last) for name, part in arguments.items() if isinstance(part, Rule)}
    if isinstance(rule, Positioned) and type(rule.offset) is int and rule.offset == last:
        changed["offset"] = None
    return type(rule)(**{**arguments, **changed}) if changed else rule


class _Node(NamedTuple):
    """What a node computes, but for its tensors and its bias. mask: that of `_mask`, by which it is known."""

    mask: Mask
    engine: Engine
    scoring: Scoring
    plan: StripPlan


_nodes: dict[Hashable, _Node] = {}
"""Nodes by all that they follow from: of a bias tensor, how it lies in memory."""


def _of_node(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, of_mask: list[Tensor], of_bias: list[Tensor],
    numbers: list[int], line: Line, scale: float, softcap: float | None, rate: float,
) -> tuple[Engine, Scoring, StripPlan]:  # fmt: skip
    """Engine, scoring and strips of a node, from its arguments."""
    batch, heads, query_len, _ = query.shape
    grid = Grid(batch, heads, query_len, key.shape[2], query.device)
    mask, alike = _mask(line.mask, of_mask, numbers[: line.split], key.shape[2] - query_len), None
    bias = None if line.bias is None else deserialise(line.bias, of_bias, numbers[line.split :]).bind(grid)
    added = likeness_of(bias, wide(query.dtype))
    if added is not None and query.is_cpu and _are_copied(of_mask):
        like, learning = (query.shape, key.shape, value.shape, query.dtype), tuple(map(learns, of_bias))
        alike = like, id(mask), added, learning, sink is None, scale, softcap, rate, line.by
        found = _nodes.get(alike)
        if found is not None:
            return found.engine, found.scoring.with_bias(bias).with_sink(sink), found.plan
    scoring = Scoring(grid, scale, softcap, bias, mask.bind(grid), sink, None)
    call = Call(query, key, value, scoring, Dropout(rate, 0) if rate else None, wants_lse=True)
    engine = able(ENGINES[line.by], call)
    plan = engine.plan_of(call)
    if alike is None or not plan.is_kept:
        return engine, scoring, plan
    plan = by_form(plan, query, value, scoring) if engine is NATIVE else plan.of_form(None)
    keep(_nodes, alike, _Node(mask, engine, scoring.with_bias(None).with_sink(None), plan), MAX_NODES)
    return engine, scoring, plan


def _like_strips(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=wide(query.dtype))
    output, exact = laid_like(query, value.shape[3]), query.new_empty(0, 0, 0, dtype=torch.float32)
    if _keeps_exact(query, read(rest[4])):
        exact = laid_like(query, value.shape[3], torch.float32)
    return output, lse, exact


def _like_strips_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    query, key, value, sink = inputs[4:8]
    none, of_leaves, learns = query.new_empty(0), inputs[10], inputs[-1]
    of_query, of_key, of_value = (laid_like(tensor, tensor.shape[3]) for tensor in (query, key, value))
    of_bias = [one.new_empty(one.shape if wants else 0) for one, wants in zip(of_leaves, learns, strict=True)]
    return of_query, of_key, of_value, none if sink is None else sink.new_empty(sink.shape), of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *four, of_mask, of_bias, numbers, line, scale, softcap, seed, rate = inputs
    rounded, lse, exact = output
    kept = exact if _keeps_exact(four[0], read(line)) else rounded
    ctx.save_for_backward(kept, lse, *four, seed, *of_mask, *of_bias)
    ctx.of_mask, ctx.fixed = len(of_mask), (numbers, line, scale, softcap, rate, [learns(one) for one in of_bias])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    output, lse, query, key, value, sink, seed, *tensors = ctx.saved_tensors
    of_mask, of_bias = tensors[: ctx.of_mask], tensors[ctx.of_mask :]
    if grad_output is None:
        grad_output = torch.zeros_like(output, dtype=query.dtype)
    *three, of_sink, grads = _in_graph_backward(
        grad_output, grad_lse, output, lse, query, key, value, sink, seed, of_mask, of_bias, *ctx.fixed
    )
    numbers, *_, learning = ctx.fixed
    return (
        *three, None if sink is None else of_sink, [None] * len(of_mask),
        [grad if wants else None for grad, wants in zip(grads, learning, strict=True)], _of_numbers(numbers),
        *[None] * 5,
    )  # fmt: skip


def _of_numbers(numbers: list[int]) -> list[None] | None:
    """Their gradient, as torch wants it, which takes an empty list for a list of tensors."""
    return None if numbers else []


def node(name: str, run: Callable[..., Any], like: Callable[..., Any]) -> Any:
    """An operator of torch's; `custom_op` would make one that takes longer to call."""
    library.define(name, library.infer_schema(run, mutates_args=()))
    library.impl(name, "default", run)
    library.register_fake(name, like)
    namespace, _, overload = name.partition("::")
    return getattr(getattr(torch.ops, namespace), overload).default


in_graph = node("regard::strips", _strips, _like_strips)
_in_graph_backward = node("regard::strips_backward", _strips_backward, _like_strips_backward)
library.register_autograd("regard::strips", _backward, setup_context=_keep)
