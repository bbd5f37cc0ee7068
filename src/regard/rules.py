"""The base class of masks and biases: a rule for one query and one key, and data declared once.

A mask decides for every query and key whether attending is allowed; a bias gives a number to add to their score. Either
is a class with one method, with the signature of FlexAttention's ``mask_mod``:

    rule(batch, head, query, key)    index tensors that broadcast against each other -> bools or numbers

Its only data are the arguments of its constructor, stored as attributes of the same names. Tensors among them may
declare their axes. Everything else follows: validation against a call (`bind`), selection of one batch index
(`for_batch`), moving to a device (`to`), comparison (`same`, `structure`), serialisation (`serialise`, `deserialise`).

    class EveryBlock(Mask):
        \"\"\"Keys in every k-th block of n.\"\"\"

        def __init__(self, n, k):
            self.n, self.k = n, k

        def rule(self, batch, head, query, key):
            return key // self.n % self.k == 0
"""

import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from types import FunctionType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from regard.functions import captured
from regard.indexing import Indices, indices, lookup
from regard.shapes import Grid, Offset, ShapeError, check_offset
from regard.versions import MAX_HELD_BYTES, NotComparableError, equal, few_or_version, is_few, is_wrapped, version

RULE_KINDS: "dict[str, type[Rule]]" = {}
"""Every kind of mask and bias by its serialised name: the class name for regard's own, with the module for others."""


class Rule:
    """A mask or a bias: a function of one query and one key.

    Attributes:
        fields: the names of its arguments; each is an attribute too. optional: those that have a default.
        axes: the axes of the tensors among them: "batch", "heads", "query_len", "key_len", or any other name for an
            axis that is none of these. A size of 1 broadcasts.
        kind: its serialised name.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[frozenset[str]] = frozenset()
    axes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    kind: ClassVar[str]

    # set by `bind`: numbers of batch indices and heads of the call; by `for_batch`: the batch index that becomes 0
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
            cls.optional = frozenset(p.name for p in parameters if p.default is not Parameter.empty)
        for name in cls.fields:
            if callable(getattr(cls, name, None)):
                raise TypeError(
                    f"{cls.__name__}: an argument cannot be called {name!r}, which is a method of every mask"
                )
        own = cls.__module__.partition(".")[0] == "regard"
        cls.kind = cls.__name__ if own else f"{cls.__module__}:{cls.__qualname__}"
        RULE_KINDS[cls.kind] = cls

    def rule(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Its value for each query and key. The arguments are index tensors that broadcast against each other.

        Called with the index tensors of a rectangle, or by FlexAttention with single numbers.
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
        """For one call: data validated, parts bound, numbers of batch indices and heads set."""
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
            elif isinstance(part, list):  # the caller may modify it
                changed[name] = _map(part, lambda tensor: tensor)
        return self._with(_batch=grid.batch, _heads=grid.heads, _device=grid.device, **changed)

    def bind(self, grid: Grid) -> Any:
        """This mask or bias for one call: data validated, default offset fixed, and simplified where that is free.

        Raises:
            ShapeError: its data is for another batch size, number of heads or length.
            ValueError: its data is on another device.
        """
        return self._bound(grid)

    def ask(self, queries: Indices, keys: Indices) -> Tensor:
        """The values of `rule` for a rectangle, with axes for batch and heads in front."""
        query, key = indices(queries, self._device)[:, None], indices(keys, self._device)[None, :]
        device = query.device
        batch_size = self._size("batch") if self._batch is None else self._batch
        heads = self._size("heads") if self._heads is None else self._heads
        batch = torch.arange(self._first_batch, self._first_batch + batch_size, device=device)[:, None, None, None]
        head = torch.arange(heads, device=device)[None, :, None, None]
        said = self.rule(batch, head, query, key)
        return said.reshape((1,) * (4 - said.dim()) + said.shape) if said.dim() < 4 else said

    def _size(self, axis: str) -> int:
        """The size of an axis, inferred from its data: used before it is bound to a call."""
        sizes = [part._size(axis) for part in self.parts()]
        for name, axes in self.axes.items():
            data = getattr(self, name)
            if isinstance(data, Tensor) and axis in axes[: data.dim()]:
                sizes.append(data.shape[axes.index(axis)])
        return next((size for size in sizes if size != 1), 1)

    def _called(self, name: str) -> str:
        """The name of a field in errors."""
        return f"{type(self).__name__}: {name}"

    def _hint(self, name: str) -> str:
        """A hint for the error about a field that does not fit a call."""
        return ""

    @property
    def varies_by_batch(self) -> bool:
        """Whether its data differs between batch indices."""
        for name, axes in self.axes.items():
            data = getattr(self, name)
            if axes[0] == "batch" and isinstance(data, Tensor) and data.dim() and data.shape[0] > 1:
                return True
        return any(part.varies_by_batch for part in self.parts())

    def for_batch(self, index: int) -> Any:
        """The mask or bias of one batch index, for a call with batch=1. Bind it before use."""

        def at_index(name: str, value: Any) -> Any:
            if isinstance(value, Rule):
                return value.for_batch(index)
            if isinstance(value, (list, tuple)):
                return [at_index(name, part) for part in value]
            axes = self.axes.get(name, ())
            if axes[:1] != ("batch",) or not isinstance(value, Tensor):
                return value
            if value.dim() and value.shape[0] > 1:
                value = value[index : index + 1]
            return int(value) if axes == ("batch",) else value

        made = self._again({name: at_index(name, value) for name, value in self.arguments().items()})
        return made._with(_batch=1, _heads=self._heads, _first_batch=self._first_batch + index)

    # --- as data ----------------------------------------------------------------------------------------------------

    def parts(self) -> "Iterator[Rule]":
        """The masks and biases it is composed of."""
        for name in self.fields:
            yield from _rules_in(getattr(self, name, None))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy with every tensor changed, including those of its parts."""
        arguments = self.arguments()
        changed = {name: _map(value, change) for name, value in arguments.items()}
        if all(changed[name] is arguments[name] for name in arguments):
            return self
        return self._again(changed)._with(_batch=self._batch, _heads=self._heads, _first_batch=self._first_batch)

    def to(self, device: torch.device | str) -> Self:
        """A copy with its data on another device."""
        return self.map_tensors(lambda tensor: tensor.to(device))

    def structure(self) -> Hashable | None:
        """A key that is equal for masks or biases that are always equal: their kind, numbers, parts and tensors.

        None if they cannot be compared: functions may change their results (but see `regard.functions`), inference
        tensors and parameters may change unnoticed, and what learns changes at every step.
        """
        try:  # for every call of attention: without a dict of the arguments
            return structure_of((type(self), self._first_batch), map(self.__getattribute__, self.fields), version)
        except AttributeError:
            self.arguments()  # says what is missing
            raise

    @property
    def of_positions(self) -> bool:
        """Whether it depends only on the positions of query and key, counted from the last of both."""
        return False

    def _again(self, arguments: Mapping[str, Any]) -> Self:
        """A new one with other arguments."""
        return type(self)(**arguments)

    def _with(self, **attributes: Any) -> Self:
        """A copy with some attributes changed from which nothing else is derived."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **attributes)
        return made


class Positioned(Rule):
    """A mask or bias that compares positions: query i has position ``i + offset``, key j position j.

    Args:
        offset: position of query 0; default ``key_len - query_len``, fixed when it is bound to a call.
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
        """Positions of queries; per batch index if each has its own offset."""
        if isinstance(self.offset, Tensor) and self.offset.dim():
            return query + lookup(self.offset, batch)
        return query if self.offset is None else query + self.offset  # torch.jit.trace has lengths in tensors


def check_data(owner: Rule, name: str, data: Tensor, axes: Sequence[str], grid: Grid) -> None:
    """Data must fit the call: every axis has the call's size or 1, and per-token data is on its device."""
    fits, per_token = True, False
    for size, axis in zip(data.shape, axes):  # noqa: B905  (lengths [batch] and cells [batch, key_len] share a field)
        if axis in _OF_A_CALL:
            # data with one axis must match exactly; with several, an axis of size 1 broadcasts
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
    """Whether two masks, biases, tensors or numbers are equal; functions are compared by identity."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        return equal(one, other)
    if isinstance(one, Rule) and type(one) is type(other):
        mine, others = one.arguments(), other.arguments()
        return all(same(mine[name], others[name]) for name in mine)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def is_data(value: Any) -> bool:
    """Whether it consists of numbers and tensors only, so that it can be serialised."""
    if isinstance(value, Rule):
        return RULE_KINDS.get(value.kind) is type(value) and all(is_data(part) for part in value.arguments().values())
    if isinstance(value, (list, tuple)):
        return all(is_data(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def kind_called(name: str) -> "type[Rule]":
    """The class of masks or biases with a serialised name.

    Raises:
        ValueError: there is none; the module that defines a custom class has to be imported before reading it.
    """
    if name not in RULE_KINDS:
        module, own, _ = name.partition(":")
        hint = f"; import {module}, which defines it, first" if own else ""
        raise ValueError(f"there is no mask or bias {name!r}{hint}")
    return RULE_KINDS[name]


def serialise(rule: Rule, tensors: list[Tensor], numbers: list[int] | None = None) -> str | None:
    """A mask as a line of JSON; its tensors are appended to the list. None for a mask with a function, and for one of
    one's own that was taken out of a batch, where its rule may ask which it is, or of a class that is no longer known.

    With `numbers`, integers are appended there instead of being written: in a graph for any length they are symbolic.

    >>> from regard import Causal, Window
    >>> serialise(Causal() & ~Window(3), [])
    '["And",["Causal",null],["Not",["Window",3,null]]]'
    """
    written = [_serialised(value, tensors, numbers) for value in rule.arguments().values()]
    if None in written or (":" in rule.kind and (rule._first_batch or RULE_KINDS[rule.kind] is not type(rule))):
        return None
    return f'["{rule.kind}"{"".join(f",{part}" for part in written)}]'


def _serialised(value: Any, tensors: list[Tensor], numbers: list[int] | None) -> str | None:
    if isinstance(value, Rule):
        return serialise(value, tensors, numbers)
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
        parts = [_serialised(part, tensors, numbers) for part in value]
        return None if None in parts else f'{{"list":[{",".join(map(str, parts))}]}}'
    return None


def deserialise(line: str, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> Any:
    """The mask that `serialise` wrote."""

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
    """The tensors in a bias that may need a gradient: floating tensors and parameters of modules, at any depth."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Rule):
        for part in vars(value).values():
            if type(part) not in _SIMPLE:  # torch takes time to tell that something is no tensor
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


def structure_of(
    first: tuple[Any, ...], values: Iterable[Any], of_tensor: Callable[[Tensor], Hashable] = few_or_version
) -> Hashable | None:
    """These first parts and a key for each value; None if one of them cannot be compared."""
    found = [*first]
    try:
        for value in values:  # for every call of attention: common types first
            found.append(value if value is None or type(value) is int else _comparable(value, of_tensor))
    except NotComparableError:
        return None
    return tuple(found)


def contents(value: Any) -> Hashable | None:
    """A key that is equal for numbers, tensors, biases and lists of them whose contents are; None as for `structure`.

    Few floating numbers are compared themselves: what learns at times is often written to through ``.data``, of which
    no version is counted, and slopes may be made anew for each call.
    """
    try:
        return _comparable(value, few_or_version)
    except NotComparableError:
        return None


def known(value: Any) -> Hashable | None:
    """The same, but leaves of autograd's graph that learn are known as themselves: their numbers may be any."""
    found = contents(value)
    if found is not None or not torch.is_grad_enabled():
        return found
    if isinstance(value, Tensor):
        leaf = value if value._base is None else value._base
        if leaf.grad_fn is not None or not value.requires_grad or value.is_inference() or is_wrapped(value):
            return None
        # where it lies in memory: `leaf.data = other` leaves views of what was there behind
        return "learns", id(leaf), value.data_ptr(), value.dtype, value.shape, value.stride(), leaf
    if isinstance(value, Rule):
        parts = tuple((name, known(part)) for name, part in vars(value).items())
        return None if any(part is None for _, part in parts) else ("learns", type(value), parts)
    return None


def settled(value: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """A copy with few numbers of its own, into which nobody writes, that does not keep the original's tensors alive;
    itself if there are none. copies: by the id of the original."""
    copies = {} if copies is None else copies
    if isinstance(value, Rule):
        parts = {name: settled(part, copies) for name, part in vars(value).items()}
        return value._with(**parts) if copies else value
    if isinstance(value, (list, tuple)):
        return type(value)(settled(part, copies) for part in value)
    if not isinstance(value, Tensor) or (value.requires_grad and torch.is_grad_enabled()):
        return value
    with torch.inference_mode(False):  # since autograd cannot save inference tensors
        return copies.setdefault(id(value), value.detach().clone() if is_few(value) else value.detach())


_SIMPLE = frozenset({type(None), bool, int, float, str, range, torch.device})


def _comparable(value: Any, of_tensor: Callable[[Tensor], Hashable]) -> Hashable:
    kind = type(value)
    if kind in _SIMPLE:  # first, as above
        return kind, value  # True, 1 and 1.0 are equal, but not the same
    if isinstance(value, Rule):
        if (structure := value.structure()) is None:
            raise NotComparableError
        return structure
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(part, of_tensor) for part in value)
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, (int, float, str, type)):
        return kind, value
    raise NotComparableError


def _function(function: FunctionType) -> Hashable:
    """Equal for functions with equal code and the same values in it, which are numbers, tensors and such functions."""
    values = captured(function)
    if values is None:
        raise NotComparableError
    code, dtype, *rest = values
    try:
        return code, dtype, *(_in_function(value) for value in rest)
    except RecursionError:  # it calls itself
        raise NotComparableError from None


def _in_function(value: Any) -> Hashable:
    if type(value) is Tensor:
        if value.is_inference() or value.untyped_storage().nbytes() > MAX_HELD_BYTES:
            raise NotComparableError  # others may write to it unnoticed; or the function would keep much alive
        return version(value)
    if value is None or type(value) in (bool, int, float, FunctionType):
        return _comparable(value, version)
    raise NotComparableError
