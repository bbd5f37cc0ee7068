"""Finds the attention layers of a model, by name, and installs hooks around them while it runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from torch import nn

from regard.hooks import Attend, hooked
from regard.layers import MultiHeadAttention

T = TypeVar("T")

WRAPPER_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes in which torch.compile, FSDP and checkpoint wrappers keep the wrapped module."""


class Place(NamedTuple):
    """A calling layer: its name, its number in the order of first calls, whether it is regard's own, and the module."""

    name: str
    number: int
    settled: bool
    layer: nn.Module


@contextmanager
def watching(
    function: str,
    model: nn.Module,
    layers: str | int | Iterable[str | int] | None,
    hook: Callable[[Place, Attend], Attend],
    *,
    again: Callable[[Place, Attend], Attend] | None = None,
    innermost: bool = False,
) -> Iterator[None]:
    """Installs a hook around attention layers of a model (see `regard.hooks`).

    Args:
        model: as `record` takes it; see `unwrapped`.
        layers: names, or numbers in the order of the layers' first calls; None: all of them.
    Raises:
        TypeError: no model.
        ValueError: one of `layers` does not exist, or no layer ever called, or all of them in another thread.
    """
    model = checked(function, model)
    wanted = {layers} if isinstance(layers, (str, int)) else set(layers or ())
    modules, own = layers_of(model)
    if not own:
        _check_implementation(function, model)
    unknown = sorted(name for name in wanted if isinstance(name, str) and name not in modules)
    unknown += [str(n) for n in wanted if isinstance(n, int) and (n < 0 or (own and n >= len(modules)))]
    if unknown:
        some = list(modules)[:16] if own else ["the names of its modules, as in named_modules()"]
        more = ", ..." if own and len(modules) > 16 else ""
        raise ValueError(f"{function}: no layer {', '.join(unknown)}; there are: {', '.join(some)}{more}")
    names = {id(module): name for name, module in modules.items()}
    called: dict[str, int] = {}

    def around(layer: nn.Module, attend: Attend, hook: Callable[[Place, Attend], Attend]) -> Attend:
        name = names[id(layer)]
        place = Place(name, called.setdefault(name, len(called)), own, layer)
        chosen = layers is None or place.name in wanted or place.number in wanted
        return hook(place, attend) if chosen else attend

    with hooked(
        modules.values(),
        lambda layer, attend: around(layer, attend, hook),
        again=None if again is None else lambda layer, attend: around(layer, attend, again),
        innermost=innermost,
    ) as block:
        yield
    if block.elsewhere and not called:
        raise ValueError(
            f"{function}: the attention layers of {type(model).__name__} ran in another thread than the with block, "
            "which applies to its own thread only; open the block in the thread that runs the model, or start that "
            "thread with contextvars.copy_context().run"
        )
    if not own and not called:
        raise ValueError(f"{function}: no attention of {type(model).__name__} went through regard. {_why_none(model)}")
    missing = [str(n) for n in wanted if n not in called and n not in called.values()]
    if called and missing:
        raise ValueError(f"{function}: layer {', '.join(missing)} never attended; those that did: {', '.join(called)}")


def layers_of(model: nn.Module) -> tuple[dict[str, nn.Module], bool]:
    """The modules that may call attention, by name, and whether they are regard's own layers; else they are all."""
    every = named(model)
    own: dict[str, nn.Module] = {
        name.removesuffix(".attention") or "attention": module
        for name, module in every.items()
        if isinstance(module, MultiHeadAttention)
    }
    return own or {name or "attention": module for name, module in every.items()}, bool(own)


def checked(function: str, model: object) -> nn.Module:
    """The model inside its wrappers; raises if it is not a model, or runs copies of one."""
    if not isinstance(model, nn.Module):
        inside = getattr(model, "model", None)
        hint = ", pass its .model" if isinstance(inside, nn.Module) else ""
        raise TypeError(f"{function}: expected a model, a torch.nn.Module, got {type(model).__name__}{hint}")
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise ValueError(
            f"{function}: DataParallel runs copies of the model in threads of their own; use its .module, or "
            "DistributedDataParallel"
        )
    return unwrapped(model)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile, DataParallel, DistributedDataParallel, FSDP, a checkpoint wrapper or peft; the
    module itself if it is not wrapped."""
    while True:
        inside = next((module._modules[name] for name in WRAPPER_ATTRIBUTES if name in module._modules), None)
        if inside is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inside = module.module
        if inside is None and callable(getattr(type(module), "get_base_model", None)):
            inside = module.get_base_model()  # type: ignore[operator]
        if inside is None or inside is module:
            return module
        module = inside


def named(model: nn.Module) -> dict[str, nn.Module]:
    """A model's modules by name, as in `named_modules` but without wrappers at any level."""
    found: dict[str, nn.Module] = {}
    known: set[int] = set()

    def walk(name: str, module: nn.Module) -> None:
        module = unwrapped(module)
        if id(module) in known:
            return
        known.add(id(module))
        found[name] = module
        for part, child in module._modules.items():
            if child is not None:
                walk(f"{name}.{part}" if name else part, child)

    walk("", model)
    return found


def find(function: str, done: str, layers: Mapping[str, T], name: str | int) -> T:
    """The entry of a layer, by name or number; `done` is a verb for the error message."""
    if isinstance(name, int) and -len(layers) <= name < len(layers):
        name = list(layers)[name]
    try:
        return layers[name]  # type: ignore[index]
    except (KeyError, TypeError):
        known = ", ".join(layers) or "none: has the model run inside the with block?"
        raise KeyError(f"{function}: no layer {name!r}; {done} are: {known}") from None


def _why_none(model: nn.Module) -> str:
    if _implementation(model) == "regard" and not _chooses(model):
        return (
            'It was loaded with attn_implementation="regard" but computes its attention itself: it does not use '
            "transformers' attention interface, so regard cannot record it"
        )
    return (
        "It contains no regard.MultiHeadAttention; a model of transformers needs regard.huggingface.register() and "
        'then attn_implementation="regard", and has to run inside the with block'
    )


def _implementation(model: nn.Module) -> object:
    """The attention implementation that a model of transformers is set to."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


def _chooses(model: nn.Module) -> bool:
    """Whether transformers declares that the model, or one inside it, supports the attention interface; True if it
    declares nothing."""
    asked = [getattr(type(part), "_can_set_attn_implementation", None) for part in model.modules()]
    known = [can() for can in asked if can is not None]
    return not known or any(known)


def _check_implementation(function: str, model: nn.Module) -> None:
    """Raises for a model of transformers with another attention implementation, before it runs."""
    chosen = _implementation(model)
    if isinstance(chosen, str) and chosen != "regard" and not _chooses(model):
        raise ValueError(
            f"{function}: {type(model).__name__} computes its attention itself, whatever attn_implementation says: it "
            "does not use transformers' attention interface, so regard cannot record it"
        )
    if isinstance(chosen, str) and chosen != "regard":
        raise ValueError(
            f"{function}: {type(model).__name__} uses attn_implementation={chosen!r}, which regard cannot record; call "
            'regard.huggingface.register() and load it with attn_implementation="regard", or '
            'model.set_attn_implementation("regard")'
        )
