"""What a call costs beside the other ways to compute it: time and memory, in one run on one machine.

A `Task` is a row: tensors of some sizes and a mask. A `Peer` is a way to do it: regard, torch's function in the form
that suits the task best, torch's function with a dense bool mask, compiled FlexAttention, the explicit formula; and for
a whole layer `nn.MultiheadAttention` and x-transformers, with the same weights. A peer that cannot do a task says why,
and one that gives another result is not timed, so that nobody is compared on different work.

    time     median of repeats in which the peers take turns on the same tensors; a first call is not counted, neither
             is the making of masks
    spread   the quartiles of how many times regard's time a peer took in the same repeat; of regard itself, of its
             times as shares of their median
    others   the share of the processors that other programs took meanwhile, where the system tells
    memory   the most that a second call takes beyond query, key and value, in a process of its own: results
             and what the peer prepared (a dense mask) included, what libraries keep for themselves not
"""

import contextlib
import json
import math
import multiprocessing
import os
import platform
import re
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.extras import how
from regard.functional import attention, plan
from regard.layouts import from_torch
from regard.masks import Causal, Chunk, Document, Mask, Padding, Prefix, Strided, Window
from regard.shapes import Grid

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""How far two results may be apart, as a share of the largest number in them."""

LARGEST_SQUARE = 1 << 28
"""Peers that hold query_len x key_len numbers are asked up to this many: 1 GiB of float32, a few times over."""

QUICK = 8
"""A quick run is the same tasks at an eighth of the length, in float32, five times each, without memory and without
FlexAttention, whose compiling takes longer than all of it."""

QUICK_REPEATS = 5

BUSY = 0.1
"""Share of the processors from which on a row says that others took it."""

SECONDS = 8.0
"""Repeats end when a row has taken this long, but not before the second."""

sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
MiB = 1 << 20


# --- tasks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One row: tensors of these sizes, and a mask.

    Attributes:
        torch_form: torch's best form; None: `sdpa` with a dense bool mask. `form` says it in words.
        rule: the mask as FlexAttention takes it, of (batch, head, query, key); None: everybody sees everybody.
        layer: the whole layer, on [batch, length, heads * head_dim], instead of the function.
        sweep: measured for the plots, in float32 alone.
    """

    name: str
    length: int
    mask: Mask | None = None
    torch_form: Callable[..., Tensor] | None = None
    form: str = "dense bool mask"
    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    backward: bool = False
    batch: int = 1
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 64
    query_len: int | None = None
    dropout: float = 0.0
    layer: bool = False
    sweep: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, N={self.length}"

    @property
    def queries(self) -> int:
        return self.length if self.query_len is None else self.query_len

    @property
    def cells(self) -> int:
        """Query_len x key_len."""
        return self.queries * self.length

    def allowed(self) -> Tensor:
        """The mask as a dense tensor: bool [batch or 1, 1, query_len, key_len]."""
        assert self.mask is not None
        bound = self.mask.bind(Grid(self.batch, self.heads, self.queries, self.length))
        allowed = bound.allowed(range(self.queries), range(self.length))
        return allowed.expand(-1, -1, self.queries, self.length).contiguous()

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Query, key and value; for a layer its tokens alone. The same at every call."""
        draw = torch.Generator().manual_seed(0)
        if self.layer:
            shapes: Sequence[tuple[int, ...]] = [(self.batch, self.length, self.heads * self.head_dim)]
        else:
            sizes = ((self.heads, self.queries), (self.kv_heads, self.length), (self.kv_heads, self.length))
            shapes = [(self.batch, heads, length, self.head_dim) for heads, length in sizes]
        drawn = (torch.randn(shape, generator=draw).to(dtype) for shape in shapes)
        return tuple(tensor.requires_grad_(self.backward) for tensor in drawn)


def tasks(shrink: int = 1) -> list[Task]:
    """All rows; `shrink` divides every length, windows, documents and the like included."""

    def n(length: int) -> int:
        return max(2, length // shrink)

    w, chunk, head, document, prefix = n(256), n(512), n(1024), n(512), n(1024)
    window, window_rule = Causal() & Window(w), causal_and(lambda q, k: q - k < w)
    documents = ragged(n(8192), shrink)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(n(64), n(1024) + 1, (8,), generator=draw)
    padded: dict[str, Any] = {"mask": Padding(lengths), "rule": lambda b, h, q, k: k < lengths[b], "batch": 8}

    def full(length: int, **more: Any) -> Task:
        return Task("full", n(length), None, sdpa, "as it is", **more)

    def causal(length: int, **more: Any) -> Task:
        return Task("causal", n(length), Causal(), torch_causal, "is_causal", causal_and(), **more)

    def windowed(length: int, **more: Any) -> Task:
        return Task("window 256", n(length), window, rule=window_rule, **more)

    def equal_documents(length: int, **more: Any) -> Task:
        count = n(length) // document
        return Task(
            "documents of 512", count * document, Causal() & Document.from_lengths([document] * count),
            side_by_side(document), "as a batch", causal_and(lambda q, k: q // document == k // document), **more,
        )  # fmt: skip

    rows = [
        full(1024),
        causal(512),
        causal(1024),
        causal(4096),
        windowed(4096),
        windowed(8192),
        replace(windowed(4096, backward=True), name="window 256, forward and backward"),
        equal_documents(4096),
        Task("ragged documents", sum(documents), Causal() & Document.from_lengths(documents), one_by_one(documents),
             "one by one", causal_and(lambda q, k: ids[q] == ids[k])),
        Task("right padding, 8 rows", n(1024), torch_form=row_by_row(lengths.tolist()), form="row by row", **padded),
        Task("prefix 1024 | causal", n(8192), Causal() | Prefix(prefix), causal_beside(prefix),
             "prefix and rest apart", lambda b, h, q, k: (k <= q) | (k < prefix)),
        Task("streaming, window 256 | prefix 4", n(8192), Causal() & (Window(w) | Prefix(4)),
             rule=causal_and(lambda q, k: (q - k < w) | (k < 4))),
        Task("chunks of 512, causal", n(8192), Causal() & Chunk(chunk), side_by_side(chunk), "as a batch",
             causal_and(lambda q, k: q // chunk == k // chunk)),
        Task("strided 8, causal", n(8192), Causal() & Strided(8), every(8), "as a batch",
             causal_and(lambda q, k: (q - k) % 8 == 0)),
        Task("decode, 32 heads on 8 of 128", n(32768), Causal(), partial(sdpa, enable_gqa=True), "enable_gqa",
             heads=32, kv_heads=8, head_dim=128, query_len=1),
        Task("dropout 0.1, causal, forward and backward", n(4096), Causal(), torch_causal, "is_causal, dropout_p",
             causal_and(), backward=True, dropout=0.1),
        Task("layer, full", head, layer=True),
        Task("layer, causal", head, Causal(), rule=causal_and(), layer=True),
        Task("layer, causal, forward and backward", head, Causal(), rule=causal_and(), layer=True, backward=True),
        Task("layer, right padding, 8 rows", head, layer=True, **padded),
        Task("layer, window 256", n(4096), window, rule=window_rule, layer=True),
        windowed(131072),
    ]  # fmt: skip
    sweep = [
        make(length, sweep=True)
        for make, most in ((full, 8192), (causal, 16384), (windowed, 65536), (equal_documents, 65536))
        for length in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
        if length <= most
    ]
    found: dict[str, Task] = {}
    for task in rows + sweep:
        found.setdefault(task.label, task)
    return list(found.values())


def ragged(total: int, shrink: int = 1) -> list[int]:
    """Log-normal lengths that sum to `total`."""
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(max(8, int(math.exp(5.5 + float(torch.randn((), generator=draw))) / shrink)))
    lengths[-1] -= sum(lengths) - total
    return lengths


def causal_and(
    also: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A rule for FlexAttention: no later key, and what else is asked of query and key."""
    if also is None:
        return lambda b, h, q, k: k <= q
    return lambda b, h, q, k: (k <= q) & also(q, k)


# torch's best forms


def torch_causal(*tensors: Tensor, dropout_p: float = 0.0) -> Tensor:
    return sdpa(*tensors, is_causal=True, dropout_p=dropout_p)


def side_by_side(length: int) -> Callable[..., Tensor]:
    """Equal documents next to each other in the batch, and back."""

    def run(*tensors: Tensor) -> Tensor:
        batch = tensors[0].shape[0]
        split = [t.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1) for t in tensors]
        output: Tensor = sdpa(*split, is_causal=True).unflatten(0, (batch, -1))
        return output.transpose(1, 2).flatten(2, 3)

    return run


def every(step: int) -> Callable[..., Tensor]:
    """Tokens `step` apart next to each other in the batch, and back."""

    def run(*tensors: Tensor) -> Tensor:
        batch = tensors[0].shape[0]
        split = [t.unflatten(2, (-1, step)).movedim(3, 1).flatten(0, 1) for t in tensors]
        output: Tensor = sdpa(*split, is_causal=True).unflatten(0, (batch, step))
        return output.movedim(1, 3).flatten(2, 3)

    return run


def one_by_one(lengths: list[int]) -> Callable[..., Tensor]:
    """A call per document."""

    def run(*tensors: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths, dim=2) for t in tensors), strict=True)
        return torch.cat([sdpa(*part, is_causal=True) for part in parts], dim=2)

    return run


def row_by_row(lengths: list[int]) -> Callable[..., Tensor]:
    """A call per batch row, on its real keys alone."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = ((query[i : i + 1], key[i : i + 1, :, :n], value[i : i + 1, :, :n]) for i, n in enumerate(lengths))
        return torch.cat([sdpa(*row) for row in rows])

    return run


def causal_beside(prefix: int) -> Callable[..., Tensor]:
    """Queries of the prefix see all of it; the later ones see it anyway, and are causal."""

    def run(*tensors: Tensor) -> Tensor:
        inside = sdpa(*(t[:, :, :prefix] for t in tensors))
        return torch.cat([inside, sdpa(*tensors, is_causal=True)[:, :, prefix:]], dim=2)

    return run


# --- peers --------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A call that is ready to be made, and the tensors that were made for it."""

    call: Callable[[], Tensor]
    holds: tuple[Tensor, ...] = ()


class Peer(NamedTuple):
    """A way to do a task."""

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
    if task.batch * task.cells > LARGEST_SQUARE:
        return (
            f"a dense mask of {task.queries:,} x {task.length:,} would take {task.batch * task.cells / 2**30:.0f} GiB"
        )
    return None


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
    scores = task.batch * task.heads * task.cells
    return f"its scores alone would take {scores * 4 / 2**30:.1f} GiB" if scores > LARGEST_SQUARE else None


def _flex(task: Task, inputs: tuple[Tensor, ...]) -> Prepared:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if task.rule is not None:
        batch = task.batch if task.batch > 1 else None
        blocks = create_block_mask(task.rule, batch, None, task.queries, task.length, device="cpu")
    run = compiled(flex_attention)
    return Prepared(lambda: run(*inputs, block_mask=blocks, enable_gqa=task.heads != task.kv_heads))


def _no_flex(task: Task) -> str | None:
    if task.dropout:
        return "it has no dropout"
    if task.backward:
        return "it has no backward pass on the CPU"
    if task.rule is not None and task.batch * task.cells > LARGEST_SQUARE:
        return f"making its block mask looks at {task.queries:,} x {task.length:,} cells"
    return None


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for these very shapes, with nothing left over from the task before."""
    torch.compiler.reset()
    return torch.compile(function, dynamic=False)


def _torch_layer(task: Task, dtype: torch.dtype) -> nn.MultiheadAttention:
    """The layer whose weights all layers have. Its biases are zero, so that x-transformers need none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = nn.MultiheadAttention(task.heads * task.head_dim, task.heads, batch_first=True)
    return layer.to(dtype).eval()


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
    layer = layer.to(x.dtype).eval()
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
        # as `context_mask`: given as `mask` it would also set the output of padding to zero, which is other work
        arguments = {"context_mask": allowed}
    return Prepared(lambda: layer(x, **arguments), (allowed,))


def _no_x_layer(task: Task) -> str | None:
    return None if find_spec("x_transformers") else f"x-transformers is not installed: {how('bench')}"


def _can(task: Task) -> None:
    return None


FUNCTIONS = (
    Peer("regard", _can, _regard),
    Peer("torch", _no_torch, _torch),
    Peer("torch, dense mask", _no_torch_dense, _torch_dense),
    Peer("FlexAttention", _no_flex, _flex),
    Peer("formula", _no_formula, _formula),
)
LAYERS = (
    Peer("regard", _can, _regard_layer),
    Peer("nn.MultiheadAttention", _can, _nn_layer),
    Peer("x-transformers", _no_x_layer, _x_layer),
)


def peers(task: Task) -> tuple[Peer, ...]:
    """Those who do this kind of task, regard first."""
    return LAYERS if task.layer else FUNCTIONS


# --- measuring ----------------------------------------------------------------------------------------------------

Results = tuple[Tensor, ...]


def work(task: Task, peer: Peer, inputs: tuple[Tensor, ...]) -> tuple[Callable[[], Results], tuple[Tensor, ...]]:
    """One peer's whole work, ready to be done: the output, and the gradients where they are asked for."""
    with torch.set_grad_enabled(task.backward), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peers have to say of themselves
        prepared = peer.prepare(task, inputs)

    def run() -> Results:
        with torch.set_grad_enabled(task.backward):
            output = prepared.call()
            if not task.backward:
                return (output,)
            return (output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output)))

    return run, prepared.holds


def difference(ours: Results, theirs: Results) -> float:
    """The largest difference of two results, as a share of the largest number in ours."""
    shares = []
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape:
            return math.inf
        most = (a.float() - b.float()).abs().max() / a.float().abs().max()
        shares.append(math.inf if most.isnan() else float(most))
    return max(shares)


def measure(
    task: Task,
    dtype: torch.dtype,
    *,
    repeats: int = 15,
    shrink: int = 1,
    memory: bool = True,
    compile: bool = True,
    watch: Callable[[str], None] = lambda doing: None,
) -> dict[str, Any]:
    """One row of the table.

    Args:
        repeats: how often each peer's call is timed; fewer where they take long.
        shrink: what `tasks` was given, so that another process finds the same task.
        memory: whether it is measured too.
        compile: whether peers that have to be compiled take part.
        watch: is told what is being done.
    """
    inputs = task.inputs(dtype)
    ready: dict[str, Callable[[], Results]] = {}
    entries: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    ours: Results = ()
    undropped = replace(task, dropout=0.0)
    for peer in peers(task):
        why = peer.cannot(task)
        if why is None and not compile and peer.name == "FlexAttention":
            why = "a quick run compiles nothing"
        if why is not None:
            skipped[peer.name] = why
            continue
        watch(f"{peer.name}: the first call")
        try:
            run, _ = work(task, peer, inputs)
            start = time.perf_counter()
            theirs = run()
            first = time.perf_counter() - start
            if task.dropout:  # who drops what differs, so results are compared without
                theirs = work(undropped, peer, inputs)[0]()
        except Exception as error:
            if peer is peers(task)[0]:
                raise
            skipped[peer.name] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
            continue
        ours = ours or theirs
        apart = difference(ours, theirs)
        if apart > TOLERANCE[dtype]:
            skipped[peer.name] = f"gives another result than regard: {apart:.2g} of the largest number apart"
            continue
        ready[peer.name] = run
        entries[peer.name] = {"compile_s": round(first, 2)} if peer.name == "FlexAttention" else {}
    results_size = _size(ours)
    del ours, theirs
    times: dict[str, list[float]] = {name: [] for name in ready}
    rivals = Others()
    began = time.perf_counter()
    for repeat in range(repeats):
        if repeat >= 2 and time.perf_counter() - began > SECONDS:
            break
        for name in in_turn(list(ready), repeat):
            watch(f"{name}: {repeat + 1} of {repeats}")
            start = time.perf_counter()
            ready[name]()
            times[name].append(time.perf_counter() - start)
    others = rivals.share()
    ours_alone = times[peers(task)[0].name]
    middle = statistics.median(ours_alone)
    for name, values in times.items():
        beside = [middle] * len(values) if values is ours_alone else ours_alone
        entries[name] |= {
            "ms": round(statistics.median(values) * 1e3, 3),
            "repeats": len(values),
            "spread": quartiles([value / our for value, our in zip(values, beside, strict=True)]),
        }
    ready.clear()
    unmeasured: dict[str, str] = {}
    for name in entries if memory else ():
        watch(f"{name}: memory")
        extra = memory_of(task, dtype, name, shrink)
        if isinstance(extra, str):
            unmeasured[name] = extra
        else:
            entries[name]["memory_mib"] = round(extra / MiB, 2)
    if "torch" in entries:
        entries["torch"]["form"] = task.form
    return {
        "task": task.name,
        "length": task.length,
        "query_len": task.queries,
        "batch": task.batch,
        "heads": task.heads,
        "kv_heads": task.kv_heads,
        "head_dim": task.head_dim,
        "dtype": name_of(dtype),
        "layer": task.layer,
        "sweep": task.sweep,
        "kernel": _kernel(task, dtype),
        "others": others,
        "inputs_mib": round(_size(inputs) / MiB, 2),
        "results_mib": round(results_size / MiB, 2),
        "peers": entries,
        "not_measured": skipped,
        "memory_not_measured": unmeasured,
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """Between which the middle half of the values lies; of fewer than four, between which all do.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 100.0])
    [2.0, 4.0]
    """
    if len(values) < 4:
        return [round(min(values), 3), round(max(values), 3)]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [round(low, 3), round(high, 3)]


class Others:
    """What other programs take of the processors from now on, and what a hypervisor takes of all."""

    def __init__(self) -> None:
        self.before = self._seconds()

    def share(self) -> float | None:
        """As a share of all processors; None where the system does not tell."""
        now = self._seconds()
        if now is None or self.before is None:
            return None
        everything, others = (after - before for after, before in zip(now, self.before, strict=True))
        return round(min(1.0, max(0.0, others / everything)), 3) if everything else None

    @staticmethod
    def _seconds() -> tuple[float, float] | None:
        """Of all processors since the system began: those in all, and those in which others ran."""
        try:
            with open("/proc/stat", encoding="utf-8") as file:
                ticks = [int(number) for number in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return None
        each = os.sysconf("SC_CLK_TCK")
        idle = ticks[3] + ticks[4]
        mine = os.times()
        return sum(ticks) / each, (sum(ticks) - idle) / each - sum(mine[:4])


def in_turn(names: list[str], repeat: int) -> list[str]:
    """Who comes when in a repeat. What one leaves behind, such as memory that the system has still to take back, slows
    down the next; so over as many repeats as there are names, everybody follows nearly everybody (Williams 1949,
    "Experimental Designs Balanced for the Estimation of Residual Effects of Treatments").

    >>> [in_turn(["a", "b", "c", "d"], repeat) for repeat in range(2)]
    [['a', 'b', 'd', 'c'], ['b', 'c', 'a', 'd']]
    """
    count = len(names)
    places = ((n + 1) // 2 if n % 2 else count - n // 2 for n in range(count))
    return [names[(place + repeat) % count] for place in places]


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _kernel(task: Task, dtype: torch.dtype) -> str:
    """The kernel that regard takes."""
    sizes = ((task.heads, task.queries), (task.kv_heads, task.length), (task.kv_heads, task.length))
    tensors = [torch.empty(task.batch, h, n, task.head_dim, dtype=dtype, requires_grad=task.backward) for h, n in sizes]
    with torch.set_grad_enabled(task.backward):
        return plan(*tensors, mask=task.mask, dropout=task.dropout).kernel


COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch.nn.attention.flex_attention")
"""What takes long to load; the processes that measure memory find it there."""

# Memory that is given back must go back at once, and nothing may be kept for the next call.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MKL_DISABLE_FAST_MM": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def memory_of(task: Task, dtype: torch.dtype, peer: str, shrink: int) -> int | str:
    """Bytes that a call takes beyond query, key and value, in a process of its own; or why that is not known."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "this system cannot fork"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["regard.bench", *COMPILER])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(
        target=_tell_memory, args=(send, task.label, shrink, dtype, peer, torch.get_num_threads()), daemon=True
    )
    with _environment(ENVIRONMENT):
        process.start()
    send.close()
    try:
        answer: int | str = receive.recv()
    except EOFError:
        process.join()
        answer = f"its process ended with code {process.exitcode}: out of memory?"
    finally:
        process.kill()
        process.join()
        receive.close()
    return answer


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tell_memory(send: Any, label: str, shrink: int, dtype: torch.dtype, peer: str, threads: int) -> None:
    """The other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process is told, and ends this one
    torch.set_num_threads(threads)
    try:
        task = next(task for task in tasks(shrink) if task.label == label)
        inputs = task.inputs(dtype)
        run, holds = work(task, next(p for p in peers(task) if p.name == peer), inputs)
        run()
        send.send(_size(holds) + most_taken(run))
    except Exception as error:
        send.send(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}")


def most_taken(run: Callable[[], object]) -> int:
    """The most bytes that this process held during `run`, beyond what it held before.

    A process is only told the most that it ever held. So it is filled up to that first, and whatever `run` takes shows.
    """
    ballast: list[Tensor] = []
    level = _most_held()
    while _most_held() <= level + 2**18:  # the system counts in steps of some dozen pages
        ballast.append(torch.ones(2**17, dtype=torch.uint8))
    before = _most_held()
    run()
    return _most_held() - before


def _most_held() -> int:
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most * 1024


# --- a run --------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Where and with what a run was made."""
    versions = {"torch": torch.__version__, "regard": regard.__version__}
    if find_spec("x_transformers"):
        from importlib.metadata import version

        versions["x-transformers"] = version("x-transformers")
    return {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = re.search(r"model name\s*:\s*(.+)", file.read())
    except OSError:
        name = None
    return name[1].strip() if name else platform.processor() or platform.machine()


def chosen(pattern: str | None, shrink: int = 1, *, few: bool = False) -> list[tuple[Task, torch.dtype]]:
    """The rows whose name contains a pattern (``*`` for anything), in the order of the table; None: all.

    Args:
        few: of all, those in float32 alone, and none of those that are only measured for the plots.

    Raises:
        ValueError: no row has such a name.

    >>> [(task.label, dtype) for task, dtype in chosen("decode*float32")]
    [('decode, 32 heads on 8 of 128, N=32768', torch.float32)]
    """
    every = tasks(shrink)
    rows = [(t, dtype) for t in every for name, dtype in DTYPES.items() if name == "float32" or not t.sweep]
    if pattern is None:
        return [(t, dtype) for t, dtype in rows if not few or (dtype is torch.float32 and not t.sweep)]
    found = [
        (task, dtype)
        for task, dtype in rows
        if fnmatch(f"{task.label}, {name_of(dtype)}".lower(), f"*{pattern.lower()}*")
    ]
    if not found:
        names = "; ".join(dict.fromkeys(task.name for task in every))
        raise ValueError(f"rows: no row is named like {pattern!r}; there are: {names}")
    return found


def run(
    rows: Sequence[tuple[Task, torch.dtype]],
    *,
    repeats: int = 15,
    shrink: int = 1,
    quick: bool = False,
    output: Path | None = None,
    show: Callable[[str], None] = print,
    watch: Callable[[str], None] = lambda doing: None,
    keep: Callable[[dict[str, Any]], None] = lambda data: None,
) -> dict[str, Any]:
    """Measures the rows one after another; each is shown, and kept in `output`, as soon as it is done.

    A row in which regard itself fails is told, and the next one begins.

    Args:
        quick: neither memory nor what has to be compiled.
        watch: is told what is being done: which row, of how many, and about how long the others will take.
        keep: is given what there is to return: at the beginning, and after every row.
    Returns:
        What is written: the machine, the rows that are done, those that failed, and how many were to be.
    """
    data: dict[str, Any] = {"machine": machine(), "repeats": repeats, "shrink": shrink, "planned": len(rows)}
    data |= {"load": load(), "rows": [], "failed": []}
    keep(data)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    for number, (task, dtype) in enumerate(rows):
        label = f"{task.label}, {name_of(dtype)}"
        left = (time.perf_counter() - began) / number * (len(rows) - number) if number else None
        title = f"row {number + 1} of {len(rows)}{'' if left is None else f', {_in_words(left)} left'}: {label}"
        try:
            told = _titled(title, watch)
            row = measure(task, dtype, repeats=repeats, shrink=shrink, memory=not quick, compile=not quick, watch=told)
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
            data["failed"].append({"row": label, "why": why})
            show(f"{label}: failed: {why}")
        else:
            data["rows"].append(row)
            show(shown(row))
        keep(data)
        if output is not None:
            beside = output.with_name(output.name + ".part")
            beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            os.replace(beside, output)
    return data


def load() -> float | None:
    """How many programs wanted a processor in the last minute, on average; None where the system does not tell."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def busy(data: dict[str, Any]) -> str | None:
    """A sentence where other programs were busy during a run, or as it began.

    >>> busy({"load": 0.1, "rows": [{"others": 0.02}]})
    >>> busy({"load": 0.1, "rows": [{"others": 0.02}, {"others": 0.4}]})
    'others took up to 40% of the processors in 1 of 2 rows: measure again when the machine is idle'
    """
    taken = [row["others"] for row in data["rows"] if (row.get("others") or 0.0) > BUSY]
    if taken:
        share, rows = max(taken), f"{len(taken)} of {len(data['rows'])} rows"
        return f"others took up to {share:.0%} of the processors in {rows}: measure again when the machine is idle"
    unknown = all(row.get("others") is None for row in data["rows"])
    if unknown and (data["load"] or 0.0) > (os.cpu_count() or 1) / 2:
        return f"the machine was busy when the run began (load {data['load']}): measure again when it is idle"
    return None


def _in_words(seconds: float) -> str:
    """
    >>> _in_words(20), _in_words(100), _in_words(4000)
    ('under a minute', 'about 2 min', 'about 67 min')
    """
    return "under a minute" if seconds < 45 else f"about {max(1, round(seconds / 60))} min"


def _titled(title: str, watch: Callable[[str], None]) -> Callable[[str], None]:
    return lambda doing: watch(f"{title}; {doing}")


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def shown(row: dict[str, Any]) -> str:
    """A row as text: who took how long, how many times regard's time that is, and how much memory.

    >>> print(shown({"task": "causal", "length": 1024, "dtype": "float32", "kernel": "dense", "others": 0.3,
    ...              "peers": {"regard": {"ms": 14.0, "spread": [0.98, 1.03], "memory_mib": 3.0},
    ...                        "torch": {"ms": 28.0, "spread": [1.9, 2.1], "form": "is_causal"}},
    ...              "not_measured": {"formula": "too large"}, "memory_not_measured": {}}))
    causal, N=1024, float32: regard takes its kernel 'dense'
      regard                     14.000 ms     1.00  0.98-1.03          3.0 MiB
      torch                      28.000 ms     2.00  1.90-2.10                   is_causal
      formula                not measured: too large
      others took 30% of the processors meanwhile
    """
    lines = [f"{row['task']}, N={row['length']}, {row['dtype']}: regard takes its kernel {row['kernel']!r}"]
    ours = row["peers"]["regard"]["ms"]
    for name, entry in row["peers"].items():
        memory = f"{entry['memory_mib']:>12,.1f} MiB" if "memory_mib" in entry else " " * 16
        note = entry.get("form", f"compiled in {entry['compile_s']} s" if "compile_s" in entry else "")
        spread = "{:.2f}-{:.2f}".format(*entry["spread"]) if "spread" in entry else ""
        times = f"{entry['ms']:>11,.3f} ms{entry['ms'] / ours:>9,.2f}  {spread:<10}"
        lines.append(f"  {name:<22}{times}{memory}  {note}".rstrip())
    lines += [f"  {name:<23}not measured: {why}" for name, why in row["not_measured"].items()]
    lines += [f"  {name:<23}memory not measured: {why}" for name, why in row["memory_not_measured"].items()]
    if (row.get("others") or 0.0) > BUSY:
        lines.append(f"  others took {row['others']:.0%} of the processors meanwhile")
    return "\n".join(lines)
