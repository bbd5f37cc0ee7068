"""The blocks of a call by programs on a GPU: all of them in one launch forward, and in two backward."""

import os
from collections.abc import Hashable
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.biases import Given
from regard.dropout import Dropout
from regard.graphs import tracing, transformed
from regard.kernels.call import Call
from regard.kernels.strips import engine
from regard.kernels.strips.added import Added, AddedToStrip
from regard.kernels.strips.gpu.blocks import COLUMNS, ROWS, Blocks, Lists, blocks_of
from regard.kernels.strips.order import as_read, laid_like
from regard.kernels.strips.plan import Kind, Strip
from regard.numerics import LOG2_E, row_products
from regard.scores import Scoring

DTYPES = torch.float32, torch.bfloat16, torch.float16

MAX_HEAD = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
"""Features of the largest heads: blocks of larger ones fit neither into registers nor into shared memory."""

MAX_HEADS = 65535
"""Most heads of all batch indices: CUDA's limit of one axis of a launch."""

MAX_EVALUATED = 1 << 27
"""Most numbers of a bias that has to be evaluated for every score: 512 MiB."""

MAX_GRADIENTS = 1 << 26
"""Most gradients of scores that are held at a time, where a bias learns: 256 MiB."""


NO_PLAN: Any = None
"""In place of the strips whose hidden cells `Added` would tell: programs read them in `Blocks`."""


class Size(NamedTuple):
    """How a program is cut: queries and keys that it computes together, its warps, and blocks that it loads ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


PROGRAMS = "forward", "of_queries", "of_keys"
"""The output, the gradients of queries, and those of keys."""

SIZES: dict[tuple[bool, int], tuple[tuple[Size, ...], ...]] = {
    (False, 64): ((Size(32, COLUMNS, 4, 2),), (Size(32, COLUMNS, 8, 1),), (Size(32, 32, 4, 1),)),
    (False, 128): ((Size(32, COLUMNS, 8, 1),), (Size(32, COLUMNS, 8, 1),), (Size(16, 32, 8, 1),)),
    (True, 64): (
        (Size(128, COLUMNS, 8, 3), Size(64, COLUMNS, 4, 2)),
        (Size(64, COLUMNS, 4, 2),),
        (Size(64, 32, 4, 2),),
    ),
    (True, 128): (
        (Size(64, COLUMNS, 4, 2), Size(64, COLUMNS, 4, 1)),
        (Size(64, COLUMNS, 8, 2), Size(32, COLUMNS, 4, 2)),
        (Size(32, COLUMNS, 8, 2),),
    ),
    (True, 256): (
        (Size(64, COLUMNS, 8, 2), Size(64, COLUMNS, 8, 1)),
        (Size(32, COLUMNS, 8, 1),),
        (Size(32, 32, 8, 1),),
    ),
}
"""For each of the programs, in float32 and (True) half precision, for heads of up to so many features: the largest for
which the compiler moves hardly any registers to memory, for GPUs of compute capability 8.0 and 9.0, and smaller ones
for GPUs with less shared memory. Not measured on a GPU yet."""

_fits: dict[Hashable, int] = {}
"""Which of the sizes of a program a GPU has shared memory for."""


@cache
def programs() -> ModuleType:
    """The programs; Triton takes a second to import."""
    from regard.kernels.strips.gpu import programs

    return programs


def cannot_on(device: torch.device) -> str | None:
    """Why programs do not run on a device."""
    return _why_not_on(device)


cannot_on._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile takes the answer as it is


@cache
def _why_not_on(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "its programs run on CUDA devices only"
    if find_spec("triton") is None or os.environ.get("REGARD_NATIVE") == "0":
        return "Triton is not installed, or turned off by REGARD_NATIVE=0"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 (NVIDIA Ampere) or newer"
    return None


def cannot(call: Call) -> str | None:
    """Why programs on a GPU do not support a call."""
    query, scoring = call.query, call.scoring
    elsewhere = cannot_on(query.device)
    if elsewhere is not None:
        return elsewhere
    if query.dtype not in DTYPES:
        return f"it does not compute in {query.dtype}"
    if scoring.additive is not None:
        return "it does not support additive similarity"
    if tracing():
        return None
    if transformed():
        return "it reads tensors where they are: outside of torch.func and torch.autograd.forward_ad"
    if not (all(scoring.grid[:4]) and query.shape[3] and call.value.shape[3]):
        return "there is nothing to compute"
    if max(query.shape[3], call.value.shape[3]) > MAX_HEAD[query.dtype]:
        return f"heads of more than {MAX_HEAD[query.dtype]} features do not fit into its registers in {query.dtype}"
    if scoring.grid.batch * scoring.grid.heads > MAX_HEADS:
        return f"it computes at most {MAX_HEADS:,} heads, those of all batch indices together"
    if evaluated_numbers(scoring) > MAX_EVALUATED:
        return "its bias would be evaluated for every score, and held"
    return None


def evaluated_numbers(scoring: Scoring) -> int:
    """Numbers of biases that are evaluated for every score: all but one tensor, and biases by distance."""
    terms = () if scoring.bias is None else tuple(scoring.bias.terms())
    given = [term for term in terms if isinstance(term, Given)]
    if len(given) <= 1 and all(term.of_distance or isinstance(term, Given) for term in terms):
        return 0
    grid = scoring.grid
    return grid.batch * grid.heads * grid.query_len * grid.key_len


def plan_of(call: Call) -> Blocks:
    """The blocks of a call."""
    return blocks_of(call.scoring.mask_or_everything, call.scoring.grid)


def num_scores(call: Call) -> int:
    """Scores in all blocks."""
    blocks, grid = plan_of(call), call.scoring.grid
    times = (grid.batch // blocks.batch) * (grid.heads // blocks.heads)
    return len(blocks.by_query.others) * ROWS * COLUMNS * times


def peak_bytes(call: Call) -> int:
    """The log-sum-exp, the bits of the mask, and a bias that is evaluated."""
    grid, blocks = call.scoring.grid, plan_of(call)
    lists = sum(tensor.nbytes for by in (blocks.by_query, blocks.by_key) for tensor in by)
    return (
        4 * grid.batch * grid.heads * grid.query_len + lists + blocks.bits.nbytes + 4 * evaluated_numbers(call.scoring)
    )


class Launch:
    """What all programs of a call are told."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, dropout: Dropout | None, blocks: Blocks,
        added: Added,
    ) -> None:  # fmt: skip
        grid, none = scoring.grid, query
        self.three = query, key, value
        self.blocks, self.grid = blocks, grid
        dense = self._dense(added, scoring)
        row = added.row
        rows = columns = odd = none
        if dropout is not None:
            numbers = dropout.numbers(grid)
            rows, columns, odd = (one.contiguous() for one in (numbers.rows, numbers.columns, numbers.odds()))
        self.added = {
            "row": none if row is None else row.contiguous(), "dense": none if dense is None else dense,
            "of_queries": rows, "of_keys": columns, "odd": odd,
            "of_keys_b": grid.key_len if dropout is not None and len(columns) > 1 else 0,
            **_strides("row", row, "bh"), **_strides("dense", dense, "bhmn"),
        }  # fmt: skip
        plain = scoring.softcap is None and row is None and dense is None
        self.numbers = {
            "heads": grid.heads, "group": grid.heads // key.shape[1], "query_len": grid.query_len,
            "key_len": grid.key_len, "scale": scoring.scale * (LOG2_E if plain else 1.0),
            "softcap": 1.0 if scoring.softcap is None else float(scoring.softcap),
            "least": 0 if dropout is None else dropout.least, "factor": 1.0 if dropout is None else dropout.factor,
        }  # fmt: skip
        self.kinds = {
            "QK": query.shape[3], "WIDTH": _width(query.shape[3]), "V": value.shape[3],
            "V_WIDTH": _width(value.shape[3]), "CAPS": scoring.softcap is not None, "HAS_ROW": row is not None,
            "HAS_DENSE": dense is not None, "DROPS": dropout is not None,
            "PRECISION": precision(query.dtype),
        }  # fmt: skip
        width = _width(max(64, query.shape[3], value.shape[3]))
        self.sizes = SIZES[query.dtype is not torch.float32, width]

    def _dense(self, added: Added, scoring: Scoring) -> Tensor | None:
        """The only tensor that is added where it lies; or the sum of all, and of what is evaluated."""
        tensors = [numbers for numbers, _ in added.given]
        if evaluated_numbers(scoring):
            made = AddedToStrip(added, whole_rows(scoring, range(scoring.grid.query_len))).made
            total = sum(tensors if made is None else [*tensors, made.detach()])
            assert isinstance(total, Tensor)
            return total
        return tensors[0].resolve_neg() if tensors else None

    def run(self, name: str, lists: Lists, length: int, **more: Any) -> None:
        """Launches one of `PROGRAMS` for so many queries (or, the last one, keys) of each head, cut as small as need
        be."""
        query, key, value = self.three
        of_lists = len(lists.begins) // 2 // (self.blocks.batch * self.blocks.heads)
        given = {
            "query": query, "key": key, "value": value, "begins": lists.begins, "cell_of": lists.cells,
            "cells": self.blocks.bits, "list_b": of_lists * self.blocks.heads if self.blocks.batch > 1 else 0,
            "list_h": of_lists if self.blocks.heads > 1 else 0, **self.added, **self.numbers, **self.kinds, **more,
            **_strides("query", query, "bhm"), **_strides("key", key, "bhn"), **_strides("value", value, "bhn"),
        }  # fmt: skip
        kind = name, query.device, *self.kinds.values()
        program, sizes, by_key = getattr(programs(), name), self.sizes[PROGRAMS.index(name)], name == PROGRAMS[2]
        for number in range(_fits.get(kind, 0), len(sizes)):
            queries, keys, warps, stages = sizes[number]
            given |= {"QUERIES": queries, "KEYS": keys} if by_key else {"QUERIES": queries}
            grid = -(-length // (keys if by_key else queries)), self.grid.batch * self.grid.heads
            try:
                with torch.cuda.device_of(query):
                    program[grid](**given, num_warps=warps, num_stages=stages)
            except programs().OutOfResources:
                if number == len(sizes) - 1:
                    raise
            else:
                _fits[kind] = number
                return


def precision(dtype: torch.dtype) -> str:
    """How products are computed: of float32 numbers as three products of their halves, which are right to 2^-21."""
    return "tf32x3" if dtype is torch.float32 else "tf32"


def _width(size: int) -> int:
    """The next power of two, and enough for a product."""
    return max(16, 1 << (size - 1).bit_length())


def _strides(name: str, tensor: Tensor | None, axes: str) -> dict[str, int]:
    """The strides of a tensor's first axes; 0 where it is the same for all, or is not there."""
    if tensor is None:
        return {f"{name}_{axis}": 0 for axis in axes}
    return {
        f"{name}_{axis}": stride if size > 1 else 0
        for axis, stride, size in zip(axes, tensor.stride(), tensor.shape, strict=False)
    }


def whole_rows(scoring: Scoring, queries: range) -> Strip:
    """Some queries with all keys."""
    return Strip(None, queries, (range(scoring.grid.key_len),), Kind.FULL)


def forward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None,
    plan: Blocks, *, wants_lse: bool = True, learns: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `native.forward`; the gradients take the output as it is."""
    query, key, value = as_read(query), as_read(key), as_read(value)
    launch = Launch(query, key, value, scoring, dropout, plan, Added(scoring, NO_PLAN, query.dtype))
    output = laid_like(query, value.shape[3])
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    of_heads = query if sink is None else sink.resolve_neg().contiguous()
    launch.run(
        "forward", plan.by_query, query.shape[2], output=output, lse=lse, columns=plan.by_query.others,
        sink=of_heads, HAS_SINK=sink is not None, **_strides("output", output, "bhm"),
    )  # fmt: skip
    return output, lse, output


def backward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None,
    plan: Blocks, *learned: Tensor, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As `native.backward`."""
    query, key, value = as_read(query), as_read(key), as_read(value)
    grad_output = as_read(grad_output.to(query.dtype))
    added = Added(scoring, NO_PLAN, query.dtype, learned)
    launch = Launch(query, key, value, scoring, dropout, plan, added)
    delta = row_products(grad_output, output)
    if grad_lse is not None:
        delta -= grad_lse
    given = {"grad_output": grad_output, "lse": lse, "delta": delta, "plain_scale": scoring.scale}
    given |= _strides("grad", grad_output, "bhm")
    grad_query = _of_queries(launch, added, scoring, given)
    grad_key, grad_value = _of_keys(launch, given)
    grad_sink = None if sink is None else engine.gradient_of_sink(sink, lse, delta)
    of_learned = iter(added.finish() if added.wanted else ())
    rest = (next(of_learned).to(tensor.dtype) if tensor.requires_grad else None for tensor in learned)
    return (grad_query, grad_key, grad_value, grad_sink, *rest)


def _of_queries(launch: Launch, added: Added, scoring: Scoring, given: dict[str, Any]) -> Tensor:
    """The gradients of queries; those of a bias are added up in passing, some queries at a time."""
    query, lists = launch.three[0], launch.blocks.by_query
    batch, heads, query_len, key_len = scoring.grid[:4]
    grad = laid_like(query, query.shape[3])
    more = {"grad_query": grad, "columns": lists.others, **_strides("into", grad, "bhm"), **given}
    if not added.wanted:
        nothing = {"grads": query, "grads_h": 0, "first_row": 0, "WRITES": False}
        launch.run("of_queries", lists, query_len, **nothing, **more)
        return grad
    step = max(ROWS, MAX_GRADIENTS // (batch * heads * key_len) // ROWS * ROWS)
    for first in range(0, query_len, step):
        rows = range(first, min(first + step, query_len))
        grads = torch.zeros(batch, heads, len(rows), key_len, device=query.device)
        written = {"grads": grads, "grads_h": len(rows) * key_len, "first_row": first, "WRITES": True}
        launch.run("of_queries", lists, len(rows), **written, **more)
        strip = AddedToStrip(added, whole_rows(scoring, rows))
        for index in range(batch):
            strip.pull(grads[index], index, slice(None), slice(None))
        strip.finish()
    return grad


def _of_keys(launch: Launch, given: dict[str, Any]) -> list[Tensor]:
    """The gradients of keys and values: the sums over query heads that share them."""
    (query, *two), lists = launch.three, launch.blocks.by_key
    batch, heads, key_len = query.shape[0], query.shape[1], two[0].shape[2]
    kv_heads = two[0].shape[1]
    if heads == kv_heads:
        grads = [laid_like(one, one.shape[3]) for one in two]
    else:
        grads = [one.new_empty(batch, heads, key_len, one.shape[3], dtype=torch.float32) for one in two]
    strides = _strides("into_k", grads[0], "bhn") | _strides("into_v", grads[1], "bhn")
    more = {"grad_key": grads[0], "grad_value": grads[1], "rows": lists.others, **strides, **given}
    launch.run("of_keys", lists, key_len, **more)
    if heads == kv_heads:
        return grads
    return [grad.unflatten(1, (kv_heads, -1)).sum(2).to(query.dtype) for grad in grads]
