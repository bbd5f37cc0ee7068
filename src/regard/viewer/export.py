"""The page as one file that works from a disk, offline: the front end, and the heads it draws.

A browser computes every weight itself, from query and key, a log-sum-exp for every query, and the ranges of keys that
each query may attend to; so any mask, softcap, sink and bias of distances is exact, but for the rounding of query and
key that the file states. A head that this cannot say (additive similarity, a bias of each pair by itself, a mask that
hides very many keys at random) has finished cells instead.

A tensor is rounded to whole numbers of 16 bits or fewer, each row with a scale of its own, and deflated with the high
bytes apart from the low ones. How many bits depends on how much there is.
"""

import base64
import copy
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.biases import Bias
from regard.observation import Observation
from regard.observation.streaming import Progress, silent
from regard.recording.texts import Recorded
from regard.rules import same
from regard.scores import Scoring
from regard.storage import replacing
from regard.viewer.bundle import files, joined, sources
from regard.viewer.codes import raw
from regard.viewer.head import Head
from regard.viewer.looking import Looking, heads_as_data, plain
from regard.viewer.params import Params
from regard.viewer.run import Run
from regard.viewer.steps import described, example

FORMAT = "regard.page.1"

FINE_NUMBERS, COARSE_NUMBERS = 1 << 20, 1 << 26
"""Numbers of query and key in a file: up to the first they have 16 bits and the values come along, up to the second 12
bits and no values. More are refused: a file of some 100 MiB."""

COARSE_BITS = 12

MAX_SPANS = 1 << 21
"""Ranges of visible keys in all: 16 for each query at 131,072 tokens, or a causal mask at random at 2,900; a mask with
more has finished cells, which take no less room."""

MIN_TOKENS_WITH_CELLS, CELL_STEP, MAX_CELLS = 1024, 8, 1 << 21
"""From more tokens on the coarse cells of a head are in the file too: of 8 x 8 weights, larger where they are many."""

QUERIES_AT_ONCE = 512
"""Queries whose visible keys are looked at together."""

MARK = '<meta name="generator" content="regard">'
"""What every page has in its head: a file with it may be replaced by a newer one."""


class _Blobs:
    """Bytes that are deflated and written once each."""

    def __init__(self) -> None:
        self.packed: list[str] = []
        self._known: dict[bytes, int] = {}

    def add(self, data: bytes) -> int:
        """The number of some bytes."""
        key = hashlib.sha256(data).digest()
        if key not in self._known:
            self._known[key] = len(self.packed)
            self.packed.append(base64.b64encode(zlib.compress(data, 9)).decode())
        return self._known[key]


class Rounded(NamedTuple):
    """Rows of whole numbers [rows, columns], each with a scale [rows]."""

    numbers: Tensor
    scale: Tensor

    @property
    def values(self) -> Tensor:
        """What they stand for."""
        return self.numbers * self.scale[:, None]


def rounded(tensor: Tensor, bits: int) -> Rounded:
    """A matrix in whole numbers of so many bits, of which the last 16 - bits are 0.

    >>> rounded(torch.tensor([[8192.0, -32752.0]]), 12).numbers.tolist()
    [[8192.0, -32752.0]]
    """
    matrix = tensor.float().nan_to_num(0.0, 0.0, 0.0)  # such numbers stand where nobody sees them
    step = 1 << (16 - bits)
    most = 32767 // step * step
    scale = _shortened(matrix.abs().amax(-1) / most, up=True)
    whole = (matrix / scale.where(scale > 0, 1.0)[:, None] / step).round() * step
    return Rounded(whole, scale)


def _shortened(numbers: Tensor, up: bool = False) -> Tensor:
    """float32 with 12 significant bits, to the nearest or away from 0: the rest would be a third of a file."""
    bits = numbers.float().contiguous().view(torch.int32)
    return ((bits + (0xFFF if up else 0x800)) & ~0xFFF).view(torch.float32)


class _File:
    """The data of one file, head by head."""

    def __init__(self, bits: int, values: bool) -> None:
        self.bits, self.values = bits, values
        self.blobs = _Blobs()
        self.spans: list[dict[str, int]] = []
        self._masks: list[tuple[Scoring, int | None]] = []

    def tensor(self, part: Rounded) -> dict[str, int]:
        """A rounded matrix."""
        numbers = part.numbers.to(torch.int32) & 0xFFFF
        high, low = ((numbers >> shift & 0xFF).to(torch.uint8) for shift in (8, 0))
        blobs = {"high": raw(high), "low": raw(low), "scale": raw(part.scale)}
        shape = {"rows": part.numbers.shape[0], "columns": part.numbers.shape[1]}
        return {**{name: self.blobs.add(data) for name, data in blobs.items()}, **shape}

    def floats(self, tensor: Tensor) -> int:
        """Numbers in float32."""
        return self.blobs.add(raw(tensor.float()))

    def spans_of(self, scoring: Scoring) -> int | None:
        """The ranges of keys that each query sees; None where they are too many."""
        for known, number in self._masks:
            alike = known.grid == scoring.grid and same(known.mask, scoring.mask)
            if alike and known.bias is None and scoring.bias is None:
                return number
        found = visible_spans(scoring)
        number = None
        if found is not None:
            names = ("start", "first", "stop")
            blobs = {name: self.blobs.add(raw(part)) for name, part in zip(names, found, strict=True)}
            number = self.spans.index(blobs) if blobs in self.spans else len(self.spans)
            self.spans[number:] = self.spans[number:] or [blobs]
        self._masks.append((scoring, number))
        return number

    def head(self, run: Run, layer: int, number: int, batch: int) -> dict[str, Any]:
        """One head of one batch index."""
        seen = run.observation(layer, number, batch)
        head = run.fresh_head(layer, number, batch)
        head.make_pyramid()
        assert head.series is not None
        data: dict[str, Any] = {"layer": layer, "head": number, "q": None, "k": None, "v": None}
        distances = of_distances(seen.scoring)
        spans = self.spans_of(seen.scoring) if seen.scoring.additive is None and distances is not False else None
        data["spans"] = spans
        if spans is None:
            data |= {"visible": self.floats(head.series.visible), "viewers": self.floats(head.series.viewers)}
        else:
            assert not isinstance(distances, bool)
            query, key = (rounded(part[0, 0], self.bits) for part in (seen.query, seen.key))
            data |= {"q": self.tensor(query), "k": self.tensor(key)}
            if self.values and seen.value is not None:
                data["v"] = self.tensor(rounded(seen.value[0, 0], self.bits))
            again = Observation(query.values[None, None], key.values[None, None], seen.scoring)
            data["lse"] = self.floats(again.lse.nan_to_num(0.0, 0.0, 0.0))
            data |= {"scale": seen.scoring.scale, "softcap": seen.scoring.softcap, "bias": None}
            if distances is not None:
                data["bias"] = {"toeplitz": self.floats(distances)}
        data |= {name: self.floats(_shortened(getattr(head.series, name))) for name in ("entropy", "received")}
        thumb = head.thumb(64, "max").codes
        data["thumb"] = {"rows": thumb.shape[0], "columns": thumb.shape[1], "codes": self.blobs.add(_short(thumb))}
        if spans is None or max(head.query_len, head.key_len) > MIN_TOKENS_WITH_CELLS:
            data["codes"] = self._cells(head, spans is None)
        return data

    def _cells(self, head: Head, alone: bool) -> dict[str, int]:
        """Finished cells: as fine as `MAX_CELLS` allows where nothing else is there."""
        step = 1 if alone else CELL_STEP
        while -(-head.query_len // step) * -(-head.key_len // step) > MAX_CELLS:
            step *= 2
        cells = head.cells(step, range(head.query_len), range(head.key_len))
        largest, mass = (cells.codes(pool)[0, 0] for pool in ("max", "mean"))
        rows, columns = largest.shape
        level = step.bit_length() - 1
        return {
            "level": level, "rows": rows, "columns": columns,
            "max": self.blobs.add(_short(largest)), "mass": self.blobs.add(_short(mass)),
        }  # fmt: skip


def _short(codes: Tensor) -> bytes:
    """Codes in 8 bits: 0 stays what is hidden, and that alone."""
    wide = codes.to(torch.int32)
    return raw((wide >> 8).clamp(min=1).masked_fill(wide == 0, 0).to(torch.uint8))


def visible_spans(scoring: Scoring) -> tuple[Tensor, Tensor, Tensor] | None:
    """Which keys each query of one head sees, as ranges: query i has those from start[i] to start[i + 1], each of the
    keys from first to stop; int32. None where there are more than `MAX_SPANS`."""
    query_len, key_len = scoring.grid.query_len, scoring.grid.key_len
    counts, firsts, stops, total = [], [], [], 0
    for start in range(0, query_len, QUERIES_AT_ONCE):
        rows = range(start, min(start + QUERIES_AT_ONCE, query_len))
        allowed = scoring.allowed(rows, range(key_len))
        if allowed is None:
            allowed = torch.ones(1, 1, 1, key_len, dtype=torch.bool)
        padded = F.pad(allowed.expand(1, 1, len(rows), key_len)[0, 0].to(torch.int8), (1, 1))
        steps = padded[:, 1:] - padded[:, :-1]
        counts.append((steps > 0).sum(-1))
        firsts.append((steps > 0).nonzero()[:, 1])
        stops.append((steps < 0).nonzero()[:, 1])
        total += len(firsts[-1])
        if total > MAX_SPANS:
            return None
    start_of = F.pad(torch.cat(counts).cumsum(0), (1, 0))
    return start_of.to(torch.int32), torch.cat(firsts).to(torch.int32), torch.cat(stops).to(torch.int32)


def of_distances(scoring: Scoring) -> Tensor | bool | None:
    """The bias of one head as numbers for key - query from 1 - query_len to key_len - 1; None for no bias, False for
    one that is no function of that distance."""
    if scoring.bias is None:
        return None
    query_len, key_len = scoring.grid.query_len, scoring.grid.key_len
    behind = scoring.bias.values(range(query_len), range(1))[0, 0, :, 0].expand(query_len)
    ahead = scoring.bias.values(range(1), range(key_len))[0, 0, 0].expand(key_len)
    found = torch.cat([behind.flip(0), ahead[1:]]).float()
    if not (all(term.of_distance for term in scoring.bias.terms()) or _is_everywhere(scoring.bias, found, query_len)):
        return False
    return found.nan_to_num(0.0, 0.0, 0.0)


def _is_everywhere(bias: Bias, distances: Tensor, query_len: int) -> bool:
    """Whether a bias of one head, such as a table that a model computed, has these numbers for every pair."""
    windows = distances.unfold(0, len(distances) - query_len + 1, 1).flip(0)  # row i: of query i, with every key
    parts = (range(start, min(start + QUERIES_AT_ONCE, query_len)) for start in range(0, query_len, QUERIES_AT_ONCE))
    keys = range(windows.shape[1])
    return all(
        torch.equal(bias.values(rows, keys)[0, 0].float().expand(len(rows), -1), windows[rows.start : rows.stop])
        for rows in parts
    )


@torch.inference_mode()
def export(
    run: Run, heads: Sequence[tuple[int, int]] | None = None, progress: Progress = silent, *, batch: int = 0
) -> str:
    """The page of one batch index of a run as HTML, whole in itself.

    Args:
        heads: pairs of layer and head; None for all of them.
        progress: called with the heads done and all of them; may raise to stop.
    Raises:
        ValueError: there is too much for one file; the message says how much.
    """
    if heads is None:
        heads = [(layer, head) for layer, seen in enumerate(run.layers.values()) for head in seen.heads]
    chosen = sorted(dict.fromkeys(heads))
    parts: list[tuple[int, int, Recorded]] = [(*place, run.observation(*place, batch)) for place in chosen]
    shared = {(layer, seen.key.data_ptr()): seen.key.numel() for layer, _, seen in parts}
    count = sum(seen.query.numel() for _, _, seen in parts) + sum(shared.values())
    if count > COARSE_NUMBERS:
        raise ValueError(
            f"export: query and key have {count:,} numbers, and one file takes at most {COARSE_NUMBERS:,}; choose "
            "fewer heads"
        )
    fine = count <= FINE_NUMBERS
    file = _File(16 if fine else COARSE_BITS, values=fine)
    if run.summary is None:
        run.summarise()
    found = []
    for done, (layer, head, _) in enumerate(parts):
        progress(done, len(parts))
        found.append(file.head(run, layer, head, batch))
    progress(len(parts), len(parts))
    return _html(
        {
            "format": FORMAT,
            "answers": _answers(run, chosen, batch, file.bits, file.values),
            "heads": found,
            "picture": None if run.picture is None else file.blobs.add(raw(run.picture)),
            "spans": file.spans,
            "blobs": file.blobs.packed,
        }
    )


def _answers(run: Run, chosen: Sequence[tuple[int, int]], batch: int, bits: int, values: bool) -> dict[str, Any]:
    """What a session would answer, as far as it is in the file."""
    looking = Looking()
    looking.runs[run.number] = run
    info, _ = looking.info(Params("info", {}))
    for layer, told in enumerate(info["layers"]):
        told["heads"] = [head for at, head in chosen if at == layer]
    info |= {
        "can": dict.fromkeys(("read", "generate", "intervene", "export"), False),
        "models": [],
        "context": None,
        "batch": 1,
    }
    info["rounded"] = f"In this file query and key are rounded to {bits} bits."
    if [info["chosen"]["layer"], info["chosen"]["head"]] not in map(list, chosen):
        info["chosen"] = {"layer": chosen[0][0], "head": chosen[0][1], "query": info["chosen"]["query"]}
    assert run.summary is not None
    kept = [s for s in run.summary if (run.names.index(s.layer), s.head) in chosen]
    tokens: list[dict[str, Any]] = []
    for of in ("query", "key"):
        for layer in range(len(run.layers)):
            read = run.tokens_of(layer, of, batch)
            data = {"labels": [*read.labels], "texts": [*read.texts], "ids": None if read.ids is None else [*read.ids]}
            known = next((one for one in tokens if one["of"] == of and one["labels"] == data["labels"]), None)
            if known is None:
                tokens.append({"of": of, "layers": [layer], **data})
            else:
                known["layers"].append(layer)
    steps = []
    for layer in range(len(run.layers)):
        seen = copy.copy(run.observation(layer, run.layer(layer).heads[0], batch))
        seen.value = seen.value if values else None
        steps.append(described(seen.steps(seen.grid.query_len - 1)))
    return {
        "info": info,
        "heads": {**heads_as_data(run, kept), "complete": True, "job": None},
        "tokens": tokens,
        "steps": steps,
        "example": example(Params("example", {})),
    }


def _html(data: dict[str, Any]) -> str:
    """The page with its style, its modules and its data inside."""
    style = files()["page.css"].decode().replace("</", "<\\/")
    code = joined(sources(), "saved.js").replace("</script", "<\\/script").replace("<!--", "<\\!--")
    told = json.dumps(plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    policy = f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; img-src data: blob:"
    page = files()["page.html"].decode()
    replaced = {
        MARK: f'{MARK}\n<meta http-equiv="content-security-policy" content="{policy}">',
        '<link rel="stylesheet" href="static/page.css">': f"<style>{style}</style>",
        '<script type="module" src="static/main.js"></script>': (
            f'<script type="application/json" id="regard-data">{told}</script>\n<script type="module">{code}</script>'
        ),
    }
    for line in replaced:
        if page.count(line) != 1:
            raise ValueError(f"page.html: expected the line {line} once")
    return re.sub("|".join(map(re.escape, replaced)), lambda found: replaced[found[0]], page)


def _hash(text: str) -> str:
    """What a policy calls a script or a style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def save_page(path: Path, html: str) -> None:
    """Writes a page, beside its place and moved there when it is whole.

    Raises:
        ValueError: there is a file of that name which is no page of regard.
        OSError: there is no room, or no permission.
    """
    if path.exists():
        with path.open("rb") as file:
            if MARK.encode() not in file.read(4096):
                raise ValueError(f"{path}: there is a file of that name which is no page of regard; choose another")
    with replacing(path) as new:
        new.write_text(html, encoding="utf-8")
