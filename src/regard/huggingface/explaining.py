"""Explains the error for models of transformers that do not support the attention interface.

Most models look up their attention in transformers' interface. Some choose a class from their own table when they are
constructed, and an unknown name ends in a bare KeyError. Here that error becomes a message: which part of the model it
is, which names its table has, and how to load the model with regard for the other parts.
"""

from collections.abc import Iterator
from functools import wraps
from types import FrameType, TracebackType
from typing import Any, cast

CONSTRUCTORS = "from_pretrained", "_from_config"
"""The class methods that create a model."""


class NotOnInterfaceError(ValueError):
    """A model, or a part of one, that chooses its attention from its own table."""


def explain(models: Any, name: str) -> None:
    """Patches the constructors, once, so that an unknown attention name raises an error with the right argument."""
    for way in CONSTRUCTORS:
        plain = vars(models)[way].__func__
        if not hasattr(plain, "__regard__"):
            setattr(models, way, classmethod(_explained(plain, name)))


def _explained(make: Any, name: str) -> Any:
    @wraps(make)
    def made(cls: Any, *arguments: Any, **more: Any) -> Any:
        try:
            return make(cls, *arguments, **more)
        except NotOnInterfaceError as error:  # raised by a part, which does not know the whole model
            cause = cast(KeyError, error.__cause__)
            frames = [*_frames(error.__traceback__), *_frames(cause.__traceback__)]
        except KeyError as error:
            if error.args != (name,):
                raise
            cause, frames = error, list(_frames(error.__traceback__))
        raise NotOnInterfaceError(_instead(cls, frames, name)) from cause

    vars(made)["__regard__"] = name
    return made


def _instead(model: type, frames: list[FrameType], name: str) -> str:
    """The error message."""
    table = _table(frames[-1])
    configs = [config for frame in frames if (config := _config(frame)) is not None]
    whole, part = (configs[0], configs[-1]) if configs else (None, None)
    chosen = "eager" if "eager" in table or not table else table[0]
    path = _path(whole, part)
    who = model.__name__ if part is None else type(part).__name__.removesuffix("Config")
    told = (
        f"regard: {who} takes its attention from a table of its own, which has {', '.join(table) or 'no regard'}: it "
        "is not on transformers' attention interface. "
    )
    if not path:
        return f'{told}Load {model.__name__} with attn_implementation="{chosen}"; regard cannot record it'
    instead = f'attn_implementation={{"": "{name}", "{path}": "{chosen}"}}'
    return f"{told}Write {instead}; the rest of {model.__name__} is under regard then"


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _table(frame: FrameType) -> list[str]:
    """The names in the table that a module of transformers chooses from."""
    for value in frame.f_globals.values():
        if isinstance(value, dict) and "eager" in value and all(isinstance(one, type) for one in value.values()):
            return list(map(str, value))
    return []


def _config(frame: FrameType) -> Any:
    config = frame.f_locals.get("config")
    return config if hasattr(config, "_attn_implementation") else None


def _path(whole: Any, part: Any) -> str:
    """The name of a part in the whole configuration; empty if it is the whole."""
    if whole is None or part is whole:
        return ""
    for name in cast("dict[str, Any]", getattr(whole, "sub_configs", {})):
        inner = getattr(whole, name, None)
        if inner is not None and (inner is part or type(inner) is type(part) or _path(inner, part)):
            return str(name)
    return ""
