"""Tensors of another library under regard's names, according to a table.

A table maps their names to regard's. A ``*`` matches one part of a dotted name and keeps its value;
``{query,key,value}`` are three tensors concatenated into one along the first axis.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Names = Mapping[str, str]
"""Their names -> regard's names."""

LEFT_OUT = "(left out)"
"""In place of a name: a tensor that regard does not use."""

STORED_MASK = "(stored mask)"
"""In place of a name: a causal mask saved with the weights, with four axes or none."""

LAYOUTS: dict[str, str] = {}
"""What each function reads, for error messages; every layout file adds its own."""


def within(theirs: str, ours: str, names: Names) -> Names:
    """A table with prefixes added to both sides; "(left out)" and "(stored mask)" stay unchanged."""
    return {theirs + name: our if our in (LEFT_OUT, STORED_MASK) else ours + our for name, our in names.items()}


M = TypeVar("M", bound=nn.Module)


class Renamed(dict[str, Tensor]):
    """Tensors of another library under regard's names, ready to fill a layer or a model.

    Looking up a missing name raises the error for a state dict with another layout.

    Args:
        function: the calling function, for error messages.
        names: the table.
        tensors: a state dict, or the part of one that the table is for.
    """

    def __init__(self, function: str, names: Names, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.function, self.names = function, names
        self._source: dict[str, str] = {}
        self._unknown: list[str] = []
        for name, tensor in tensors.items():
            self._add(name, tensor)

    def fill(self, make: Callable[[], M]) -> M:
        """The module that `make` returns, with these tensors as its parameters.

        Raises:
            ValueError: a tensor is missing, unexpected, or has the wrong shape.
        """
        with torch.device("meta"), SkipInit():  # allocates and draws nothing, since all parameters are replaced below
            module = make()
        held = dict(module.named_parameters(remove_duplicate=False))
        missing = [name for name, _ in module.named_parameters() if name not in self]
        superfluous = [self._source.get(name, name) for name in self if name not in held]
        if missing or superfluous or self._unknown:
            self._fail(missing, superfluous)
        copies: dict[int, nn.Parameter] = {}  # by parameter, so that what was shared stays shared
        for name, parameter in held.items():
            if id(parameter) not in copies:
                copies[id(parameter)] = self._copy(name, parameter)
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, copies[id(parameter)])
        return module

    def __missing__(self, name: str) -> NoReturn:
        self._fail([name], [])

    def _add(self, theirs: str, tensor: Tensor) -> None:
        our = next((our for pattern, our in self.names.items() if (stars := match(pattern, theirs)) is not None), None)
        if our == LEFT_OUT or (our == STORED_MASK and tensor.dim() in (0, 4)):
            return
        if our is None or our == STORED_MASK:
            self._unknown.append(theirs)
            return
        if not tensor.is_floating_point():
            raise ValueError(f"{self.function}: {theirs} must be floating point, got {tensor.dtype}; is it quantised?")
        ours = _alternatives(_put(our, stars or ()))
        if tensor.dim() == 0 or tensor.shape[0] % len(ours):
            raise ValueError(
                f"{self.function}: {theirs} must hold {len(ours)} equal parts ({', '.join(ours)}), "
                f"got {list(tensor.shape)}"
            )
        for name, part in zip(ours, tensor.chunk(len(ours)), strict=True):
            if name in self and not torch.equal(self[name], part):
                raise ValueError(
                    f"{self.function}: {theirs} and {self._source[name]} must be equal, for regard ties them"
                )
            self[name], self._source[name] = part, theirs

    def _copy(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        tensor = self[name]
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"{self.function}: {self._source.get(name, name)} must be {list(parameter.shape)} as {name}, "
                f"got {list(tensor.shape)}"
            )
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return nn.Parameter(copy, requires_grad=parameter.requires_grad)

    def _fail(self, missing: list[str], superfluous: list[str]) -> NoReturn:
        lines = [f"{self.function}: these are not the tensors of {LAYOUTS.get(self.function, 'its table')}"]
        for what, names in (
            ("missing   ", [self._theirs(name) for name in missing]),
            ("unexpected", [*self._unknown, *superfluous]),
        ):
            distinct = list(dict.fromkeys(names))
            if distinct:
                more = f" and {len(distinct) - 4} more" if len(distinct) > 4 else ""
                lines.append(f"  {what} {', '.join(distinct[:4])}{more}")
        lines += ["  the layouts are"] + [f"    {function:<17} {what}" for function, what in LAYOUTS.items()]
        raise ValueError("\n".join(lines))

    def _theirs(self, name: str) -> str:
        """The other library's name of a tensor."""
        for pattern, our in self.names.items():
            for alternative in _alternatives(our):
                stars = match(alternative, name)
                if stars is not None:
                    return _put(pattern, stars)
        return name


class SkipInit(TorchFunctionMode):
    """Leaves new parameters uninitialised: drawing them on the meta device would load torch's compiler for seconds."""

    DRAWING = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the stars of a pattern match in a name; None if it does not match."""
    found = re.fullmatch(re.escape(pattern).replace(r"\*", r"([^.]+)"), name)
    return None if found is None else found.groups()


def _put(pattern: str, stars: tuple[str, ...]) -> str:
    for star in stars:
        pattern = pattern.replace("*", star, 1)
    return pattern


def _alternatives(name: str) -> list[str]:
    """ "a.{b,c}.d" -> a.b.d and a.c.d."""
    before, _, rest = name.partition("{")
    inside, _, after = rest.partition("}")
    return [before + one + after for one in inside.split(",")]


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
