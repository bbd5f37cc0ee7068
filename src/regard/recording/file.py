"""A recording on disk: tensors in the safetensors format, masks, biases and other score arguments in the header."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.biases import Bias, Given
from regard.masks import Dense, Mask
from regard.observation.selecting import HeadsBias, HeadsMask
from regard.recording.texts import ALIGN_BYTES, Piece, Text, aligned
from regard.rules import is_data, kind_called
from regard.scores import Scoring
from regard.shapes import INTEGER_DTYPES, Grid, ShapeError
from regard.storage import save

FORMAT = "regard.recording.1"

MAX_WRITTEN_SCORES = 1 << 26
"""Most cells of a mask or bias that is a function which `Recording.save` writes out: 64 MiB of bools."""


class Store:
    """Collects the tensors to be written, each of them once, and converts masks and biases to plain data.

    In the file, each tensor starts at a multiple of `ALIGN_BYTES`, so that it can be used memory-mapped: tensors of
    other sizes are padded with zeros, and their shapes are stored separately.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.shapes: dict[str, list[int]] = {}
        self._names: dict[Any, tuple[Tensor, str]] = {}  # keeps the tensor alive, so that its address is not reused

    def tensor(self, tensor: Tensor | None) -> str | None:
        """The name under which a tensor is stored."""
        if tensor is None:
            return None
        place = (tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._names:
            name = str(len(self.tensors))
            alone = tensor.detach().cpu().contiguous()
            surplus = -alone.nbytes % ALIGN_BYTES
            if surplus:
                self.shapes[name] = list(alone.shape)
                alone = torch.cat([alone.flatten(), alone.new_zeros(surplus // alone.element_size())])
            self.tensors[name] = alone
            self._names[place] = tensor, name
        return self._names[place][1]

    def part(self, part: Any, grid: Grid, layer: str) -> Any:
        """A mask, a bias, or one of their arguments, as plain data."""
        if isinstance(part, Tensor):
            return {"tensor": self.tensor(part)}
        if isinstance(part, (list, tuple)):
            return [self.part(each, grid, layer) for each in part]
        if not isinstance(part, (Mask, Bias)):
            return part
        if not is_data(part):
            part = _written_out(part, grid, layer)
        if isinstance(part, (HeadsMask, HeadsBias)):
            grid = grid._replace(heads=part.of)
        arguments = {name: self.part(value, grid, layer) for name, value in part.arguments().items()}
        return {"kind": part.kind, **arguments}


def _written_out(part: Mask | Bias, grid: Grid, layer: str) -> Dense | Given:
    """A mask or bias that is a function, evaluated in every cell."""
    bound: Any = part.bind(grid)
    ask = bound.allowed if isinstance(part, Mask) else bound.values
    rows: list[Tensor] = []
    step = max(1, (1 << 22) // max(1, grid.key_len))
    for start in range(0, grid.query_len, step):
        cells = ask(
            torch.arange(start, min(start + step, grid.query_len), device=grid.device),
            torch.arange(grid.key_len, device=grid.device),
        )
        count = cells.shape[0] * cells.shape[1] * grid.query_len * grid.key_len
        if count > MAX_WRITTEN_SCORES:
            raise ValueError(
                f"recording.save: {layer}: {part!r} is a function, which no file can hold, and has {count:,} cells, "
                f"too many to write them out (up to {MAX_WRITTEN_SCORES:,}); make it of regard's own masks (Causal(), "
                "Window(w), Document(ids), ... with & | ~) and biases, or record a shorter text"
            )
        rows.append(cells.expand(*cells.shape[:2], -1, grid.key_len))
    whole = torch.cat(rows, dim=2)
    return Dense(whole) if isinstance(part, Mask) else Given(whole)


def _data_of(text: Text, layer: str, store: Store) -> dict[str, Any]:
    """A text as plain data for `_text_from`, with its tensors in the store."""
    seen, (_, key, value) = text.whole(), text.tensors()
    pieces = []
    for piece in text.pieces:
        grid = text.grid(piece)
        pieces.append(
            {
                "query_len": piece.query_len,
                "first": piece.first,
                "key_len": piece.key_len,
                "mask": store.part(piece.mask, grid, layer),
                "bias": store.part(piece.bias, grid, layer),
                "tokens": store.tensor(piece.tokens),
            }
        )
    return {
        "query": store.tensor(seen.query),
        "key": store.tensor(key),
        "value": None if text.value is None else store.tensor(value),
        "lse": store.tensor(seen.lse),
        "scale": text.scale,
        "softcap": text.softcap,
        "sink": store.tensor(text.sink),
        "additive": store.tensor(text.additive),
        "heads": text.heads,
        "cross": text.cross,
        "patches": text.patches,
        "pieces": pieces,
    }


def write(path: str | os.PathLike[str], model: str, texts: Mapping[str, list[Text]]) -> None:
    """Writes a model's name and the texts of each layer, atomically."""
    store = Store()
    layers = {name: [_data_of(text, name, store) for text in of_layer] for name, of_layer in texts.items()}
    header = {"model": model, "layers": layers, "shapes": store.shapes}
    save(Path(path), store.tensors, {"format": FORMAT, "recording": json.dumps(header)}, begin=ALIGN_BYTES)


def read(path: str | os.PathLike[str]) -> tuple[str, dict[str, list[Text]]]:
    """What `write` wrote. The tensors stay in the file, mapped into memory.

    Raises:
        ValueError: there is no such file, or it is damaged, or no recording, or of another version.
    """
    try:
        with safe_open(Path(path), "pt") as file:
            metadata = dict(file.metadata() or {})
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: not a recording, or only a part of one ({error}); record and save it again"
        ) from error
    written = metadata.get("format", "")
    if written != FORMAT:
        of_regard = written.startswith(FORMAT.rpartition(".")[0] + ".")
        raise ValueError(
            f"{path}: a recording of another version of regard ({written!r}, this one reads {FORMAT!r}); read it with "
            "that version, or record again"
            if of_regard
            else f"{path}: a safetensors file, but no recording of regard (format {written!r}, expected {FORMAT!r}); "
            "recording.save(path) writes one"
        )
    try:
        header = json.loads(metadata["recording"])
        shapes: dict[str, list[int]] = header["shapes"]
        tensors = {name: aligned(_shaped(tensor, shapes.get(name))) for name, tensor in stored.items()}
        texts = {name: [_text_from(text, tensors) for text in of_layer] for name, of_layer in header["layers"].items()}
        if not texts or not all(texts.values()):
            raise ValueError("a layer has no calls" if texts else "it has no layers")
        for text in (text for of_layer in texts.values() for text in of_layer):
            for seen in (text.whole(), *text.calls()):  # fail now, not at first use
                _probe(seen.scoring)
        return str(header["model"]), texts
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{path}: a damaged recording ({type(error).__name__}: {error})") from error


def _shaped(tensor: Tensor, shape: list[int] | None) -> Tensor:
    """A stored tensor without its padding."""
    return tensor if shape is None else tensor[: math.prod(shape)].view(shape)


def _text_from(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Text:
    def tensor(name: str | None) -> Tensor | None:
        return None if name is None else tensors[name]

    def part(data: Any) -> Any:
        if isinstance(data, list):
            return [part(each) for each in data]
        if not isinstance(data, dict):
            return data
        if "tensor" in data:
            return tensors[data["tensor"]]
        return kind_called(data["kind"])(**{name: part(value) for name, value in data.items() if name != "kind"})

    pieces = [
        Piece(p["query_len"], p["first"], p["key_len"], part(p["mask"]), part(p["bias"]), tensor(p["tokens"]))
        for p in data["pieces"]
    ]
    query, key, value = tensors[data["query"]], tensors[data["key"]], tensor(data["value"])
    lse, sink, additive = (tensor(data[name]) for name in ("lse", "sink", "additive"))
    if lse is None:
        raise ValueError("lse is missing")
    for name, floating in (("query", query), ("key", key), ("value", value), ("lse", lse), ("sink", sink),
                           ("additive", additive)):  # fmt: skip
        if floating is not None and not floating.is_floating_point():
            raise TypeError(f"{name} must be floating, got {floating.dtype}")
    if query.dtype != key.dtype or (value is not None and value.dtype != key.dtype):
        raise TypeError("query, key and value must have one dtype")
    if lse.dtype != torch.promote_types(query.dtype, torch.float32):
        raise TypeError(f"lse must be {torch.promote_types(query.dtype, torch.float32)}, got {lse.dtype}")
    if value is not None and (value.dim() != 4 or value.shape[:3] != key.shape[:3]):
        raise ShapeError(f"value {list(value.shape)} does not fit key {list(key.shape)}")
    _check_lengths(pieces)
    if max(piece.first + piece.key_len for piece in pieces) != key.shape[2]:
        raise ShapeError(f"the calls do not have the {key.shape[2]} keys that there are")
    for piece in pieces:
        if piece.tokens is None:
            continue
        if piece.tokens.shape != (query.shape[0], piece.query_len):
            raise ShapeError(f"tokens {list(piece.tokens.shape)} do not fit {piece.query_len} queries")
        if piece.tokens.dtype not in INTEGER_DTYPES:
            raise TypeError(f"tokens must be whole numbers, got {piece.tokens.dtype}")
    heads = None if data["heads"] is None else tuple(data["heads"])
    if heads is not None and (len(set(heads)) < len(heads) or not all(_is_whole(head) for head in heads)):
        raise ValueError(f"heads must be numbers, each of them once, got {list(heads)}")
    if heads is not None and len(heads) != query.shape[1]:
        raise ShapeError(f"{len(heads)} numbers do not name {query.shape[1]} heads")
    return Text(
        list(query.split([piece.query_len for piece in pieces], dim=2)),
        key, value, data["scale"], data["softcap"], sink, additive, pieces, heads, lse=lse,
        cross=_cross(data), patches=_patches(data, key.shape[2]),
    )  # fmt: skip


def _cross(data: Mapping[str, Any]) -> bool:
    cross = data.get("cross", False)
    if not isinstance(cross, bool):
        raise TypeError(f"cross must be true or false, got {cross!r}")
    return cross


def _patches(data: Mapping[str, Any], key_len: int) -> tuple[int, int] | None:
    patches = data.get("patches")
    if patches is None:
        return None
    rows, columns = patches
    if not (_is_whole(rows) and _is_whole(columns) and 0 < rows * columns <= key_len):
        raise ValueError(f"{rows} x {columns} patches are not among {key_len} keys")
    return rows, columns


def _check_lengths(pieces: Sequence[Piece]) -> None:
    """Each call has queries and keys; the first starts at the first key, and none before the previous call."""
    before = 0
    for number, piece in enumerate(pieces):
        lengths = piece.query_len, piece.first, piece.key_len
        if not all(_is_whole(length) for length in lengths):
            raise TypeError(f"query_len, first and key_len must be whole numbers, got {lengths}")
        if piece.first < before or (number == 0 and piece.first):
            raise ValueError(f"call {number} cannot begin at key {piece.first}")
        before = piece.first


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _probe(scoring: Scoring) -> None:
    """Evaluates mask and bias in the corners, so that invalid ones fail at once."""
    grid = scoring.grid
    if not grid.query_len or not grid.key_len:
        return
    corners = [torch.tensor([0, length - 1], device=grid.device) for length in (grid.query_len, grid.key_len)]
    asked = [part(*corners) for part in (getattr(scoring.mask, "allowed", None), getattr(scoring.bias, "values", None))
             if part is not None]  # fmt: skip
    for cells in asked:
        cells.expand(grid.batch, grid.heads, 2, 2)
    if scoring.bias is not None and not asked[-1].is_floating_point():
        raise TypeError(f"a bias must be floating, got {asked[-1].dtype}")
    if scoring.mask is not None:
        if asked[0].dtype != torch.bool:
            raise TypeError(f"a mask must be bool, got {asked[0].dtype}")
        scoring.mask.tile(range(grid.query_len), range(grid.key_len))
