"""The weights of one layer's call, made when they are looked at."""

from typing import Any

from torch import Tensor

from regard.hooks import Heads, ScoringArguments
from regard.huggingface.lazy import Lazy, _getter
from regard.observation import Observation, observe


class LazyWeights(Lazy):
    """The weights of one layer's call, made when they are looked at: a tensor [batch, heads, query_len, key_len].

    What is in ``outputs.attentions``. It keeps query and key and no weight. A rectangle, ``weights[0, 3, -8:, :64]``,
    is computed when it is asked for, at any length. Whatever function of torch needs all of them gets them where they
    are few, and an error with advice where they are not. Gradients flow through them. They are those before dropout.

    With a cache, keys grow or are written over from step to step. There they are copied; or, where the weights are
    fewer, these are computed at once and kept instead.
    """

    _numbers: Tensor | None
    _call: tuple[Tensor, Tensor, ScoringArguments] | None
    _versions: list[int]

    def __new__(cls, heads: Heads, scoring: ScoringArguments) -> "LazyWeights":
        query, key = heads.query, heads.key
        shape = (*query.shape[:3], key.shape[2])
        lazy: LazyWeights = cls._empty(cls, shape, query.dtype, query.device)
        lazy._numbers, lazy._call = None, (query, key, scoring)
        lazy._versions = lazy._versions_now()
        if shape[2] < shape[3] and lazy.numel() <= key.numel():
            lazy._numbers, lazy._call = lazy._rectangle(), None
        elif shape[2] < shape[3]:
            lazy._call = query, key.clone(), scoring
            lazy._versions = lazy._versions_now()
        return lazy

    def __init__(self, heads: Heads, scoring: ScoringArguments) -> None:
        pass

    @property
    def observation(self) -> Observation:
        """Everything else that can be asked of weights (`regard.observe`): entropy, the largest, an image.

        Raises:
            ValueError: of a step after a cache the weights alone are kept; or query, key or sink was written over.
        """
        if self._call is None:
            raise ValueError(
                "regard: of a step after a cache the weights alone are kept, query and key are not; give the model all "
                "tokens at once, or record the step: with regard.record(model) as recording: ..."
            )
        if self._versions != self._versions_now():
            raise ValueError(
                "regard: these weights can no longer be known: query, key, bias or sink was written over since (by a "
                "static cache or an optimizer); look at them before the next step"
            )
        query, key, scoring = self._call
        return observe(query, key, **scoring)

    def dense(self) -> Tensor:
        self._check_size()
        return self._rectangle()

    def _rectangle(self, rows: range | None = None, columns: range | None = None, head: int | None = None) -> Tensor:
        """Some rows and columns of all batch rows, of one head or of all."""
        if self._numbers is not None:
            heads = slice(None) if head is None else slice(head, head + 1)
            rows, columns = rows or range(self.shape[2]), columns or range(self.shape[3])
            return self._numbers[:, heads, rows.start : rows.stop, columns.start : columns.stop]
        seen = self.observation if head is None else self.observation.head(head)
        return seen.weights(rows, columns).to(self.dtype)

    def _versions_now(self) -> list[int]:
        """How often each tensor that the weights follow from was written to."""
        if self._call is None:
            return []
        query, key, scoring = self._call
        kept = query, key, scoring["sink"], scoring["bias"]
        return [x._version for x in kept if isinstance(x, Tensor) and not x.is_inference()]

    def _advice(self) -> str:
        return (
            "look at a rectangle, weights[0, 3, -64:, -64:], or ask weights.observation for a statistic: entropy(), "
            "top(8), received()"
        )

    def __getitem__(self, index: Any) -> Tensor:
        asked = list(index) if isinstance(index, tuple) else [index]
        if any(type(x) not in (int, slice, type(Ellipsis)) for x in asked) or asked.count(Ellipsis) > 1:
            return self.dense()[index]
        at = asked.index(Ellipsis) if Ellipsis in asked else len(asked)
        asked[at : at + 1] = [slice(None)] * (4 - len(asked) + (Ellipsis in asked))
        if len(asked) != 4:
            raise IndexError(f"regard: weights have four axes {list(self.shape)}, got {index!r}")
        head, rest = None, list(asked)
        if isinstance(asked[1], int):
            head, rest[1] = range(self.shape[1])[asked[1]], 0
        sides: list[range] = []
        for axis in (2, 3):
            side = range(self.shape[axis])[asked[axis] if isinstance(asked[axis], slice) else slice(None)]
            if isinstance(asked[axis], int):
                place = side[asked[axis]]
                side, rest[axis] = range(place, place + 1), 0
            elif side.step > 0:
                side, rest[axis] = range(side.start, max(side.start, side.stop)), slice(None, None, side.step)
            sides.append(side)
        return self._rectangle(sides[0], sides[1], head)[tuple(rest)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _getter("requires_grad"):
            of = args[0]._call[:2] if args[0]._call is not None else (args[0]._numbers,)
            return any(x.requires_grad for x in of)
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeights({list(self.shape)}, {self.dtype})"
