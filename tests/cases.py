"""Masks, biases, calls and the like that more than one test file needs.

A `Ruled` mask is a regard mask together with the same rule written once more for a single cell, in Python integers:
``says(b, h, i, j, grid)``. The tests hold the two against each other.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st

from regard.biases import Alibi, RelativeBias
from regard.hooks import hooked
from regard.kernels import KERNELS
from regard.kernels.strips import native
from regard.masks import Band, Causal, Chunk, Dense, Document, Mask, Padding, Prefix, Strided, Where, Window
from regard.shapes import Grid

# A different prime for every axis (heads: two groups of kv_heads).
BATCH, KV_HEADS, HEADS, QUERY_LEN, KEY_LEN, HEAD_DIM, VALUE_DIM = 2, 3, 6, 7, 11, 5, 13
GRID = Grid(BATCH, HEADS, QUERY_LEN, KEY_LEN)

# Triton needs a GPU; tests/test_gpu_programs.py holds what of it can be held without one. The compiled library may be
# missing, or turned off.
ABSENT = [] if native.is_there(torch.float32) else ["native"]
ON_A_CPU = [kernel.name for kernel in KERNELS if kernel.name not in ("triton", *ABSENT)]
needs_library = pytest.mark.skipif(bool(ABSENT), reason="the compiled library is not there, or turned off")

FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": Causal()},
    "window": {"mask": Causal() & Window(40)},
    "streaming with a sink": {"mask": Causal() & (Window(20) | Prefix(3)), "sink": torch.randn(4)},
    "documents": {"mask": Causal(offset=0) & Document(torch.arange(150)[None] // 60, torch.arange(170)[None] // 60)},
    "padding, a row of it empty": {"mask": Padding([100, 0])},
    "softcap": {"mask": Causal(), "softcap": 2.0},
    "ALiBi": {"mask": Causal(), "bias": Alibi(4)},
    "cells": {"mask": Dense(torch.rand(2, 4, 150, 170, generator=torch.Generator().manual_seed(0)) > 0.7)},
    "a function": {"mask": Where(lambda batch, head, query, key: (query + key + head) % 3 > batch)},
}  # fmt: skip
"""Arguments of calls of [2, 4, 150, size] on [2, 2, 170, size], which several files compute in their own way."""


def in_threads(work: Callable[[int], object], count: int) -> None:
    """A function of 0, 1, 2, ..., each in a thread of its own, at once."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Ruled(NamedTuple):
    mask: Mask
    says: Callable[[int, int, int, int, Grid], bool]

    def cells(self, grid: Grid, rows=None, columns=None) -> torch.Tensor:
        """Every cell of a rectangle asked one by one: bool [batch, heads, rows, columns]."""
        rows = range(grid.query_len) if rows is None else rows
        columns = range(grid.key_len) if columns is None else columns
        said = [
            bool(self.says(b, h, i, j, grid))
            for b in range(grid.batch)
            for h in range(grid.heads)
            for i in rows
            for j in columns
        ]
        return torch.tensor(said, dtype=torch.bool).view(grid.batch, grid.heads, len(rows), len(columns))


def position(offset, b, i, grid):
    if offset is None:
        return grid.key_len - grid.query_len + i
    return (offset[b] if isinstance(offset, list) else offset) + i


def band(before, after, offset=None):
    def says(b, h, i, j, grid):
        p = position(offset, b, i, grid)
        return (before is None or p - j <= before) and (after is None or j - p <= after)

    return Ruled(Band(before, after, offset), says)


def causal(offset=None):
    return Ruled(Causal(offset), lambda b, h, i, j, grid: j <= position(offset, b, i, grid))


def window(w, offset=None):
    return Ruled(Window(w, offset), lambda b, h, i, j, grid: abs(position(offset, b, i, grid) - j) < w)


def prefix(n):
    return Ruled(Prefix(n), lambda b, h, i, j, grid: j < (n[b] if isinstance(n, list) else n))


def strided(step, offset=None):
    return Ruled(Strided(step, offset), lambda b, h, i, j, grid: (position(offset, b, i, grid) - j) % step == 0)


def chunk(size, offset=None):
    return Ruled(Chunk(size, offset), lambda b, h, i, j, grid: position(offset, b, i, grid) // size == j // size)


def document(query_ids, key_ids=None):
    """Ids as lists, one per batch row, or one list for all rows."""
    keys = query_ids if key_ids is None else key_ids

    def of(ids, b, at):
        return (ids[b] if len(ids) > 1 else ids[0])[at]

    mask = Document(torch.tensor(query_ids), None if key_ids is None else torch.tensor(key_ids))
    return Ruled(mask, lambda b, h, i, j, grid: of(query_ids, b, i) == of(keys, b, j))


def padding(keys):
    """Lengths [n, ..] or lists of 0/1 per batch row."""
    if isinstance(keys[0], int):
        return Ruled(Padding(keys), lambda b, h, i, j, grid: j < keys[b])
    return Ruled(Padding(torch.tensor(keys).bool()), lambda b, h, i, j, grid: bool(keys[b if len(keys) > 1 else 0][j]))


def dense(mask):
    full = mask.reshape((1,) * (4 - mask.dim()) + mask.shape)

    def says(b, h, i, j, grid):
        return full[tuple(at if size > 1 else 0 for at, size in zip((b, h, i, j), full.shape, strict=True))]

    return Ruled(Dense(mask), says)


def _rule(batch, head, query, key, p, r):
    return (query * 3 + key + head + 2 * batch) % p != r


def where(p, r):
    return Ruled(Where(partial(_rule, p=p, r=r)), lambda b, h, i, j, grid: (i * 3 + j + h + 2 * b) % p != r)


def both(left, right):
    return Ruled(left.mask & right.mask, lambda *at: left.says(*at) and right.says(*at))


def either(left, right):
    return Ruled(left.mask | right.mask, lambda *at: left.says(*at) or right.says(*at))


def inverse(ruled):
    return Ruled(~ruled.mask, lambda *at: not ruled.says(*at))


# --- a strategy of every mask -------------------------------------------------------------------------------------


def grids(smallest: int = 1, largest: int = 9) -> st.SearchStrategy[Grid]:
    few, length = st.integers(1, 3), st.integers(smallest, largest)
    return st.tuples(few, few, length, length).map(lambda sizes: Grid(*sizes))


def single_masks(grid: Grid) -> st.SearchStrategy[Ruled]:
    """Every kind of mask, with any parameters that make sense for the grid."""
    lengths = st.integers(0, grid.key_len)
    shift = st.integers(-10, 10)
    offsets = st.none() | shift | st.lists(shift, min_size=grid.batch, max_size=grid.batch)
    reach = st.none() | st.integers(-6, 6)
    step = st.integers(1, 6)

    def rows_of(length, values):
        one = st.lists(values, min_size=length, max_size=length)
        return st.sampled_from([1, grid.batch]).flatmap(lambda n: st.lists(one, min_size=n, max_size=n))

    def bools(shape):
        count = torch.Size(shape).numel()
        return st.lists(st.booleans(), min_size=count, max_size=count).map(
            lambda cells: torch.tensor(cells, dtype=torch.bool).view(shape)
        )

    shapes = st.tuples(*(st.sampled_from([1, size]) for size in grid[:4]))
    ids = st.integers(-1, 2)
    kinds = [
        st.builds(band, reach, reach, offsets),
        st.builds(causal, offsets),
        st.builds(window, step, offsets),
        st.builds(prefix, st.integers(0, 12) | st.lists(st.integers(0, 12), min_size=grid.batch, max_size=grid.batch)),
        st.builds(strided, step, offsets),
        st.builds(chunk, step, offsets),
        st.builds(document, rows_of(grid.query_len, ids), rows_of(grid.key_len, ids)),
        st.builds(padding, st.lists(lengths, min_size=grid.batch, max_size=grid.batch)),
        st.builds(padding, rows_of(grid.key_len, st.integers(0, 1))),
        st.builds(dense, shapes.flatmap(bools)),
        st.integers(1, 5).flatmap(lambda p: st.builds(where, st.just(p), st.integers(0, p))),
    ]
    if grid.query_len == grid.key_len:
        kinds.append(st.builds(document, rows_of(grid.query_len, ids)))
    return st.one_of(kinds)


def composed_masks(grid: Grid) -> st.SearchStrategy[Ruled]:
    """Masks joined by &, | and ~, a few levels deep."""
    return st.recursive(
        single_masks(grid),
        lambda parts: st.builds(both, parts, parts) | st.builds(either, parts, parts) | st.builds(inverse, parts),
        max_leaves=4,
    )


# --- calls --------------------------------------------------------------------------------------------------------


def fixed_masks() -> dict[str, Ruled]:
    """One of each for GRID, with rows that see nothing and keys that nobody sees among them."""
    draw = torch.Generator().manual_seed(5)

    def random_cells(*shape):
        return torch.rand(shape, generator=draw) < 0.5

    return {
        "causal": causal(),
        "causal offset 0": causal(0),
        "causal offset per row": causal([3, -2]),
        "band": band(1, 2),
        "only later keys": band(-1, None),
        "window": window(3),
        "causal & window": both(causal(), window(3)),
        "window without any key": window(2, [-5, 20]),
        "prefix": prefix(4),
        "prefix per row": prefix([0, 5]),
        "causal | prefix": either(causal(0), prefix(2)),
        "causal & (window | prefix)": both(causal(), either(window(2), prefix(2))),
        "document": document([[0, 0, 1, 1, 1, 7, 2], [0, 1, 1, 2, 2, 2, 2]], [[0] * 5 + [1] * 3 + [2] * 3, [1] * 11]),
        "document for all rows": document([[0, 0, 1, 1, 1, 2, 2]], [[0] * 5 + [1] * 3 + [2] * 3]),
        "padding": padding([11, 6]),
        "padding of a whole row": padding([0, 4]),
        "padding on the left": padding([[0, 0, 0] + [1] * 8, [0] * 6 + [1] * 5]),
        "dense": dense(random_cells(QUERY_LEN, KEY_LEN)),
        "dense per row and head": dense(random_cells(BATCH, HEADS, QUERY_LEN, KEY_LEN)),
        "dense keys": dense(random_cells(BATCH, 1, 1, KEY_LEN)),
        "dense queries": dense(random_cells(1, HEADS, QUERY_LEN, 1)),
        "dense nothing": dense(torch.zeros(1, 1, dtype=torch.bool)),
        "where": where(3, 1),
        "strided": both(causal(), strided(2)),
        "chunk": chunk(4),
        "not causal": inverse(causal()),
        "not (causal & window)": inverse(both(causal(), window(3))),
    }


class Inputs(NamedTuple):
    """One call's arguments and its differentiable tensors by name."""

    arguments: dict[str, Any]
    leaves: dict[str, torch.Tensor]


def tensors(dtype=torch.float64, *, seed=11, query_len=QUERY_LEN, key_len=KEY_LEN, kv_heads=KV_HEADS, heads=HEADS,
            batch=BATCH, head_dim=HEAD_DIM, value_dim=VALUE_DIM):  # fmt: skip
    """query, key, value: the same numbers in every dtype, up to rounding (drawn in bfloat16, so that none is lost)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw).to(torch.bfloat16).to(dtype).requires_grad_()

    return (
        normal(batch, heads, query_len, head_dim),
        normal(batch, kv_heads, key_len, head_dim),
        normal(batch, kv_heads, key_len, value_dim),
    )


def biases(dtype=torch.float64) -> dict[str, tuple[Any, torch.Tensor | None]]:
    """Biases for GRID with the tensor in each that learns, if there is one."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=draw).to(torch.bfloat16).to(dtype)

    def learns(tensor):
        return tensor.requires_grad_()

    whole = learns(normal(BATCH, HEADS, QUERY_LEN, KEY_LEN))
    hiding = normal(1, HEADS, QUERY_LEN, KEY_LEN)
    hiding[:, :, 2] = -torch.inf
    hiding[:, ::2, :, 5] = -torch.inf
    hiding[..., 9] = -torch.inf
    hiding = learns(hiding)
    row = learns(normal(KEY_LEN))
    slopes = learns(normal(HEADS).abs())
    table = learns(normal(8, HEADS))
    added = learns(normal(QUERY_LEN, KEY_LEN))
    return {
        "tensor": (whole, whole),
        "tensor with -inf": (hiding, hiding),
        "one number per key": (row, row),
        "alibi": (Alibi(HEADS), None),
        "alibi that learns": (Alibi(slopes=slopes), slopes),
        "alibi per row": (Alibi(HEADS, offset=[3, -2]), None),
        "relative": (RelativeBias(table, max_distance=6), table),
        "relative behind only": (RelativeBias(table, bidirectional=False, max_distance=9, offset=[0, 5]), table),
        "alibi + tensor": (Alibi(HEADS) + added, added),
    }


def around(layer, answer):
    """A block in which ``answer(heads, scoring, attend)`` stands around a layer's attention and gives its output."""

    def hook(_, attend):
        return lambda heads, scoring: (answer(heads, scoring, lambda *given: attend(*given)[0]), None)

    return hooked([layer], hook)


def told(layer, given):
    """A block in which (heads, scoring) of a layer's calls are put into a list."""
    return around(layer, lambda heads, scoring, attend: given.append((heads, scoring)) or attend(heads, scoring))
