"""Telling transformers about ``attn_implementation="regard"``."""

from importlib.metadata import PackageNotFoundError, version
from inspect import signature

from regard.extras import how
from regard.huggingface.explaining import explain
from regard.huggingface.interface import attend, find_collector
from regard.huggingface.reading import mask_for_transformers

NAME = "regard"
"""What to pass as ``attn_implementation``."""


OLDEST_VERSION = (5, 4)
"""The oldest supported version of transformers: earlier ones pass masks differently."""


def register() -> None:
    """Registers ``attn_implementation="regard"`` with transformers; a second call changes nothing.

    Raises:
        ImportError: transformers is missing, or older than 5.4, which passes masks differently; or it is installed but
            cannot be imported, for example because of an incompatible torchvision: then the error names the cause.

    Then ``AutoModel.from_pretrained(name, attn_implementation="regard")``; for a loaded model,
    ``model.set_attn_implementation("regard")``.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
    except Exception as error:  # any package that transformers imports may have raised it
        raise ImportError(_why_not(error)) from error
    if "q_length" not in signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"{_needed()} (there is {_version()})")
    # both under the same key: with a key for attention only, padding and causality would be lost silently
    find_collector()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_for_transformers)
    explain(PreTrainedModel, NAME)


def _needed() -> str:
    return f"regard.huggingface needs transformers, {'.'.join(map(str, OLDEST_VERSION))} or newer: {how('hf')}"


def _version(package: str = "transformers") -> str:
    """The installed version of a package; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _why_not(error: BaseException) -> str:
    """Why transformers cannot be imported: its own error hides the cause."""
    there = _version()
    cause = error
    while (before := cause.__cause__ or cause.__context__) is not None:
        cause = before
    missing = isinstance(cause, ModuleNotFoundError) and (cause.name or "").split(".")[0] == "transformers"
    if not there or missing:
        return f"{_needed()} ({error})"
    if tuple(map(int, there.split(".")[:2])) < OLDEST_VERSION:
        return f"{_needed()} (there is {there})"
    told = (
        f"regard.huggingface: transformers {there} is installed and cannot be imported: {type(cause).__name__}: {cause}"
    )
    guilty = [name for name in ("torchvision", "torchaudio") if name in str(cause)]
    for name in guilty:
        told += (
            f"\n  hint: {name} {_version(name)} does not fit torch {_version('torch')}: install the one that does, or "
            f"remove it (pip uninstall {name})"
        )
    return told
