"""Stands around every attention layer of a model while it runs: where recordings and interventions come in."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

from torch import Tensor, nn

from regard.layers import Attend, Heads, MultiHeadAttention, ScoringArguments, Watcher

T = TypeVar("T")


class Place(NamedTuple):
    """A layer that calls: its name, its number in the order of first calls, and whether it is regard's own."""

    name: str
    number: int
    settled: bool


@contextmanager
def watching(
    function: str,
    model: nn.Module,
    layers: str | int | Iterable[str | int] | None,
    watch: Callable[[Place, Heads, ScoringArguments, Attend, Watcher], Tensor],
) -> Iterator[None]:
    """Stands around attention layers of a model, before whatever stood there already (given as `before`).

    Args:
        layers: names, or numbers in the order of the layers' first calls; None: all of them.
    Raises:
        ValueError: one of `layers` does not exist, or no layer ever called.
    """
    wanted = {layers} if isinstance(layers, (str, int)) else set(layers or ())
    own = {
        name.removesuffix(".attention") or "attention": module
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    }
    modules: dict[str, nn.Module] = {**own} or {name or "attention": module for name, module in model.named_modules()}
    if not own:
        _check_implementation(function, model)
    unknown = sorted(name for name in wanted if isinstance(name, str) and name not in modules)
    unknown += [str(n) for n in wanted if isinstance(n, int) and (n < 0 or (own and n >= len(own)))]
    if unknown:
        some = list(modules)[:16] if own else ["the names of its modules, as in named_modules()"]
        more = ", ..." if own and len(own) > 16 else ""
        raise ValueError(f"{function}: no layer {', '.join(unknown)}; there are: {', '.join(some)}{more}")
    called: dict[str, int] = {}
    before: dict[str, Watcher | None] = {name: vars(layer).get("watcher") for name, layer in modules.items()}

    def around(name: str, heads: Heads, scoring: ScoringArguments, attend: Attend) -> Tensor:
        place = Place(name, called.setdefault(name, len(called)), name in own)
        inside = before[name] or _only_attend
        if layers is not None and place.name not in wanted and place.number not in wanted:
            return inside(heads, scoring, attend)
        return watch(place, heads, scoring, attend, inside)

    for name, layer in modules.items():
        layer.watcher = partial(around, name)  # type: ignore[assignment]
    try:
        yield
    finally:
        for name, layer in modules.items():
            if name in own or before[name] is not None:
                layer.watcher = before[name]  # type: ignore[assignment]
            else:
                del layer.watcher
    if not own and not called:
        raise ValueError(
            f"{function}: no attention of {type(model).__name__} went through regard. It contains no "
            "regard.MultiHeadAttention; a model of transformers needs regard.huggingface.register() and then "
            'attn_implementation="regard", and has to run inside the with block'
        )
    missing = [str(n) for n in wanted if n not in called and n not in called.values()]
    if called and missing:
        raise ValueError(f"{function}: layer {', '.join(missing)} never attended; those that did: {', '.join(called)}")


def find(function: str, done: str, layers: Mapping[str, T], name: str | int) -> T:
    """What is known of a layer, by its name or its number; `done` is how it came to be known."""
    if isinstance(name, int) and -len(layers) <= name < len(layers):
        name = list(layers)[name]
    try:
        return layers[name]  # type: ignore[index]
    except (KeyError, TypeError):
        known = ", ".join(layers) or "none: has the model run inside the with block?"
        raise KeyError(f"{function}: no layer {name!r}; {done} are: {known}") from None


def _only_attend(heads: Heads, scoring: ScoringArguments, attend: Attend) -> Tensor:
    return attend(heads, scoring)


def _check_implementation(function: str, model: nn.Module) -> None:
    """A model of transformers that attends in another way is refused before it runs."""
    chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(chosen, str) and chosen != "regard":
        raise ValueError(
            f"{function}: {type(model).__name__} attends by {chosen!r}, which nobody can look into; call "
            'regard.huggingface.register() and load it with attn_implementation="regard", or '
            'model.set_attn_implementation("regard")'
        )
