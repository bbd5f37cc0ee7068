"""The rows: tensors of some sizes, a mask, and torch's fastest form of the same."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.masks import Causal, Chunk, Document, Mask, Padding, Prefix, Strided, Window
from regard.shapes import Grid

CPU = torch.device("cpu")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Task:
    """One row: tensors of these sizes, and a mask.

    Attributes:
        torch_form: torch's fastest form; None: `sdpa` with a dense bool mask. `form` is its name.
        rule: the mask for FlexAttention, a function of (batch, head, query, key); None: no mask.
        device: the device of its tensors.
        window: the window, if the mask is causal with a window and nothing else.
        layer: a whole layer, on [batch, length, heads * head_dim], instead of the function.
        sweep: measured only for the plots, in float32.
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
    device: torch.device = CPU
    window: int | None = None
    layer: bool = False
    sweep: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, N={self.length}"

    @property
    def queries(self) -> int:
        return self.length if self.query_len is None else self.query_len

    @property
    def num_scores(self) -> int:
        """Query_len x key_len."""
        return self.queries * self.length

    def allowed(self) -> Tensor:
        """The mask as a dense tensor: bool [batch or 1, 1, query_len, key_len]."""
        assert self.mask is not None
        bound = self.mask.to("cpu").bind(Grid(self.batch, self.heads, self.queries, self.length))
        allowed = bound.allowed(range(self.queries), range(self.length))
        return allowed.expand(-1, -1, self.queries, self.length).contiguous().to(self.device)

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Query, key and value, or the input of a layer; the same in every call."""
        draw = torch.Generator().manual_seed(0)
        if self.layer:
            shapes: Sequence[tuple[int, ...]] = [(self.batch, self.length, self.heads * self.head_dim)]
        else:
            sizes = ((self.heads, self.queries), (self.kv_heads, self.length), (self.kv_heads, self.length))
            shapes = [(self.batch, heads, length, self.head_dim) for heads, length in sizes]
        drawn = (torch.randn(shape, generator=draw).to(self.device, dtype) for shape in shapes)
        return tuple(tensor.requires_grad_(self.backward) for tensor in drawn)


def tasks(shrink: int = 1, device: torch.device = CPU) -> list[Task]:
    """All rows; `shrink` divides every length, including windows and documents."""

    def n(length: int) -> int:
        return max(2, length // shrink)

    w, chunk, head, document, prefix = n(256), n(512), n(1024), n(512), n(1024)
    window, window_rule = Causal() & Window(w), causal_and(lambda q, k: q - k < w)
    documents = ragged(n(8192), shrink)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents)).to(device)
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(n(64), n(1024) + 1, (8,), generator=draw).to(device)
    padded: dict[str, Any] = {"mask": Padding(lengths), "rule": lambda b, h, q, k: k < lengths[b], "batch": 8}

    def full(length: int, **more: Any) -> Task:
        return Task("full", n(length), None, sdpa, "as it is", **more)

    def causal(length: int, **more: Any) -> Task:
        return Task("causal", n(length), Causal(), torch_causal, "is_causal", causal_and(), **more)

    def windowed(length: int, **more: Any) -> Task:
        return Task("window 256", n(length), window, rule=window_rule, window=w, **more)

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
        Task("right padding, 8 rows", n(1024), torch_form=by_batch(lengths.tolist()), form="row by row", **padded),
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
        mask = None if task.mask is None else task.mask.to(device)
        found.setdefault(task.label, replace(task, mask=mask, device=device))
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
    """A mask function for FlexAttention: causal, and optionally another condition."""
    if also is None:
        return lambda b, h, q, k: k <= q
    return lambda b, h, q, k: (k <= q) & also(q, k)


# --- torch's best forms --------------------------------------------------------------------------------------------


def torch_causal(*tensors: Tensor, dropout_p: float = 0.0) -> Tensor:
    return sdpa(*tensors, is_causal=True, dropout_p=dropout_p)


def side_by_side(length: int) -> Callable[..., Tensor]:
    """Equal documents as elements of the batch, and back."""

    def run(*tensors: Tensor) -> Tensor:
        batch = tensors[0].shape[0]
        split = [t.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1) for t in tensors]
        output: Tensor = sdpa(*split, is_causal=True).unflatten(0, (batch, -1))
        return output.transpose(1, 2).flatten(2, 3)

    return run


def every(step: int) -> Callable[..., Tensor]:
    """Tokens with the same index modulo `step` as elements of the batch, and back."""

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


def by_batch(lengths: list[int]) -> Callable[..., Tensor]:
    """A call per batch index, without padding."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = ((query[i : i + 1], key[i : i + 1, :, :n], value[i : i + 1, :, :n]) for i, n in enumerate(lengths))
        return torch.cat([sdpa(*row) for row in rows])

    return run


def causal_beside(prefix: int) -> Callable[..., Tensor]:
    """Two calls: full attention within the prefix, causal attention for later queries."""

    def run(*tensors: Tensor) -> Tensor:
        inside = sdpa(*(t[:, :, :prefix] for t in tensors))
        return torch.cat([inside, sdpa(*tensors, is_causal=True)[:, :, prefix:]], dim=2)

    return run


def chosen(
    pattern: str | None, shrink: int = 1, *, few: bool = False, device: torch.device = CPU
) -> list[tuple[Task, torch.dtype]]:
    """The rows whose name contains a pattern (``*`` matches anything), in the order of the table; None: all.

    Args:
        few: without a pattern, only rows in float32, and none that are measured only for the plots.

    Raises:
        ValueError: no row has such a name.

    >>> [(task.label, dtype) for task, dtype in chosen("decode*float32")]
    [('decode, 32 heads on 8 of 128, N=32768', torch.float32)]
    """
    every = tasks(shrink, device)
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


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")
