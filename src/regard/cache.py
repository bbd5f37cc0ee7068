"""Keys and values of the tokens already seen, so that generating one more token costs one query and not the whole text.

    without a cache   token t computes t keys and values in every layer
    with a cache      token t computes one, and appends it

A `Cache` holds one `LayerCache` per layer. Memory is taken in steps that double, so appending n tokens one at a time
copies O(n) numbers in all (under `torch.no_grad` or `torch.inference_mode`: a backward pass needs every state as it
was). Masks need no change: by their default offset the last query meets the last key.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.shapes import CACHE, check, shape_error


class LayerCache:
    """The keys and values of one attention layer.

    >>> cache = LayerCache()
    >>> key, value = cache.append(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5))
    >>> key, value = cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 5))
    >>> cache.length, list(key.shape), list(value.shape)
    (4, [1, 2, 4, 4], [1, 2, 4, 5])
    """

    def __init__(self) -> None:
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new keys and values and returns all of them, oldest first.

        Shapes: key [batch, kv_heads, length, head_dim], value [batch, kv_heads, length, value_dim]; the results are
        the same with the whole length. They stay as they are, whatever is done to the cache afterwards.
        Raises:
            ShapeError: they do not fit each other or what the cache holds.
        """
        sizes = check("LayerCache.append", CACHE, key=key, value=value)
        start, self.length = self.length, self.length + sizes["length"]
        try:
            self._key = self._extended(self._key, key, start)
            self._value = self._extended(self._value, value, start)
        except ValueError as error:
            self.length = start
            raise shape_error("LayerCache.append", str(error), CACHE, {"key": key, "value": value}) from None
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """All keys and values, oldest first."""
        if self._key is None or self._value is None:
            raise ValueError("LayerCache.read: the cache is empty; append keys and values first")
        return self._key[:, :, : self.length], self._value[:, :, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """Keeps these batch indices, in this order (a row may come more than once): what beam search needs.

        Args:
            rows: int [new batch].
        """
        if self._key is not None and self._value is not None:
            key, value = self.read()
            self._key, self._value = key.index_select(0, rows), value.index_select(0, rows)

    def crop(self, length: int) -> None:
        """Forgets all tokens from `length` on."""
        if not isinstance(length, int) or not 0 <= length <= self.length:
            raise ValueError(f"LayerCache.crop: length must be 0 to {self.length}, got {length}")
        if self._key is not None and self._value is not None:
            # cut, so that the next append makes room anew: what was read before may still be in use
            self._key, self._value = self._key[:, :, :length], self._value[:, :, :length]
        self.length = length

    def _extended(self, held: Tensor | None, new: Tensor, start: int) -> Tensor:
        if held is None:
            return new
        if held.shape[:2] != new.shape[:2] or held.shape[3] != new.shape[3]:
            raise ValueError(f"the cache holds {list(held.shape)}, which new tokens must fit in all axes but length")
        if held.dtype != new.dtype or held.device != new.device:
            raise ValueError(f"the cache holds {held.dtype} on {held.device}, got {new.dtype} on {new.device}")
        if torch.is_grad_enabled():  # writing in place would break the backward pass
            return torch.cat([held[:, :, :start], new], dim=2)
        locked = held.is_inference() and not torch.is_inference_mode_enabled()
        if start + new.shape[2] > held.shape[2] or locked:
            room = max(2 * held.shape[2], start + new.shape[2], 64)
            grown = new.new_empty(*held.shape[:2], room, held.shape[3])
            grown[:, :, :start] = held[:, :, :start]
            held = grown
        held[:, :, start : start + new.shape[2]] = new
        return held


class Cache:
    """One `LayerCache` for each layer of a model.

    >>> cache = Cache(2)
    >>> cache.length, len(cache)
    (0, 2)
    """

    def __init__(self, layers: int) -> None:
        self._layers = [LayerCache() for _ in range(layers)]

    @property
    def length(self) -> int:
        """How many tokens have been seen."""
        return self._layers[0].length if self._layers else 0

    def reorder(self, rows: Tensor) -> None:
        """`LayerCache.reorder` in every layer."""
        for layer in self:
            layer.reorder(rows)

    def crop(self, length: int) -> None:
        """`LayerCache.crop` in every layer."""
        for layer in self:
            layer.crop(length)

    def __getitem__(self, index: int) -> LayerCache:
        return self._layers[index]

    def __iter__(self) -> Iterator[LayerCache]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)
