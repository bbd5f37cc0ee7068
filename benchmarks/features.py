"""What a feature of attention costs: per allowed score, beside plain causal attention, and beside the best of torch.

    python benchmarks/features.py [--rows "bias*"] [--lengths 128 512] [--dtypes float32 bfloat16] [--repeats 7]
    python benchmarks/features.py --random 50 --seed 7     calls drawn at random: other sizes, and features together
    python benchmarks/features.py --device cuda            on a GPU, timed between two CUDA events
    python benchmarks/features.py --report       writes docs/cost-per-score.md; measures nothing

Each row is one call, of 8 heads of 64 unless it says so, forward, and forward with its backward pass. Two ratios:

    per score      time per score that the mask allows, over that of torch's plain causal attention of the same length
    against torch  time of the best that can be written with torch, over regard's: `scaled_dot_product_attention` with a
                   dense mask or a finished table of biases, or the formula, whichever is faster; above 1, regard takes
                   less

All of a row take turns in one run, and medians of the ratios of one turn are told. Times are those of the clock: run it
where nothing else runs; it takes about a quarter of an hour.
"""

import argparse
import fnmatch
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kinds
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Alibi, Causal, Dense, Document, Mask, Padding, Prefix, RelativeBias, Strided, Where, Window
from regard.bench import check_device, in_turn, machine
from regard.bench.device import seconds_of
from regard.rules import Rule
from regard.shapes import Grid

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "cost-per-score.md"
HEADS, HEAD_DIM = 8, 64
LENGTHS = [128, 512, 2048, 8192]
MAX_TABLE_NUMBERS = 1 << 28
"""Numbers of a dense table that torch is given; longer rows have no peer."""

BOTH = "function and formula"
"""Beside what a run measured; earlier ones had one peer in each row."""

MAX_FORMULA_SCORES = 1 << 22
"""Most scores of which the formula is a peer of torch's function: of more, it writes and reads far more memory."""

QUICK_SECONDS, MAX_QUICK_REPEATS = 0.3, 50
"""Calls that take little time are repeated until they have taken so much, or so often: theirs vary the most."""

Make = Callable[[int], dict[str, Any]]


class Row(NamedTuple):
    """One feature: what regard is given for a length, and how torch does the same.

    Attributes:
        heads, kv_heads, head_dim, value_dim, batch: of the tensors. queries: how many, the last of the length; None for
            all.
        most: longest length at which it is measured. learns: what of the bias wants a gradient; None for nothing.
        by_token: whether the heads of a token lie beside one another in memory, as a layer projects them.
        anew: whether mask and bias are others in every call, as that of every batch of a training.
        compiled: whether regard and torch are called in graphs of torch.compile.
        tokens: of each text, where there are as many texts as have the length in all; None for texts of that length.
        by_vmap: whether torch.func.vmap gives each text, and with torch.func.grad the gradients of each.
        twice: whether gradients are of the sum of the squares of gradients.
    """

    name: str
    make: Make
    heads: int = HEADS
    kv_heads: int = HEADS
    value_dim: int = HEAD_DIM
    batch: int = 1
    queries: int | None = None
    most: int = LENGTHS[-1]
    learns: str | None = None
    head_dim: int = HEAD_DIM
    by_token: bool = False
    anew: bool = False
    compiled: bool = False
    tokens: int | None = None
    by_vmap: bool = False
    twice: bool = False


def _random(length: int) -> Tensor:
    return torch.rand(length, length, generator=torch.Generator().manual_seed(0)) < 0.5


def _blocks(length: int) -> Tensor:
    """Blocks of 64, a quarter of them at random."""
    count = -(-length // 64)
    blocks = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < 0.25
    return blocks.fill_diagonal_(True).repeat_interleave(64, 0).repeat_interleave(64, 1)[:length, :length]


def _ragged(length: int) -> list[int]:
    """Lengths of documents of 20 to 200 tokens."""
    draw = torch.Generator().manual_seed(0)
    found: list[int] = []
    while sum(found) < length:
        found.append(min(int(torch.randint(20, 201, (), generator=draw)), length - sum(found)))
    return found


_TEXTS = torch.Generator().manual_seed(0)
"""By which texts of other lengths are drawn in every call."""


def _padded(length: int) -> dict[str, Any]:
    """32 texts from a quarter of the length on, in another order each time."""
    lengths = torch.linspace(length // 4, length, 32).long()
    return {"mask": Causal() & Padding(lengths[torch.randperm(32, generator=_TEXTS)])}


def _ids_anew(length: int, rows: int) -> Tensor:
    """Rows of four documents, of other lengths each time."""
    ends = torch.rand(rows, 3, generator=_TEXTS).mul(length).long().sort(1).values
    return torch.searchsorted(ends, torch.arange(length).repeat(rows, 1), right=True)


def _documents_anew(length: int, rows: int = 8) -> Mask:
    return Document(_ids_anew(length, rows))


def _function_anew(length: int) -> dict[str, Any]:
    """Such documents by a function, which is another one each time."""
    ids = _ids_anew(length, 1)
    return {"mask": Where(lambda batch, head, query, key: ids[batch, query] == ids[batch, key])}


def _prefixes_anew(length: int) -> dict[str, Any]:
    """8 texts, of which each sees a part of its own from everywhere, as a question."""
    return {"mask": Causal() | Prefix(torch.randint(1, length // 2, (8,), generator=_TEXTS))}


def _keys(length: int, share: float) -> Mask:
    """So many of the keys at random."""
    return Padding(torch.rand(1, length, generator=torch.Generator().manual_seed(0)) < share)


def _keys_anew(length: int) -> dict[str, Any]:
    """Half of the keys at random, others each time."""
    return {"mask": Padding(torch.rand(1, length, generator=_TEXTS) < 0.5)}


def _cells_anew(length: int) -> dict[str, Any]:
    """Half of all cells at random, others each time; every query sees its own key."""
    cells = torch.rand(1, 1, length, length, generator=_TEXTS) < 0.5
    return {"mask": Dense(cells | torch.eye(length, dtype=torch.bool))}


def _cells_and_bias_anew(length: int) -> dict[str, Any]:
    """The same, and a number for each cell."""
    return _cells_anew(length) | {"bias": torch.randn(1, 1, length, length, generator=_TEXTS)}


def _blocks_anew(length: int) -> dict[str, Any]:
    """16 by 16 blocks, a quarter of them at random and those on the diagonal, others each time."""
    blocks = torch.rand(16, 16, generator=_TEXTS).lt(0.25).fill_diagonal_(True)
    size = -(-length // 16)
    return {"mask": Dense(blocks.repeat_interleave(size, 0).repeat_interleave(size, 1)[None, None, :length, :length])}


def _apart_anew(length: int) -> dict[str, Any]:
    """8 documents whose tokens lie apart, others each time."""
    return {"mask": Document(torch.randint(0, 8, (1, length), generator=_TEXTS))}


def _places_anew(length: int) -> dict[str, Any]:
    """In a cache of one size, 8 texts have come to places of their own, others each time."""
    return {"mask": Causal(offset=torch.randint(0, length, (8,), generator=_TEXTS))}


def _ids(length: int) -> Tensor:
    return torch.randint(0, 8, (1, length), generator=torch.Generator().manual_seed(0))


def _table(both: bool, mask: Mask | None, learns: bool = False) -> Make:
    def make(length: int) -> dict[str, Any]:
        table = torch.randn(32, HEADS, generator=torch.Generator().manual_seed(0)).requires_grad_(learns)
        return {"mask": mask, "bias": RelativeBias(table, bidirectional=both)}

    return make


def _dense(mask: Mask | None, learns: bool = False) -> Make:
    def make(length: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(0)
        return {"mask": mask, "bias": torch.randn(1, HEADS, length, length, generator=draw).requires_grad_(learns)}

    return make


def _heads_innermost(length: int) -> dict[str, Any]:
    """As an embedding of distances gives a bias, T5's for one: the numbers of all heads beside one another."""
    numbers = torch.randn(length, length, HEADS, generator=torch.Generator().manual_seed(0))
    return {"bias": numbers.permute(2, 0, 1)[None]}


def _cells_and_bias(length: int) -> dict[str, Any]:
    """Half of all cells at random, and a number for each."""
    numbers = torch.randn(1, 1, length, length, generator=torch.Generator().manual_seed(0))
    return {"mask": Dense(_random(length)), "bias": numbers}


def _fixed(**arguments: Any) -> Make:
    return lambda length: arguments


def _sparse(length: int) -> Mask:
    """The mask of Sparse Transformers (Child et al. 2019): about the root of the length behind, and every such key."""
    step = math.isqrt(length)
    return Window(step) | Strided(step)


ROWS = (
    Row("causal", _fixed(mask=Causal())),
    Row("causal, 1 head", _fixed(mask=Causal()), heads=1, kv_heads=1),
    Row("full, 1 head of 512", _fixed(), heads=1, kv_heads=1, head_dim=512, value_dim=512),
    Row("20 queries, 1 head", _fixed(), heads=1, kv_heads=1, queries=20),
    Row("1 query, 8 texts, heads beside one another", _fixed(), batch=8, queries=1, most=2048, by_token=True),
    Row("100 queries, 1 head of 512", _fixed(), heads=1, kv_heads=1, head_dim=512, value_dim=512, queries=100),
    Row("causal, 2 heads of 256", _fixed(mask=Causal()), heads=2, kv_heads=2, head_dim=256, value_dim=256),
    Row("cells and bias, 2 heads of 256", _cells_and_bias, heads=2, kv_heads=2, head_dim=256, value_dim=256),
    Row("heads of 80 beside one another", _fixed(), head_dim=80, value_dim=80, by_token=True),
    Row("heads of 72, causal", _fixed(mask=Causal()), head_dim=72, value_dim=72),
    Row("causal, 3 heads", _fixed(mask=Causal()), heads=3, kv_heads=3),
    Row("full", _fixed()),
    Row("grouped heads, causal", _fixed(mask=Causal()), kv_heads=2),
    Row("value_dim 32, causal", _fixed(mask=Causal()), value_dim=32),
    Row("window 256", _fixed(mask=Causal() & Window(256))),
    Row("streaming: window 256 or prefix 4", _fixed(mask=Causal() & (Window(256) | Prefix(4)))),
    Row("window or stride, causal", lambda n: {"mask": Causal() & _sparse(n)}),
    Row("far keys alone", _fixed(mask=Causal() & ~Window(256))),
    Row("streaming, ALiBi", _fixed(mask=Causal() & (Window(256) | Prefix(4)), bias=Alibi(HEADS))),
    Row("8 documents, causal", lambda n: {"mask": Causal() & Document.from_lengths([n // 8] * 8)}),
    Row("documents of 20 to 200, causal", lambda n: {"mask": Causal() & Document.from_lengths(_ragged(n))}),
    Row("8 documents, tokens apart", lambda n: {"mask": Document(_ids(n))}),
    Row(
        "8 documents, tokens apart, padded right",
        lambda n: {"mask": Document(_ids(n)) & Padding(torch.tensor([3 * n // 4]))},
    ),
    Row("8 documents, tokens apart, window 512", lambda n: {"mask": Causal() & Window(512) & Document(_ids(n))}),
    Row("causal, 8 documents, tokens apart, or a prefix",
        lambda n: {"mask": Causal() & (Document(_ids(n)) | Prefix(n // 16))}),
    Row("8 documents, tokens apart, random mask", lambda n: {"mask": Document(_ids(n)) & Dense(_random(n))}),
    Row("8 documents, tokens apart, ALiBi", lambda n: {"mask": Document(_ids(n)), "bias": Alibi(HEADS)}),
    Row("blocks at random", lambda n: {"mask": Dense(_blocks(n))}),
    Row("random mask", lambda n: {"mask": Dense(_random(n))}),
    Row("half of the keys, at random", lambda n: {"mask": _keys(n, 0.5)}),
    Row("a tenth of the keys, at random, causal", lambda n: {"mask": Causal() & _keys(n, 0.1)}),
    Row("function as mask", lambda n: {"mask": Where(lambda batch, head, query, key: key <= query)}),
    Row("bias, dense", _dense(None)),
    Row("bias, dense, causal", _dense(Causal())),
    Row("bias, dense, window 256", _dense(Causal() & Window(256))),
    Row("bias, dense, trained", _dense(None, learns=True), learns="numbers"),
    Row("bias, dense, trained, 4 texts", _dense(None, learns=True), batch=4, most=2048, learns="numbers"),
    Row("bias, ALiBi", _fixed(bias=Alibi(HEADS))),
    Row("bias, ALiBi, causal", _fixed(bias=Alibi(HEADS), mask=Causal())),
    Row("bias, ALiBi, window 256", _fixed(bias=Alibi(HEADS), mask=Causal() & Window(256))),
    Row("bias, T5", _table(True, None)),
    Row("bias, T5, causal", _table(False, Causal())),
    Row("bias, T5, trained", _table(True, None, learns=True), learns="table"),
    Row("bias, T5, causal, trained", _table(False, Causal(), learns=True), learns="table"),
    Row("softcap, causal", _fixed(mask=Causal(), softcap=30.0)),
    Row("softcap, window 256", _fixed(mask=Causal() & Window(256), softcap=30.0)),
    Row("dropout, causal", _fixed(mask=Causal(), dropout=0.1)),
    Row("dropout, window 256", _fixed(mask=Causal() & Window(256), dropout=0.1)),
    Row("sink, causal", lambda n: {"mask": Causal(), "sink": torch.zeros(HEADS)}),
    Row("sink, window 256", lambda n: {"mask": Causal() & Window(256), "sink": torch.zeros(HEADS)}),
    Row("softcap, ALiBi, causal", _fixed(bias=Alibi(HEADS), mask=Causal(), softcap=30.0)),
    Row("softcap, dropout, sink, causal",
        lambda n: {"mask": Causal(), "softcap": 30.0, "dropout": 0.1, "sink": torch.zeros(HEADS)}),
    Row("1 query, 2 kv heads, sink", lambda n: {"sink": torch.zeros(HEADS)}, kv_heads=2, queries=1),
    Row("1 query, window 256 or prefix 4", _fixed(mask=Causal() & (Window(256) | Prefix(4))), queries=1),
    Row("5 queries, causal", _fixed(mask=Causal()), queries=5),
    Row("16 queries, ALiBi, causal", _fixed(bias=Alibi(HEADS), mask=Causal()), queries=16),
    Row("17 queries, 32 texts", _fixed(), 2, 2, 256, 32, 17, most=2048, head_dim=256),
    Row("64 queries, heads of 128", _fixed(), head_dim=128, value_dim=128, queries=64),
    Row("texts of 19 tokens", _fixed(), most=2048, tokens=19),
    Row("16 texts of 4 heads, dropout, causal", _fixed(mask=Causal(), dropout=0.1), 4, 4, batch=16, most=512),
    Row("32 texts, heads beside one another, causal", _fixed(mask=Causal()), batch=32, most=512, by_token=True),
    Row(
        "16 heads of 128 beside one another, causal", _fixed(mask=Causal()), heads=16, kv_heads=16, head_dim=128,
        value_dim=128, most=2048, by_token=True,
    ),
    Row("32 texts padded, causal, new in every call", _padded, batch=32, most=512, anew=True),
    Row("8 rows of documents, causal, new in every call",
        lambda n: {"mask": Causal() & _documents_anew(n)}, batch=8, most=2048, anew=True),
    Row("8 rows of documents or a prefix, new in every call",
        lambda n: {"mask": _documents_anew(n) | Prefix(n // 8)}, batch=8, most=2048, anew=True),
    Row("documents or a prefix, new in every call",
        lambda n: {"mask": _documents_anew(n, 1) | Prefix(n // 8)}, most=2048, anew=True),
    Row("8 texts, causal or a prefix of each, new in every call", _prefixes_anew, batch=8, most=2048, anew=True),
    Row("documents by a function, new in every call", _function_anew, most=2048, anew=True),
    Row("half of the keys, new in every call", _keys_anew, most=2048, anew=True),
    Row("random mask, new in every call", _cells_anew, most=2048, anew=True),
    Row("random mask, 1 head, new in every call", _cells_anew, heads=1, kv_heads=1, most=2048, anew=True),
    Row("random mask, value_dim 32, new in every call", _cells_anew, value_dim=32, most=2048, anew=True),
    Row("random mask and bias, new in every call", _cells_and_bias_anew, most=2048, anew=True),
    Row("blocks at random, new in every call", _blocks_anew, most=2048, anew=True),
    Row("documents apart, new in every call", _apart_anew, most=2048, anew=True),
    Row("1 query, 8 texts at places of their own, new in every call", _places_anew, batch=8, queries=1, anew=True),
    Row("bias, dense, new in every call", _dense(None), most=2048, anew=True),
    Row("bias, dense, heads innermost, new in every call", _heads_innermost, most=2048, anew=True),
    Row("8 texts by vmap", _fixed(), batch=8, most=512, by_vmap=True),
    Row("8 texts by vmap, causal", _fixed(mask=Causal()), batch=8, most=512, by_vmap=True),
    Row("a penalty on gradients", _fixed(), most=2048, twice=True),
    Row("a penalty on gradients, causal", _fixed(mask=Causal()), most=2048, twice=True),
    Row("full, compiled", _fixed(), most=2048, compiled=True),
    Row("causal, compiled", _fixed(mask=Causal()), most=2048, compiled=True),
    Row("window 256, compiled", _fixed(mask=Causal() & Window(256)), most=2048, compiled=True),
    Row("sink, causal, compiled", lambda n: {"mask": Causal(), "sink": torch.zeros(HEADS)}, most=2048, compiled=True),
    Row("1 query, padded left, compiled", lambda n: {"mask": Causal() & Padding(torch.arange(n)[None] >= n // 4)},
        queries=1, most=2048, compiled=True),
    Row("1 query, heads of 512, dropout, compiled", _fixed(dropout=0.1), 4, 2, 512, queries=1, most=2048, head_dim=512,
        compiled=True),
    Row("1 query, sink, compiled", lambda n: {"mask": Causal(), "sink": torch.zeros(HEADS)}, queries=1, most=2048,
        compiled=True),
)  # fmt: skip


MAX_DRAWN_SCORES = 1 << 26
"""Most scores of a call that is drawn at random: the formula takes half a second for them, with gradients."""


def drawn(number: int) -> tuple[Row, int, torch.dtype]:
    """A call that nobody thought of: sizes, dtype, mask, bias and the rest from a random number; half of all with heads
    as a layer projects them, and some in graphs of torch.compile, or with data that are others in every call."""
    of = random.Random(number)
    draw = torch.Generator().manual_seed(number)
    dtype = of.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
    kv_heads, group, length = of.choice([1, 2, 3, 4, 8]), of.choice([1, 1, 2, 4]), int(2 ** of.uniform(7, 11.5))
    heads, size = kv_heads * group, of.choice([32, 48, 64, 64, 64, 72, 80, 96, 128, 128, 256, 512])
    value_dim = of.choice([size, size, size, size, of.choice([16, 64, 100, 128])])
    queries = of.choice([length, length, length, length, length // 2, 100, of.randint(1, 40), 1])
    most = max(1, MAX_DRAWN_SCORES // (heads * queries * length))
    batch = of.choice([count for count in (1, 1, 2, 4, 16, 48) if count <= most])

    def lengths() -> Tensor:
        return torch.randint(length // 4, length + 1, (batch,), generator=draw)

    def ids() -> Tensor:
        ends = torch.rand(batch, 4, generator=draw).mul(length).long().sort(1).values
        return torch.searchsorted(ends, torch.arange(length).repeat(batch, 1), right=True)

    def padded_left() -> Tensor:
        return torch.arange(length) >= length - lengths()[:, None]

    cell_heads = of.choice([1, 1, heads])
    with_data: dict[str, Callable[[], Mask]] = {
        "padding": lambda: Padding(lengths()),
        "padding, causal": lambda: Causal() & Padding(lengths()),
        "padding left, causal": lambda: Causal() & Padding(padded_left()),
        "cells": lambda: Dense(torch.rand(1, cell_heads, queries, length, generator=draw) < 0.5),
        "cells, causal": lambda: Causal() & Dense(torch.rand(1, cell_heads, queries, length, generator=draw) < 0.9),
        "keys at random": lambda: Causal() & Padding(torch.rand(batch, length, generator=draw) < 0.5),
        "documents, causal": lambda: Causal() & Document(ids()),
        "documents": lambda: Document(ids()),
        "documents or a prefix": lambda: Document(ids()) | Prefix(length // 8),
        "documents apart": lambda: Document(torch.randint(0, 5, (batch, length), generator=draw)),
        "places, causal": lambda: Causal(offset=torch.randint(0, length, (batch,), generator=draw)),
    }
    without: dict[str, Callable[[], Mask | None]] = {
        "full": lambda: None,
        "causal": Causal,
        "window": lambda: Causal() & Window(of.choice([20, 50, 128, 256, 500])),
        "window both ways": lambda: Window(of.choice([50, 256])),
        "streaming": lambda: Causal() & (Window(128) | Prefix(4)),
        "prefix": lambda: Causal() | Prefix(length // 4),
        "far keys": lambda: Causal() & ~Window(length // 3),
        "window or stride": lambda: Causal() & _sparse(length),
        "function": lambda: Where(lambda batch, head, query, key: (key <= query) & ((query - key) % 3 != 1)),
    }
    if queries < length:  # documents are those of all tokens
        with_data = {name: make for name, make in with_data.items() if "documents" not in name}
    biases: dict[str, Callable[[], Any]] = {
        "ALiBi": lambda: Alibi(heads),
        "T5": lambda: RelativeBias(torch.randn(32, heads, generator=draw)),
        "T5, trained": lambda: RelativeBias(torch.randn(32, heads, generator=draw).requires_grad_()),
        "dense bias": lambda: torch.randn(1, heads, queries, length, generator=draw),
        "dense bias of each text": lambda: torch.randn(batch, 1, queries, length, generator=draw),
        "dense bias, trained": lambda: torch.randn(1, heads, queries, length, generator=draw).requires_grad_(),
        "bias of keys": lambda: torch.randn(1, heads, 1, length, generator=draw),
    }
    mask, bias = of.choice([*with_data, *without]), of.choice([None, None, None, None, *biases])
    make = (with_data | without)[mask]
    fixed = {"mask": make(), "bias": None if bias is None else biases[bias]()}
    rest = {"softcap": 30.0, "dropout": 0.1, "sink": torch.zeros(heads)}
    fixed |= {name: value for name, value in rest.items() if of.random() < 0.12}
    anew, compiled = mask in with_data and of.random() < 0.4, of.random() < 0.15
    compiled = compiled and not anew
    more = [bias, *(name for name in rest if name in fixed), anew and "new", compiled and "compiled"]
    name = ", ".join([mask, *filter(None, more)])
    sizes = f"{batch} x {heads}/{kv_heads} x {queries}/{length} x {size}/{value_dim}"
    learns = {"dense bias, trained": "numbers", "T5, trained": "table"}.get(bias or "")
    row = Row(
        f"{number}: {name} ({sizes})", lambda _: fixed | {"mask": make()} if anew else fixed, heads, kv_heads,
        value_dim, batch, queries, learns=learns, head_dim=size, by_token=of.random() < 0.5, anew=anew,
        compiled=compiled,
    )  # fmt: skip
    return row, length, dtype


CPU = torch.device("cpu")


def moved(given: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The arguments of a row on a device; what learns is a leaf there."""

    def to(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    if device == CPU:
        return given
    moves = {Tensor: to, Rule: lambda rule: rule.map_tensors(to)}
    return {
        name: next((move(value) for kind, move in moves.items() if isinstance(value, kind)), value)
        for name, value in given.items()
    }


def allowed(mask: Mask | None, row: Row, length: int, device: torch.device = CPU) -> Tensor:
    """Which scores are allowed, [1 or batch, 1 or heads, queries, length]."""
    queries = row.queries or length
    if mask is None:
        return torch.ones(1, 1, queries, length, dtype=torch.bool, device=device)
    cells = mask.bind(Grid(row.batch, row.heads, queries, length, device)).allowed(range(queries), range(length))
    return cells.expand(-1, -1, queries, length)


def torch_ways(
    row: Row, given: dict[str, Any], length: int, dtype: torch.dtype, device: torch.device
) -> list[Callable[..., Tensor]]:
    """What can be written with torch, each of which is the best for some calls: its function, where there is one, and
    the formula, where it is as exact, gives no NaN, and has not so many scores that it is slower. What can be made
    beforehand is not timed: neither a finished table, nor which scores a mask allows."""
    by_function = None if row.twice else _by_function(row, given, length, dtype, device)  # its gradients have none
    if by_function is None:
        return [_formula(row, given, length, dtype, device)]
    scores = row.batch * row.heads * (row.queries or length) * length
    few = dtype is torch.float32 and scores <= MAX_FORMULA_SCORES and not row.compiled
    mask = given.get("mask")
    if not few or not (mask is None or bool(allowed(mask, row, length, device).any(-1).all())):
        return [by_function]
    return [by_function, _formula(row, given, length, dtype, device)]


def _by_function(
    row: Row, given: dict[str, Any], length: int, dtype: torch.dtype, device: torch.device
) -> Callable[..., Tensor] | None:
    """`scaled_dot_product_attention`; None where it cannot do it."""
    mask, bias = given.get("mask"), given.get("bias")
    grouped, queries = row.heads != row.kv_heads, row.queries or length
    if any(given.get(name) for name in ("softcap", "dropout")) or given.get("sink") is not None:
        return None
    if bias is None:
        if mask is None:
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
        if isinstance(mask, Causal) and queries == length and mask.offset is None:
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        if "documents" in row.name and row.name.endswith("causal") and not row.anew:  # as whoever packs them can
            lengths = _ragged(length) if "20" in row.name else [length // 8] * 8
            return lambda q, k, v: _one_by_one(q, k, v, lengths)
        cells = allowed(mask, row, length, device)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=cells, enable_gqa=grouped)
    table = _table_of(row, given, length, dtype, device)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=table(), enable_gqa=grouped)


def _table_of(
    row: Row, given: dict[str, Any], length: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor | None]:
    """A function of what mask and bias add to the scores, None if nothing: made in every call of what learns, or of a
    mask and a bias, one of them new; otherwise beforehand."""
    mask, bias, queries = given.get("mask"), given.get("bias"), row.queries or length
    cells = None if mask is None else allowed(mask, row, length, device)

    def made() -> Tensor | None:
        numbers = None
        if isinstance(bias, Tensor):
            numbers = bias
        elif bias is not None:
            numbers = bias.bind(Grid(1, row.heads, queries, length, device)).values(range(queries), range(length))
        if cells is None:
            return None if numbers is None else numbers.to(dtype)
        if numbers is None:
            return torch.zeros(cells.shape, dtype=dtype, device=device).masked_fill(~cells, -math.inf)
        return numbers.masked_fill(~cells, -math.inf).to(dtype)

    if row.learns is not None or (row.anew and mask is not None and bias is not None):
        return made
    finished = made()
    return lambda: finished


def _formula(
    row: Row, given: dict[str, Any], length: int, dtype: torch.dtype, device: torch.device
) -> Callable[..., Tensor]:
    """Two products with a softmax between them."""
    softcap, rate, sink = (given.get(name) for name in ("softcap", "dropout", "sink"))
    table = _table_of(row, given, length, dtype, device)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if row.heads != row.kv_heads:
            k, v = (tensor.repeat_interleave(row.heads // row.kv_heads, 1) for tensor in (k, v))
        scores = q @ k.mT * q.shape[3] ** -0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        added = table()
        if added is not None:
            scores = scores + added
        if sink is not None:
            scores = torch.cat([scores, sink.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        weights = scores.softmax(-1)
        weights = weights if sink is None else weights[..., :-1]
        return F.dropout(weights, rate or 0.0) @ v

    return formula


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention of each document by itself."""
    of_each = zip(*(tensor.split(lengths, dim=2) for tensor in (q, k, v)), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*one, is_causal=True) for one in of_each], dim=2)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def measure(
    row: Row, length: int, dtype: torch.dtype, repeats: int, device: torch.device = CPU
) -> dict[str, Any] | None:
    """Ratios of a row, forward and with its backward pass; None if it allows nothing at this length, or is not
    measured at it."""
    draw = torch.Generator().manual_seed(1)
    if length > row.most:
        return None
    of_all = length
    if row.tokens is not None:
        row, length = row._replace(batch=max(1, length // row.tokens)), row.tokens
    queries = row.queries or length
    size = row.head_dim
    sizes = (row.heads, queries, size), (row.kv_heads, length, size), (row.kv_heads, length, row.value_dim)
    inputs = [torch.randn(row.batch, *size, generator=draw).to(device, dtype) for size in sizes]
    if row.by_token:
        inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    others = [torch.randn(1, row.heads, of_all, size, generator=draw).to(device, dtype) for _ in range(3)]
    given = moved(row.make(length), device)
    scores = int(allowed(given.get("mask"), row, length, device).expand(row.batch, row.heads, -1, -1).sum())
    if not scores:
        return None
    plain_scores = row.heads * of_all * (of_all + 1) // 2
    calls: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "plain": (plain, others),
        "regard": (lambda q, k, v: regard.attention(q, k, v, **given), inputs),
    }
    peers: list[str] = []
    if row.heads * queries * length <= MAX_TABLE_NUMBERS:
        ways = torch_ways(row, given, length, dtype, device)
        peers = [f"torch {number}" for number in range(len(ways))]
        calls |= {name: (one, inputs) for name, one in zip(peers, ways, strict=True)}
    if row.compiled:
        torch._dynamo.reset()  # each length has a graph of its own
        for name in ("regard", *peers):
            calls[name] = torch.compile(calls[name][0]), inputs
    found: dict[str, Any] = {"row": row.name, "length": of_all, "dtype": str(dtype).removeprefix("torch.")}
    for way in ("forward", "backward"):
        times: dict[str, list[float]] = {name: [] for name in calls}
        spent, repeat = 0.0, -1
        while repeat < repeats or (spent < QUICK_SECONDS and repeat < MAX_QUICK_REPEATS):
            repeat += 1
            for name in in_turn(list(calls), repeat):
                call, tensors = calls[name]
                if row.anew:
                    given |= moved(row.make(length), device)
                leaves = [tensor.detach().requires_grad_(way == "backward") for tensor in tensors]
                with torch.set_grad_enabled(way == "backward"):
                    taken = seconds_of(_work(row, call, leaves, way), device)
                if repeat:  # the first one warms up
                    times[name].append(taken)
                    spent += taken
        ratios = [ours / theirs for ours, theirs in zip(times["regard"], times["plain"], strict=True)]
        found[way] = {
            "ms": round(statistics.median(times["regard"]) * 1e3, 3),
            "per_score": round(statistics.median(ratios) * plain_scores / scores, 3),
        }
        if peers:
            found[way]["against_torch"] = min(_against(times["regard"], times[name]) for name in peers)
    return found


def _work(row: Row, call: Callable[..., Tensor], leaves: Sequence[Tensor], way: str) -> Callable[[], object]:
    """What is timed of a call, without anything around it."""
    if row.by_vmap and call is not plain:
        each = _of_each(call, way)
        texts = [leaf.detach() for leaf in leaves]
        return lambda: each(*texts)
    if way == "forward":
        return lambda: call(*leaves)
    if row.twice and call is not plain:
        return lambda: _penalty(call, leaves).backward()
    return lambda: call(*leaves).sum().backward()


def _of_each(call: Callable[..., Tensor], way: str) -> Callable[..., Any]:
    """A call of each text by itself, or its gradients, by torch.func.vmap."""

    def of_one(*text: Tensor) -> Tensor:
        return call(*(tensor[None] for tensor in text))[0]

    if way == "forward":
        return torch.func.vmap(of_one)
    return torch.func.vmap(torch.func.grad(lambda *text: of_one(*text).sum(), (0, 1, 2)))


def _penalty(call: Callable[..., Tensor], leaves: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of gradients."""
    grads = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    return torch.stack([grad.square().sum() for grad in grads]).sum()


def _against(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of each turn."""
    return round(statistics.median(peer / own for own, peer in zip(ours, theirs, strict=True)), 3)


def report(kinds_of_processors: Sequence[dict[str, Any]]) -> str:
    """docs/cost-per-score.md."""
    lines = [
        "# Cost per allowed score",
        "",
        "Written by `python benchmarks/features.py --report` from `benchmarks/results/features-*.json`; `make bench`",
        "measures anew, and `make gpu` on a GPU. Each row is one call, with 8 heads of 64 unless it says so. Which",
        "library multiplies what depends on the processor, and there is a part for each kind; and one without the",
        "compiled library, as on Windows, or where there was no compiler.",
        "",
        "- **per score**: time per score that the mask allows, over that of torch's plain causal attention of the same",
        "  length. A feature that hides half of the scores at random cannot cost less than 2 where all are computed.",
        "- **against torch**: time of the best that can be written with torch (`scaled_dot_product_attention` with a",
        "  dense mask or a finished table, or the formula) over regard's. Above 1, regard takes less. In bfloat16",
        "  the formula rounds scores and weights to bfloat16, and is less exact: regard's scores are float32. Of few",
        "  float32 scores, the formula may be faster than torch's function: then it is the peer. Where a part below",
        "  does not say so, it was measured before, beside the function wherever there is one.",
        "",
        "The first number is forward, the second forward and backward. By vmap these are the gradients of each text",
        "(`torch.func.vmap` of `torch.func.grad`); of a penalty on gradients, those of the sum of their squares.",
    ]
    for data in kinds_of_processors:
        lines += kinds.heading(data["machine"])
        if data.get("peers") == BOTH:
            lines += ["", "Against torch: the faster of its function and the formula."]
        lines += _tables(data)
    return "\n".join(lines) + "\n"


def _tables(data: dict[str, Any]) -> list[str]:
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        for length in dict.fromkeys(row["length"] for row in data["rows"]):
            rows = [row for row in data["rows"] if (row["dtype"], row["length"]) == (dtype, length)]
            if not rows:
                continue
            lines += ["", f"### {dtype}, {length:,} tokens", "", "| feature | ms | per score | against torch |"]
            lines += ["| --- | ---: | ---: | ---: |"]
            for row in rows:
                ways = row["forward"], row["backward"]
                against = " / ".join(f"{way['against_torch']:.2f}" for way in ways if "against_torch" in way)
                ms = " / ".join(f"{way['ms']:.3g}" for way in ways)
                each = " / ".join(f"{way['per_score']:.2f}" for way in ways)
                lines.append(f"| {row['row']} | {ms} | {each} | {against} |")
    return lines


def _say(found: dict[str, Any]) -> None:
    ways = [found["forward"], found["backward"]]
    print(f"{found['dtype']:9}{found['length']:6}  {found['row']:34}", *(
        f"{way['ms']:9.2f} ms {way['per_score']:6.2f} {way.get('against_torch', math.nan):6.2f}" for way in ways
    ), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names of rows, with * and ?")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--random", type=int, default=0, help="measure so many calls drawn at random, and no others")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda; without a GPU nothing is measured")
    parser.add_argument("--output", type=Path, help="where results go; a whole run goes to benchmarks/results")
    parser.add_argument("--report", action="store_true", help="write the page from the results, and measure nothing")
    chosen = parser.parse_args()
    if chosen.report:
        PAGE.write_text(report(kinds.every("features")), encoding="utf-8")
        return
    try:
        device = check_device(chosen.device)
    except ValueError as error:
        print(f"features.py: {error}: nothing was measured")
        return
    for number in range(chosen.seed, chosen.seed + chosen.random):
        row, length, dtype = drawn(number)
        found = measure(row, length, dtype, chosen.repeats, device)
        if found is not None:
            _say(found)
    if chosen.random:
        return
    whole = chosen.rows == "*" and chosen.lengths == LENGTHS and len(chosen.dtypes) == 2
    data: dict[str, Any] = {"machine": machine(device), "peers": BOTH, "rows": []}
    output = chosen.output or (kinds.file("features", data["machine"]) if whole else None)
    for dtype in chosen.dtypes:
        for length in chosen.lengths:
            for row in ROWS:
                if not fnmatch.fnmatch(row.name, chosen.rows):
                    continue
                quick = length < 4096 or row.queries is not None
                repeats = chosen.repeats if quick else max(2, chosen.repeats // 3)
                found = measure(row, length, getattr(torch, dtype), repeats, device)
                if found is None:
                    continue
                data["rows"].append(found)
                _say(found)
                if output:
                    output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
