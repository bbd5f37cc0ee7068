"""Keys and values of the tokens already seen, so that generating one more token costs one query and not the whole text.

    without a cache   token t computes t keys and values in every layer
    with a cache      token t computes one, and appends it

A `Cache` holds one `LayerCache` per layer. Memory is taken in steps that double, so appending n tokens one at a time
copies O(n) numbers in all (under `torch.no_grad` or `torch.inference_mode`: a backward pass needs every state as it
was). Masks need no change: by their default offset the last query meets the last key.

**A window.** Where each token attends to the last w only, older ones need not be kept: with `keep=w - 1` the cache
forgets them, and its memory stays the same however long the text becomes. Positions go on counting.

**Texts of unequal lengths** share a cache that is aligned at its end: the newest tokens of all rows are side by side,
and `starts` says before which slot a row holds nothing.

    row 0   . . a b c d      starts = [2, 0]; the next token of row 0 stands at position 4, that of row 1 at 6
    row 1   e f g h i j
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.masks import Mask, Padding
from regard.shapes import CACHE, check, check_whole, shape_error


class LayerCache:
    """The keys and values of one attention layer.

    Args:
        keep: how many of the newest tokens are kept for the next call; None: all.
    Attributes:
        length: tokens seen. held: those of them that are still here.
        starts: int [batch], how many of `length` come before each row's first token; None: none, in any row.

    >>> cache = LayerCache()
    >>> key, value = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
    >>> key, value = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 5))
    >>> cache.length, list(key.shape), list(value.shape)
    (4, [1, 2, 4, 4], [1, 2, 4, 5])
    """

    def __init__(self, *, keep: int | None = None) -> None:
        self.keep = None if keep is None else check_whole("LayerCache", "keep", keep, least=0)
        self.length = 0
        self.starts: Tensor | None = None
        self._first = self._end = 0  # the slots that are held
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def held(self) -> int:
        """How many tokens are held."""
        return self._end - self._first

    @property
    def kept(self) -> int:
        """How many of those held stay when the next token comes."""
        return self.held if self.keep is None else min(self.held, self.keep)

    @property
    def position(self) -> int | Tensor:
        """Where the next token stands: one number, or one for each row, int [batch]."""
        return self.length if self.starts is None else self.length - self.starts

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new keys and values and returns them after all that were kept, oldest first.

        Shapes: key [batch, kv_heads, length, head_dim], value [batch, kv_heads, length, value_dim]; the results are
        the same with the whole length. They stay as they are, whatever is done to the cache afterwards.
        Raises:
            ShapeError: they do not fit each other or what the cache holds.
        """
        sizes = check("LayerCache.append", CACHE, key=key, value=value)
        first = self._end - self.kept
        try:
            longer_key = self._extended(self._key, key, first)
            longer_value = self._extended(self._value, value, first)
        except ValueError as error:
            raise shape_error("LayerCache.append", str(error), CACHE, {"key": key, "value": value}) from None
        if longer_key is not self._key:  # made anew, from the first that is kept
            first, self._end = 0, self._end - first
        self._key, self._value, self._first = longer_key, longer_value, first
        self._end += sizes["length"]
        self.length += sizes["length"]
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values that are held, oldest first."""
        if self._key is None or self._value is None:
            raise ValueError("LayerCache.read: the cache is empty; append keys and values first")
        return self._key[:, :, self._first : self._end], self._value[:, :, self._first : self._end]

    def reorder(self, rows: Tensor) -> None:
        """Keeps these batch indices, in this order (a row may come more than once): what beam search needs.

        Args:
            rows: int [new batch].
        """
        if self._key is not None and self._value is not None:
            key, value = self.read()
            self._hold(key.index_select(0, rows), value.index_select(0, rows))
        if self.starts is not None:
            self._settle((self.length - self.starts)[rows])

    def crop(self, length: int) -> None:
        """Forgets all tokens from `length` on.

        Raises:
            ValueError: fewer have been seen, or tokens that the next one would attend to were forgotten before.
        """
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"LayerCache.crop: length must be 0 to {self.length}, got {length}")
        held = self.held - (self.length - length)
        if self.keep is not None and held < min(length, self.keep):
            raise ValueError(
                f"LayerCache.crop: of the {self.length} tokens seen the last {self.held} are held, so that there is no "
                f"going back to {length}"
            )
        if self._key is not None and self._value is not None:
            # cut, so that the next append makes room anew: what was read before may still be in use
            end = self._first + held
            self._key, self._value = self._key[:, :, :end], self._value[:, :, :end]
            self._end = end
        self.length = length

    def align(self, lengths: Tensor) -> None:
        """Makes texts that were read with padding at their ends begin late instead: row b has `lengths[b]` tokens.

        Args:
            lengths: int [batch], from 1 to what was read.
        """
        key, value = self.read()
        late = self.length - lengths
        # what comes from before the beginning is the padding, and is hidden
        places = (torch.arange(self.held, device=key.device) - late[:, None]) % self.held
        self._hold(*(x.gather(2, places[:, None, :, None].expand_as(x)) for x in (key, value)))
        self._settle(lengths)

    def join(self, others: "Sequence[LayerCache]") -> None:
        """Adds the rows of other caches below its own, all aligned at their ends."""
        every = [self, *others]
        positions = torch.cat([torch.as_tensor(x.position).expand(x.read()[0].shape[0]) for x in every])
        held = max(x.kept for x in every)
        key, value = (
            torch.cat([F.pad(x[:, :, x.shape[2] - cache.kept :], (0, 0, held - cache.kept, 0)) for cache, x in pairs])
            for pairs in zip(*([(x, part) for part in x.read()] for x in every), strict=True)
        )
        self._hold(key, value)
        self._settle(positions)

    def _settle(self, positions: Tensor) -> None:
        """Takes over where each row's next token stands, and forgets slots that no row uses."""
        self.length = int(positions.max())
        starts = self.length - positions
        self.starts = starts if bool(starts.any()) else None
        self._first = max(self._first, self._end - self.length)

    def _hold(self, key: Tensor, value: Tensor) -> None:
        self._key, self._value, self._first, self._end = key, value, 0, key.shape[2]

    def _extended(self, held: Tensor | None, new: Tensor, first: int) -> Tensor:
        """A tensor with the new tokens in their slots; the one that was held, or a longer one that begins at first."""
        if held is None:
            return new
        if held.shape[:2] != new.shape[:2] or held.shape[3] != new.shape[3]:
            raise ValueError(f"the cache holds {list(held.shape)}, which new tokens must fit in all axes but length")
        if held.dtype != new.dtype or held.device != new.device:
            raise ValueError(f"the cache holds {held.dtype} on {held.device}, got {new.dtype} on {new.device}")
        end, count = self._end, new.shape[2]
        if torch.is_grad_enabled():  # writing in place would break the backward pass
            return torch.cat([held[:, :, first:end], new], dim=2)
        locked = held.is_inference() and not torch.is_inference_mode_enabled()
        if end + count > held.shape[2] or locked:
            room = max(2 * (end - first + count), 64)
            grown = new.new_empty(*held.shape[:2], room, held.shape[3])
            grown[:, :, : end - first] = held[:, :, first:end]
            grown[:, :, end - first : end - first + count] = new
            return grown
        held[:, :, end : end + count] = new
        return held


class Cache:
    """One `LayerCache` for each layer of a model.

    Args:
        layers: how many.
        keep: how many of the newest tokens are kept for the next call; None: all.

    >>> cache = Cache(2)
    >>> cache.length, len(cache)
    (0, 2)
    """

    def __init__(self, layers: int, *, keep: int | None = None) -> None:
        self._layers = [LayerCache(keep=keep) for _ in range(layers)]

    @property
    def length(self) -> int:
        """How many tokens have been seen."""
        return self._layers[0].length if self._layers else 0

    @property
    def position(self) -> int | Tensor:
        """Where the next token stands: one number, or one for each row, int [batch]."""
        return self._layers[0].position if self._layers else 0

    @property
    def keep(self) -> int | None:
        """How many of the newest tokens are kept for the next call; None: all."""
        return self._layers[0].keep if self._layers else None

    @property
    def longest(self) -> int:
        """How many tokens the longest text has."""
        position = self.position
        return position if isinstance(position, int) else int(position.max())

    def padding(self, count: int) -> Mask | None:
        """What hides the slots before each row's first token from the next `count` queries; None: nothing to hide."""
        layer = self._layers[0] if self._layers else None
        if layer is None or layer.starts is None:
            return None
        with torch.inference_mode(False):  # a mask that can be compared is prepared once, for all layers
            slots = torch.arange(layer.kept + count, device=layer.starts.device)
            return Padding(slots >= (layer.starts - (layer.length - layer.kept))[:, None])

    def reorder(self, rows: Tensor) -> None:
        """`LayerCache.reorder` in every layer."""
        for layer in self:
            layer.reorder(rows)

    def crop(self, length: int) -> None:
        """`LayerCache.crop` in every layer."""
        for layer in self:
            layer.crop(length)

    def align(self, lengths: Tensor) -> None:
        """`LayerCache.align` in every layer."""
        for layer in self:
            layer.align(lengths)

    def join(self, others: "Sequence[Cache]") -> None:
        """Adds the rows of other caches below its own, all aligned at their ends."""
        for number, layer in enumerate(self):
            layer.join([other[number] for other in others])

    def __getitem__(self, index: int) -> LayerCache:
        return self._layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
