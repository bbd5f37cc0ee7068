"""Keeps query and key of every attention layer while a model runs."""

import html
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.biases import as_bias
from regard.hooks import Attend, Heads, Result, ScoringArguments
from regard.observation.selecting import HeadsBias, HeadsMask
from regard.recording.file import read, write
from regard.recording.reading import Read, Reading
from regard.recording.summary import Summary, html_table, summarise
from regard.recording.texts import Piece, Recorded, Text
from regard.recording.watching import Place, checked, find, named, watching
from regard.shapes import INTEGER_DTYPES, as_bytes, bytes_of, is_plain, kind, plural


class Recording(Mapping[str, Recorded]):
    """The recorded attention layers of a model, by name ("layers.0", ...) or number, in the order of their first call.

    Made by `record` and `load_recording`.
    """

    def __init__(
        self,
        model: str = "",
        *,
        heads: Sequence[int] | None = None,
        values: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        """The model's name, or its class."""
        self._chosen = None if heads is None else tuple(dict.fromkeys(heads))
        self._values, self._dtype = values, dtype
        self._texts: dict[str, list[Text]] = {}
        self._order_of_self: list[bool] = []  # of each self-attention, whether it went on with its text
        self._order: dict[str, int] = {}  # how many there were when a layer ran last

    def __getitem__(self, name: str | int) -> Recorded:
        """The last text that a layer saw, whole, though it may have been read in pieces with a cache."""
        return self._layer(name)[-1].whole()

    def calls(self, name: str | int) -> list[Recorded]:
        """Every call of a layer, one by one, each with the keys that it had."""
        return [call for text in self._layer(name) for call in text.calls()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def tokens(self) -> Tensor | None:
        """The model's input tokens, int [batch, length], if known: the last text of the first layer that has them."""
        return next((seen.tokens for seen in self.values() if seen.tokens is not None), None)

    @torch.no_grad()
    def summary(
        self,
        tokens: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        progress: Callable[[int, int], None] = lambda done, all: None,
    ) -> Summary:
        """Every head in a few numbers (see `regard.recording.summary`).

        Heads that read text are described by its tokens; those that read images or sound, or attend to another
        sequence, by the positions they attend to.

        Args:
            tokens: what the model read, int [batch, length], whole; None: what was recorded, and where nothing was,
                kinds that need no tokens. Layers that read another text than these are described by their own.
            documents: int, like tokens: the document of each token; None: no shares of documents.
            progress: called with the layers done and all there are.
        Raises:
            ShapeError: tokens that no layer read, or a text whose beginning was not recorded.
        """
        heads = Summary()
        chosen = self._tokens_of_layers(tokens)
        for number, (name, seen) in enumerate(self.items(), start=1):
            read = chosen[name]
            heads += summarise(name, seen, read, None if read is None else documents)
            progress(number, len(self))
        return heads

    def _tokens_of_layers(self, given: Tensor | None) -> dict[str, Tensor | None]:
        """The tokens that describe each layer: the given ones, or those it read; None if it read no text."""
        layers = dict(self.items())
        own = {name: None if _reads_others(seen) else seen.tokens for name, seen in layers.items()}
        if given is None:
            return own
        if not is_plain(given) or given.dtype not in INTEGER_DTYPES:
            raise TypeError(f"summary: tokens must be an int tensor [batch, length], got {kind(given)}")
        # if one layer read exactly these, layers that read other tokens keep their own
        known = any(read is not None and torch.equal(read, given.to(read)) for read in own.values())
        fitting = {
            name: not _reads_others(seen) and given.shape == (seen.grid.batch, seen.grid.query_len)
            for name, seen in layers.items()
        }
        if not any(fitting.values()):  # wrong tokens: every layer that reads text will raise
            return {name: None if _reads_others(seen) else given for name, seen in layers.items()}
        return {name: given if fits and not (known and own[name] is not None) else own[name]
                for name, fits in fitting.items()}  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recording to one safetensors file for `load_recording`: tensors and tokens, and in the header the
        model's name and how scores are computed.

        Computes lse where it is missing, in one pass over the scores. A mask or bias that is a function is evaluated in
        every cell, up to `MAX_WRITTEN_SCORES` cells.

        Raises:
            ValueError: nothing was recorded, or a mask that is a function is too large.
        """
        if not self:
            raise ValueError("recording.save: there is nothing to write; has the model run inside the with block?")
        write(path, self.model, self._texts)

    def view(self, *, tokens: Any = None, image: Tensor | None = None) -> Any:
        """The page of this recording, for a notebook to show.

        Args:
            tokens: what the tokens are called, a list of texts; or a tokenizer, for those that were recorded; None:
                their numbers.
            image: of an image model, its picture, [3, height, width] or [height, width, 3].
        """
        import regard  # the page stands above this file, and is loaded when it is asked for

        return regard.viewer.view(self, tokens=tokens, image=image)

    def __repr__(self) -> str:
        of = f" of {self.model}" if self.model else ""
        texts = [text for of_layer in self._texts.values() for text in of_layer]
        parts = [plural(len(self), "layer")]
        if texts:
            parts.append(plural(sum(len(text.pieces) for text in texts), "call"))
            heads = sorted({text.queries[0].shape[1] for text in texts})
            parts.append(plural(heads[-1], "head") if len(heads) == 1 else f"{heads[0]} to {heads[-1]} heads")
            if self.tokens is not None:
                rows, length = self.tokens.shape
                parts.append(plural(length, "token") + (f" in {rows} rows" if rows > 1 else ""))
            parts.append(as_bytes(bytes_of(tensor for text in texts for tensor in text.held())))
        return f"<Recording{of}: {', '.join(parts)}>"

    def _repr_html_(self) -> str:
        rows = [["", "layer", "heads", "queries", "keys", "mask", "calls"]]
        for number, (name, texts) in enumerate(self._texts.items()):
            seen = texts[-1].whole()
            calls = sum(len(text.pieces) for text in texts)
            _, _, query_len, key_len, _ = seen.grid
            heads = len(seen.heads)
            mask = "" if seen.scoring.mask is None else seen.scoring.mask
            rows.append([*map(str, (number, name, heads, query_len, key_len, mask, calls))])
        return f"<p>{html.escape(repr(self).strip('<>'))}</p>" + html_table(rows)

    def _layer(self, name: str | int) -> "list[Text]":
        return find("recording", "recorded", self._texts, name)

    def _add(
        self, name: str, heads: Heads, scoring: ScoringArguments, settled: bool, lse: Tensor | None,
        read: Read,
    ) -> None:  # fmt: skip
        """Keeps one call of a layer.

        Args:
            settled: whether these tensors are known not to be overwritten (regard's own layers and caches).
            lse: that of the call, if known. read: the input of the layer.
        """
        text = self._text(name, heads, scoring, settled, read)
        if lse is not None and self._dtype in (None, heads.query.dtype):  # not that of rounded numbers
            text.lse = lse.detach() if self._chosen is None else lse.detach()[:, list(self._chosen)]
        texts = self._texts.setdefault(name, [])
        goes_on = bool(texts) and texts[-1].take(text, settled, self._goes_on(name) if read.cross else None)
        if not goes_on:
            texts.append(text)
        self._order[name] = len(self._order_of_self)
        if not read.cross:
            self._order_of_self.append(goes_on)

    def _goes_on(self, name: str) -> bool | None:
        """Whether the last self-attention continued its text; None if none ran since this layer did."""
        return self._order_of_self[-1] if len(self._order_of_self) > self._order.get(name, 0) else None

    def _text(self, name: str, heads: Heads, scoring: ScoringArguments, settled: bool, read: Read) -> "Text":
        """One call as a text of one piece."""
        count, kv_heads = heads.query.shape[1], heads.key.shape[1]
        mask, bias = scoring["mask"], scoring["bias"]
        bias = None if bias is None else as_bias(bias).map_tensors(_kept)
        sink = None if scoring["sink"] is None else _kept(scoring["sink"])
        additive = None if scoring["additive"] is None else _kept(scoring["additive"].v)
        tensors = [heads.query, heads.key, *([heads.value] if self._values else [])]
        if self._chosen is None:
            tensors = [t.detach() if settled else _kept(t) for t in tensors]
        else:
            wrong = [head for head in self._chosen if not 0 <= head < count]
            if wrong or not self._chosen:
                raise ValueError(f"record: {name} has heads 0 to {count - 1}, heads= was {list(self._chosen)}")
            chosen = list(self._chosen)
            of_kv = [head // (count // kv_heads) for head in chosen]
            tensors = [t.detach()[:, chosen if i == 0 else of_kv] for i, t in enumerate(tensors)]
            mask = None if mask is None else HeadsMask(mask, chosen, count)
            bias = None if bias is None else HeadsBias(bias, chosen, count)
            sink = None if sink is None else sink[chosen]
            additive = None if additive is None else additive[chosen]
        if self._dtype is not None:
            tensors = [_narrowed(tensor, self._dtype, name) for tensor in tensors]
        query, key = tensors[:2]
        return Text(
            [query], key, tensors[2] if self._values else None, scoring["scale"], scoring["softcap"], sink, additive,
            [Piece(query.shape[2], 0, key.shape[2], mask, bias, read.tokens)], self._chosen,
            cross=read.cross, patches=read.patches,
        )  # fmt: skip


@contextmanager
def record(
    model: nn.Module,
    *,
    layers: str | int | Iterable[str | int] | None = None,
    heads: Sequence[int] | None = None,
    values: bool = False,
    dtype: torch.dtype | None = None,
) -> Iterator[Recording]:
    """Records a model's attention layers while the ``with`` block runs.

    Recordings can be nested: each sees every call. With `intervene`, inside or outside, a recording has the actual
    inputs of attention.

    Args:
        model: a module that contains `MultiHeadAttention` layers, or one of transformers with
            ``attn_implementation="regard"``; there, a layer is named as its module is.
        layers: names, or numbers in the order of the layers' first calls; None: all of them.
        heads: numbers; None: all of them. Selected heads are copied.
        values: whether to keep the values too, so that `Recorded.steps` includes the output.
        dtype: the dtype in which query, key and value are kept; None: their own. float16 halves float32's memory; lse
            and weights are then those of the rounded numbers.
    Raises:
        ValueError: a layer or head that does not exist; or at the end of the block, no attention went through regard.

    >>> layer = MultiHeadAttention(8, 2)
    >>> with record(layer) as recording:
    ...     output = layer(torch.randn(1, 5, 8))
    >>> recording["attention"].weights().shape
    torch.Size([1, 2, 5, 5])
    """
    if dtype is not None and not dtype.is_floating_point:
        raise TypeError(f"record: dtype must be floating, such as torch.float16, or None, got {dtype}")
    model = checked("record", model)
    recording = Recording(name_of(model), heads=heads, values=values, dtype=dtype)
    reading = Reading(model, {id(module) for module in named(model).values()})

    def keep(place: Place, attend: Attend) -> Attend:
        def kept(heads: Heads, scoring: ScoringArguments) -> Result:
            output, lse = attend(heads, scoring)
            read = reading.of_call(place.layer, *(len(heads.query), heads.query.shape[2], heads.key.shape[2]))
            recording._add(place.name, heads, scoring, place.settled, lse, read)
            return output, lse

        return kept

    with watching("record", model, layers, keep, innermost=True):
        yield recording


def _reads_others(seen: Recorded) -> bool:
    """Whether a layer's keys are an image or another sequence."""
    return seen.cross or seen.patches is not None


def name_of(model: nn.Module) -> str:
    """The name of a model: the one it was loaded by, or its class."""
    name = getattr(getattr(model, "config", None), "name_or_path", "")
    return name if isinstance(name, str) and name else type(model).__name__


def _kept(tensor: Tensor) -> Tensor:
    """A tensor that will not change: the tensor itself if it is a fresh result, a copy if it may be overwritten, like
    parameters by an optimizer and keys by a static cache. (In inference mode this is unknown.)"""
    written = tensor.is_inference() or tensor._version > 0 or (tensor.is_leaf and tensor.requires_grad)
    return tensor.detach().clone() if written or isinstance(tensor, nn.Parameter) else tensor.detach()


def _narrowed(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    narrow = tensor.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and bool((narrow.isinf() & tensor.isfinite()).any()):
        raise ValueError(
            f"record: {name} has numbers that {dtype} cannot hold (up to {torch.finfo(dtype).max:g}); use "
            "dtype=torch.bfloat16, or None"
        )
    return narrow


def load_recording(path: str | os.PathLike[str]) -> Recording:
    """What `Recording.save` wrote; its answers are the same, bit for bit.

    The tensors are memory-mapped from the file and read on first use, so do not move it.

    Raises:
        ValueError: there is no such file, or it is damaged, or no recording, or of another version.
    """
    model, texts = read(path)
    recording = Recording(model)
    recording._texts.update(texts)
    return recording
