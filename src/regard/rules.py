"""What masks and biases share: a rule for one query and one key, and data that is declared once.

A mask says for every query and key whether the one may attend to the other; a bias says which number is added to their
score. Either is a class with one method, in the signature of FlexAttention's ``mask_mod``:

    rule(batch, head, query, key)    index tensors that broadcast against each other -> what it says there

The arguments of its constructor, kept under their own names, are all the data it has. Tensors among them may declare
their axes. Everything else follows from that: how it is checked against a call (`bind`), what it says at one batch
index (`for_batch`), how it moves to a device (`to`), how two of them compare (`same`, `structure`), how it is written
down and read again (`spell`, `unspell`).

    class EveryBlock(Mask):
        \"\"\"Keys in every k-th block of n.\"\"\"

        def __init__(self, n, k):
            self.n, self.k = n, k

        def rule(self, batch, head, query, key):
            return key // self.n % self.k == 0
"""

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from regard.indexing import Indices, indices, lookup
from regard.shapes import Grid, Offset, ShapeError, check_offset

MAX_COMPARED_NUMBERS = 1 << 20
"""Numbers in a tensor that is remembered with what was found out about it: a few per token, not per pair."""

RULE_KINDS: "dict[str, type[Rule]]" = {}
"""Every kind of mask and bias by the name under which it is written down: regard's own by their class, others with
their module."""


class Rule:
    """A mask or a bias: what holds between one query and one key.

    Attributes:
        fields: the names of its arguments; each is an attribute too.
        axes: the axes of the tensors among them: "batch", "heads", "query_len", "key_len", or a name of its own for an
            axis that is none of these. A size of 1 stands for any size.
        kind: its name where it is written down.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    kind: ClassVar[str]

    # settled by `bind`: how many batch indices and heads a call has; by `for_batch`: which of them is index 0
    _batch: int | None = None
    _heads: int | None = None
    _device: torch.device = torch.device("cpu")
    _first_batch: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.axes = {**getattr(super(cls, cls), "axes", {}), **cls.__dict__.get("axes", {})}
        if "fields" not in cls.__dict__ and cls.__init__ is not object.__init__:
            _, *parameters = signature(cls.__init__).parameters.values()
            variable = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
            cls.fields = tuple(parameter.name for parameter in parameters if parameter.kind not in variable)
        for name in cls.fields:
            if callable(getattr(cls, name, None)):
                raise TypeError(
                    f"{cls.__name__}: an argument cannot be called {name!r}, which is a method of every mask"
                )
        own = cls.__module__.partition(".")[0] == "regard"
        cls.kind = cls.__name__ if own else f"{cls.__module__}:{cls.__qualname__}"
        RULE_KINDS[cls.kind] = cls

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """What it says of each query and key: index tensors that broadcast against each other, and so does the answer.

        It is asked with tensors of a rectangle at once, and with single numbers by FlexAttention.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rule(batch, head, query, key)")

    def arguments(self) -> dict[str, Any]:
        """What makes it again: its constructor's arguments by name."""
        try:
            return {name: getattr(self, name) for name in self.fields}
        except AttributeError as error:
            raise TypeError(
                f"{type(self).__name__}: every argument of __init__ must be kept under its own name, for the mask or "
                f"bias to be compared, moved and stored ({error})"
            ) from None

    # --- one call ---------------------------------------------------------------------------------------------------

    def _bound(self, grid: Grid) -> Self:
        """For one call: data checked, parts bound, numbers of batch indices and heads known."""
        for name, axes in self.axes.items():
            data = getattr(self, name)
            if isinstance(data, Tensor):
                check_data(self, name, data, axes, grid)
        changed: dict[str, Any] = {}
        for name in self.fields:
            part = getattr(self, name, None)
            if isinstance(part, Rule):
                bound = part.bind(grid)
                if bound is not part:
                    changed[name] = bound
        return self._with(_batch=grid.batch, _heads=grid.heads, _device=grid.device, **changed)

    def bind(self, grid: Grid) -> Any:
        """This mask or bias for one call: data checked, default offset settled, and simplified where that is free.

        Raises:
            ShapeError: it carries data for another batch, number of heads or length.
            ValueError: it carries data on another device.
        """
        return self._bound(grid)

    def ask(self, queries: Indices, keys: Indices) -> Tensor:
        """`rule` for a rectangle: what it returns, with axes for batch and heads in front."""
        query, key = indices(queries, self._device)[:, None], indices(keys, self._device)[None, :]
        device = query.device
        batch_size = self._size("batch") if self._batch is None else self._batch
        heads = self._size("heads") if self._heads is None else self._heads
        batch = torch.arange(self._first_batch, self._first_batch + batch_size, device=device)[:, None, None, None]
        head = torch.arange(heads, device=device)[None, :, None, None]
        said = self.rule(batch, head, query, key)
        return said.reshape((1,) * (4 - said.dim()) + said.shape) if said.dim() < 4 else said

    def _size(self, axis: str) -> int:
        """Of an axis, as its data tells: what is known of a call before one is bound."""
        sizes = [part._size(axis) for part in self.parts()]
        for name, axes in self.axes.items():
            data = getattr(self, name)
            if isinstance(data, Tensor) and axis in axes[: data.dim()]:
                sizes.append(data.shape[axes.index(axis)])
        return next((size for size in sizes if size != 1), 1)

    def _called(self, name: str) -> str:
        """A field in an error."""
        return f"{type(self).__name__}: {name}"

    def _hint(self, name: str) -> str:
        """What to say after a field that does not fit a call."""
        return ""

    @property
    def varies_by_batch(self) -> bool:
        """Whether it carries data that differs between batch indices."""
        for name, axes in self.axes.items():
            data = getattr(self, name)
            if axes[0] == "batch" and isinstance(data, Tensor) and data.dim() and data.shape[0] > 1:
                return True
        return any(part.varies_by_batch for part in self.parts())

    def for_batch(self, index: int) -> Any:
        """What it says at one batch index, for a call with batch=1. Bind it before use."""

        def at_index(name: str, value: Any) -> Any:
            if isinstance(value, Rule):
                return value.for_batch(index)
            if isinstance(value, (list, tuple)):
                return [at_index(name, part) for part in value]
            axes = self.axes.get(name, ())
            if axes[:1] != ("batch",) or not isinstance(value, Tensor) or not value.dim() or value.shape[0] == 1:
                return int(value) if axes == ("batch",) and isinstance(value, Tensor) else value
            return int(value[index]) if axes == ("batch",) else value[index : index + 1]

        made = self._again({name: at_index(name, value) for name, value in self.arguments().items()})
        return made._with(_batch=1, _heads=self._heads, _first_batch=self._first_batch + index)

    # --- as data ----------------------------------------------------------------------------------------------------

    def parts(self) -> "Iterator[Rule]":
        """The masks and biases that it is made of."""
        for name in self.fields:
            yield from _rules_in(getattr(self, name, None))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same with every tensor in it changed, those of its parts too."""
        arguments = self.arguments()
        changed = {name: _map(value, change) for name, value in arguments.items()}
        if all(changed[name] is arguments[name] for name in arguments):
            return self
        return self._again(changed)._with(_batch=self._batch, _heads=self._heads, _first_batch=self._first_batch)

    def to(self, device: torch.device | str) -> Self:
        """The same with its data on another device."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def structure(self) -> Hashable | None:
        """What two of them share that always answer alike: their kind, numbers and parts, and the tensors they hold.

        None where that cannot be told: a function may answer otherwise tomorrow, a tensor of inference mode may change
        unseen, and a large one is not worth keeping.
        """
        try:
            found = tuple(_comparable(value) for value in self.arguments().values())
        except _NotComparableError:
            return None
        return cast(Hashable, type(self)), self._first_batch, *found

    @property
    def of_positions(self) -> bool:
        """Whether it depends on nothing but where query and key stand, counted from the last of both."""
        return False

    def _again(self, arguments: Mapping[str, Any]) -> Self:
        """Made anew with other arguments."""
        return type(self)(**arguments)

    def _with(self, **attributes: Any) -> Self:
        """The same with some attributes changed, which nothing else was derived from."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **attributes)
        return made


class Positioned(Rule):
    """A mask or bias that compares positions: query i stands at ``i + offset``, key j at j.

    Args:
        offset: position of query 0; default ``key_len - query_len``, settled when a call binds it.
    """

    axes: ClassVar = {"offset": ("batch",)}

    def __init__(self, offset: Offset = None) -> None:
        self.offset = check_offset(type(self).__name__, offset)

    def _bound(self, grid: Grid) -> Self:
        bound = super()._bound(grid)
        if self.offset is None:
            bound.offset = grid.key_len - grid.query_len
        return bound

    @property
    def of_positions(self) -> bool:
        return self.offset is None

    def position(self, batch: Tensor, query: Tensor) -> Tensor:
        """Positions of queries: those of each batch index where each has its offset."""
        if isinstance(self.offset, Tensor) and self.offset.dim():
            return query + lookup(self.offset, batch)
        return query if self.offset is None else query + self.offset  # torch.jit.trace has lengths in tensors


def check_data(owner: Rule, name: str, data: Tensor, axes: Sequence[str], grid: Grid) -> None:
    """Data must fit the call: every axis of its size or 1, and what there is per token on its device."""
    fits, per_token = True, False
    for size, axis in zip(data.shape, axes):  # noqa: B905  (lengths [batch] and cells [batch, key_len] share a field)
        if axis in _OF_A_CALL:
            # of one axis, there is a number for each; of several, one may stand for all
            fits = fits and (size == getattr(grid, axis) or (size == 1 and data.dim() > 1))
            per_token = per_token or axis in ("query_len", "key_len")
    if not fits:
        sizes = ", ".join(f"{axis}={size}" for size, axis in zip(data.shape, axes))  # noqa: B905
        shown = sizes if data.dim() == 1 else f"[{sizes}]"
        raise ShapeError(f"{owner._called(name)} is for {shown}, the scores are {grid}{owner._hint(name)}")
    if per_token and data.device != grid.device:
        raise ValueError(f"{owner._called(name)} is on {data.device}, the call runs on {grid.device}")


_OF_A_CALL = ("batch", "heads", "query_len", "key_len")


def same(one: Any, other: Any) -> bool:
    """Whether two masks, biases, tensors or numbers are the same; of two functions, whether they are one."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        return alike and not one.is_meta and torch.equal(one, other)
    if isinstance(one, Rule) and type(one) is type(other):
        mine, others = one.arguments(), other.arguments()
        return all(same(mine[name], others[name]) for name in mine)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def is_data(value: Any) -> bool:
    """Whether it is made of numbers and tensors alone, so that it can be written down and read again."""
    if isinstance(value, Rule):
        return RULE_KINDS.get(value.kind) is type(value) and all(is_data(part) for part in value.arguments().values())
    if isinstance(value, (list, tuple)):
        return all(is_data(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def kind_called(name: str) -> "type[Rule]":
    """The class of masks or biases that is written down under a name.

    Raises:
        ValueError: there is none; one of somebody's own has to be defined, by importing its module, before it is read.
    """
    if name not in RULE_KINDS:
        module, own, _ = name.partition(":")
        hint = f"; import {module}, which defines it, first" if own else ""
        raise ValueError(f"there is no mask or bias {name!r}{hint}")
    return RULE_KINDS[name]


def spell(rule: Rule, tensors: list[Tensor], numbers: list[int] | None = None) -> str | None:
    """A mask as a line of JSON and the tensors it names, which are added to the list; None for one with a function.

    With a list of numbers they are named too, not written: in a graph for any length they are not known yet.

    >>> from regard import Causal, Window
    >>> spell(Causal() & ~Window(3), [])
    '["And",["Causal",null],["Not",["Window",3,null]]]'
    """
    line = f'["{rule.kind}"'
    for value in rule.arguments().values():
        spelt = _spelt(value, tensors, numbers)
        if spelt is None:
            return None
        line = f"{line},{spelt}"
    return f"{line}]"


def _spelt(value: Any, tensors: list[Tensor], numbers: list[int] | None) -> str | None:
    if isinstance(value, Rule):
        return spell(value, tensors, numbers)
    if isinstance(value, Tensor):
        tensors.append(value)
        return f'{{"tensor":{len(tensors) - 1}}}'
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, int) and numbers is not None:
        numbers.append(value)
        return f'{{"number":{len(numbers) - 1}}}'
    if isinstance(value, (int, float)):
        return f"{value}"
    if isinstance(value, (list, tuple)):
        parts = [_spelt(part, tensors, numbers) for part in value]
        return None if None in parts else f'{{"list":[{",".join(map(str, parts))}]}}'
    return None


def unspell(line: str, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> Any:
    """The mask that was spelt."""

    def made(part: Any) -> Any:
        if isinstance(part, list):
            kind = kind_called(part[0])
            return kind(**dict(zip(kind.fields, map(made, part[1:]), strict=True)))
        if isinstance(part, dict):
            if "list" in part:
                return [made(each) for each in part["list"]]
            return tensors[part["tensor"]] if "tensor" in part else numbers[part["number"]]
        return part

    return made(json.loads(line))


def learned(value: Any) -> Iterator[Tensor]:
    """The tensors in a bias that may want a gradient: floating tensors, those of modules, at any depth."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Rule):
        for part in vars(value).values():
            yield from learned(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from learned(part)
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from learned(part)


def _rules_in(value: Any) -> Iterator[Rule]:
    if isinstance(value, Rule):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _rules_in(part)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Rule):
        return value.map_tensors(change)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(part, change) for part in value)
    return value


class _NotComparableError(Exception):
    """Something of which nobody can tell whether it will answer the same tomorrow."""


class _Same:
    """A tensor as it is now: equal to itself until it is changed."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.tensor is other.tensor and self.version == other.version

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.version))


def _comparable(value: Any) -> Hashable:
    if isinstance(value, Rule):
        structure = value.structure()
        if structure is None:
            raise _NotComparableError
        return structure
    if isinstance(value, Tensor):
        if value.numel() > MAX_COMPARED_NUMBERS or value.is_inference():
            raise _NotComparableError
        return _Same(value)
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str, range)):
        return value
    raise _NotComparableError
