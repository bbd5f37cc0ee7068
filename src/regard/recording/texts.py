"""The recorded calls of one layer on one text, in one piece or in several."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor

from regard.biases import Bias
from regard.hooks import Heads
from regard.masks import EVERYTHING, Mask, Tile
from regard.observation import Observation, Selection, observe
from regard.recording.views import PiecesBias, PiecesMask
from regard.rules import same
from regard.scores import Additive, Scoring
from regard.shapes import Grid
from regard.stepwise import Step, Steps, attention_steps, check_size

ALIGN_BYTES = 64
"""Bytes; alignment of torch's own allocations on a CPU."""


class Recorded(Observation):
    """One layer's attention on a text: an `Observation`, with values and tokens if they were kept.

    Attributes:
        value: [batch, kv_heads, key_len, value_dim], if recorded with ``values=True``; else None.
        tokens: int [batch, query_len], the tokens of the queries, if known; else None.
        cross: whether the keys come from another sequence (cross-attention).
        patches: rows and columns of an image, whose patches are the last keys; None if it is no image.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scoring: Scoring,
        lse: Tensor | None = None,
        *,
        value: Tensor | None = None,
        tokens: Tensor | None = None,
        heads: tuple[int, ...] | None = None,
        cross: bool = False,
        patches: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(query, key, scoring, lse)
        self.call = replace(self.call, head_numbers=heads)
        self.value, self.tokens, self.cross, self.patches = value, tokens, cross, patches

    def __getitem__(self, which: Selection | tuple[Selection, Selection]) -> Self:
        """Some batch indices and heads; heads by index in this recording, as in any `Observation`."""
        rows, _ = which if isinstance(which, tuple) else (which, slice(None))
        one = super().__getitem__(which)
        if one is not self:
            if self.value is not None:  # chosen as the keys are
                one.value = Observation(self.query, self.value, self.scoring)[which].key
            if self.tokens is not None:
                one.tokens = self.tokens[rows : rows + 1 or None] if isinstance(rows, int) else self.tokens[rows]
        return one

    @property
    def heads(self) -> tuple[int, ...]:
        """The numbers of these heads in the layer, which `head` takes."""
        numbers = self.call.head_numbers
        return tuple(range(self.grid.heads) if numbers is None else numbers)

    def __repr__(self) -> str:
        of = "cross-attention, " if self.cross else "image {} x {}, ".format(*self.patches) if self.patches else ""
        return super().__repr__().replace("<Recorded ", f"<Recorded {of}", 1)

    def _kept(self) -> dict[str, Tensor]:
        more = {"values": self.value, "tokens": self.tokens}
        return super()._kept() | {name: tensor for name, tensor in more.items() if tensor is not None}

    def head(self, head: int) -> Self:
        """One head alone, by its number in the layer."""
        if head not in self.heads:
            raise ValueError(f"recording: no head {head!r}; recorded are: {', '.join(map(str, self.heads))}")
        return self[:, self.heads.index(head)]

    @torch.no_grad()
    def steps(self, query: int | None = None) -> Steps:
        """From query and key to the heads' output, with formula, shape and numbers.

        query, key, value, then score, scale, cap, bias, mask (those that the layer has), softmax, weigh; value and
        weigh where values were recorded.

        Args:
            query: show only this one; for a text too long to show whole.
        Raises:
            ValueError: there is no such query, or there are too many scores to show at once.
        """
        grid = self.grid
        if query is not None and not 0 <= query < grid.query_len:
            raise ValueError(f"steps: query must be 0 to {grid.query_len - 1}, got {query}")
        rows = range(grid.query_len) if query is None else range(query, query + 1)
        check_size(grid, rows)
        shown = [
            Step("query", "as it came to attention", ("batch", "heads", "query_len", "head_dim"),
                 self.query[:, :, rows.start : rows.stop]),
            Step("key", "as it came to attention", ("batch", "kv_heads", "key_len", "head_dim"), self.key),
        ]  # fmt: skip
        if self.value is not None:
            axes = ("batch", "kv_heads", "key_len", "value_dim")
            shown.append(Step("value", "as it came to attention", axes, self.value))
        shown += attention_steps(self.query, self.key, self.value, self.scoring, rows)
        if self.value is None:
            last = shown.pop()
            more = "the values were not recorded: record(model, values=True) shows the output as well"
            shown.append(last._replace(note=f"{last.note}; {more}" if last.note else more))
        return Steps(shown)


class Piece(NamedTuple):
    """One call: its number of queries, its range of the text's keys, mask and bias, and the queries' tokens."""

    query_len: int
    first: int
    key_len: int
    mask: Mask | None
    bias: Bias | None
    tokens: Tensor | None


@dataclass
class Text:
    """The calls of one layer on one text.

    Attributes:
        queries: one tensor per piece.
        key, value: those of the last piece.
        past: earlier keys and values, which a cache has dropped since.
        cross, patches: as in `Recorded`.
    """

    queries: list[Tensor]
    key: Tensor
    value: Tensor | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    additive: Tensor | None
    pieces: list[Piece]
    heads: tuple[int, ...] | None
    past: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    lse: Tensor | None = None
    cross: bool = False
    patches: tuple[int, int] | None = None
    _tensors: Heads | None = field(default=None, repr=False)
    _whole: Recorded | None = field(default=None, repr=False)
    _calls: list[Recorded] | None = field(default=None, repr=False)

    def take(self, other: "Text", settled: bool, goes_on: bool | None = None) -> bool:
        """Appends a call that continues this text: its keys are those of the previous call followed by those of its own
        queries; in cross-attention, the same keys. Returns False for any other call.

        Args:
            goes_on: in cross-attention, whether the preceding self-attention continued its text; None if there was
                none, and then only keys in the same memory are taken for the same text.
        """
        (piece,) = other.pieces
        if not self._fits(other):
            return False
        if self.cross:
            alike = [_same_memory(*pair) if goes_on is None else torch.equal(*pair) for pair in self._pairs(other)]
            if goes_on is False or self.key.shape != other.key.shape or not all(alike):
                return False
            self._append(other, piece)
            return True
        reused = other.key.shape[2] - piece.query_len
        gone = self.key.shape[2] - reused
        if reused > 0 and gone >= 0 and all(_continues(*pair, gone, settled) for pair in self._pairs(other)):
            if gone:
                value = None if self.value is None else self.value[:, :, :gone].clone()
                self.past.append((self.key[:, :, :gone].clone(), value))
            last = self.pieces[-1]
            piece = piece._replace(first=last.first + gone)
        elif not self._refills(other, piece):
            return False
        self._append(other, piece)
        return True

    def _append(self, other: "Text", piece: Piece) -> None:
        self.queries += other.queries
        self.pieces.append(piece)
        self.key, self.value = other.key, other.value
        self.lse = self._tensors = self._whole = self._calls = None

    def _fits(self, other: "Text") -> bool:
        """Whether the other has compatible shapes and score arguments."""
        alike = [
            (
                t.cross,
                t.scale,
                t.softcap,
                t.queries[0].shape[:2],
                t.key.shape[:2],
                t.key.shape[3],
                t.key.dtype,
                t.key.device,
            )
            for t in (self, other)
        ]
        return alike[0] == alike[1] and same(self.sink, other.sink) and same(self.additive, other.additive)

    def _refills(self, other: "Text", piece: Piece) -> bool:
        """Whether the other has the same static cache, allocated at full length: its new keys are at places that were
        hidden before."""
        if self.key.shape[2] != piece.key_len or piece.query_len >= piece.key_len:
            return False
        fresh = _changed(self.key, other.key)
        if not fresh or len(fresh) > piece.query_len:
            return False
        if any(set(_changed(*pair)) - set(fresh) for pair in self._pairs(other)):
            return False
        return all(self._mask(p).tile(range(p.query_len), fresh) is Tile.EMPTY for p in self.pieces)

    def _pairs(self, other: "Text") -> list[tuple[Tensor, Tensor]]:
        """Pairs of these keys and the other's, and of the values, if kept."""
        pairs = [(self.key, other.key)]
        if self.value is not None and other.value is not None:
            pairs.append((self.value, other.value))
        return pairs

    def tensors(self) -> Heads:
        """All queries, keys and values (the keys, if there are no values), each contiguous, so that tensors loaded from
        a file have the same layout and give bit-identical results."""
        if self._tensors is None:
            query = torch.cat(self.queries, dim=2) if len(self.queries) > 1 else aligned(self.queries[0])
            self.queries = list(query.split([piece.query_len for piece in self.pieces], dim=2))
            first = self.pieces[-1].first
            key = torch.cat([*(key for key, _ in self.past), self.key], dim=2) if first else aligned(self.key)
            value = self.value
            if value is not None:
                old = [value for _, value in self.past if value is not None]
                value = torch.cat([*old, value], dim=2) if first else aligned(value)
                self.value = value[:, :, first:]
            self.key = key[:, :, first:]
            self.past = [(key[:, :, :first], None if value is None else value[:, :, :first])] if first else []
            self._tensors = Heads(query, key, key if value is None else value)
        return self._tensors

    def held(self) -> list[Tensor | None]:
        """Every tensor it keeps, apart from masks and biases."""
        past = [tensor for pair in self.past for tensor in pair]
        tokens = [piece.tokens for piece in self.pieces]
        return [*self.queries, self.key, self.value, self.sink, self.additive, self.lse, *past, *tokens]

    def whole(self) -> Recorded:
        """All queries with all keys."""
        if self._whole is None:
            query, key, _ = self.tensors()
            read = [piece.tokens for piece in self.pieces if piece.tokens is not None]
            tokens = torch.cat(read, dim=1) if len(read) == len(self.pieces) else None
            seen = slice(self._visible(key.shape[2]))
            self._whole = self._recorded(query, seen, *self._rules(seen.stop), tokens, self.lse)
        return self._whole

    def calls(self) -> list[Recorded]:
        """Each piece as a separate call."""
        whole = self.whole()
        if len(self.pieces) == 1:
            return [whole]
        if self._calls is None:
            self._calls = [
                self._recorded(query, slice(p.first, p.first + p.key_len), p.mask, p.bias, p.tokens, None)
                for query, p in zip(self.queries, self.pieces, strict=True)
            ]
        return self._calls

    def _recorded(
        self, query: Tensor, keys: slice, mask: Mask | None, bias: Bias | None, tokens: Tensor | None,
        lse: Tensor | None,
    ) -> Recorded:  # fmt: skip
        _, key, value = self.tensors()
        key = key[:, :, keys]
        additive = None if self.additive is None else Additive(self.additive)
        rules = {"scale": self.scale, "softcap": self.softcap, "sink": self.sink, "additive": additive}
        scoring = observe(query, key, mask=mask, bias=bias, lse=lse, **rules).scoring  # type: ignore[arg-type]
        kept = None if self.value is None else value[:, :, keys]
        return Recorded(
            *(query, key, scoring, lse),
            value=kept, tokens=tokens, heads=self.heads, cross=self.cross, patches=self.patches,
        )  # fmt: skip

    def _rules(self, key_len: int) -> tuple[Mask | None, Bias | None]:
        """Mask and bias of the whole text: those of a single piece; a shared one, if all pieces have the same rule of
        positions and it hides later keys from each; or those of all pieces, concatenated along the queries."""
        first, *more = self.pieces
        if not more:
            return first.mask, first.bias
        if self.cross and all(p.mask is None and p.bias is None for p in self.pieces):
            return None, None
        of_positions = all(p.first == 0 for p in more) and all(
            rule is None or rule.of_positions for rule in (first.mask, first.bias)
        )
        if of_positions and all(same(first.mask, p.mask) and same(first.bias, p.bias) for p in more):
            grid = self.grid(first)._replace(query_len=sum(p.query_len for p in self.pieces), key_len=key_len)
            bound = EVERYTHING if first.mask is None else first.mask.bind(grid)
            starts = accumulate((piece.query_len for piece in self.pieces), initial=0)
            in_place = all(
                start + key_len - grid.query_len == piece.key_len - piece.query_len
                and bound.tile(range(start, start + piece.query_len), range(piece.key_len, key_len)) is Tile.EMPTY
                for start, piece in zip(starts, self.pieces, strict=False)
            )
            if in_place:
                return first.mask, first.bias
        lengths = [(p.query_len, p.first, p.key_len) for p in self.pieces]
        biases = [p.bias for p in self.pieces]
        return (
            PiecesMask([p.mask for p in self.pieces], lengths),
            None if all(bias is None for bias in biases) else PiecesBias(biases, lengths),
        )

    def _visible(self, key_len: int) -> int:
        """Number of keys; for a static cache, up to the last key that any query sees."""
        if len(self.pieces) == 1 or self.pieces[0].key_len != key_len:
            return key_len
        masks = [self._mask(piece) for piece in self.pieces]

        def unseen(start: int) -> bool:
            rows = (range(piece.query_len) for piece in self.pieces)
            return all(mask.tile(r, range(start, key_len)) is Tile.EMPTY for mask, r in zip(masks, rows, strict=True))

        return bisect_left(range(key_len), True, key=unseen)

    def _mask(self, piece: Piece) -> Mask:
        return EVERYTHING if piece.mask is None else piece.mask.bind(self.grid(piece))

    def grid(self, piece: Piece) -> Grid:
        """The lengths of one call."""
        batch, heads = self.queries[0].shape[:2]
        return Grid(batch, heads, piece.query_len, piece.key_len, self.key.device)


def aligned(tensor: Tensor) -> Tensor:
    """A contiguous tensor with torch's alignment in memory: the rounding of products depends on both."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGN_BYTES else tensor


def _same_memory(old: Tensor, new: Tensor) -> bool:
    return new.data_ptr() == old.data_ptr() and new.stride() == old.stride() and new.shape == old.shape


def _continues(old: Tensor, new: Tensor, gone: int, settled: bool) -> bool:
    """Whether `new` starts with the columns of `old` from `gone` on."""
    if settled and not gone and new.data_ptr() == old.data_ptr() and new.stride() == old.stride():
        return True  # the same memory, never written to
    return torch.equal(new[:, :, : old.shape[2] - gone], old[:, :, gone:])


def _changed(old: Tensor, new: Tensor) -> range:
    """From the first to the last column in which two tensors [batch, kv_heads, key_len, size] differ."""
    columns = (old != new).any(dim=3).any(dim=0).any(dim=0).nonzero()[:, 0]
    return range(int(columns[0]), int(columns[-1]) + 1) if len(columns) else range(0)
