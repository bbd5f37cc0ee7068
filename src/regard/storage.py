"""Atomic file writes, and tensors in the safetensors format, written straight from memory.

    8 bytes     the length of the header
    JSON        for each tensor its dtype, shape and place; under "__metadata__" the caller's strings
    bytes       the tensors, wider dtypes first, so that each starts at a multiple of its element size

safetensors reads these files. They are written here because its writer needs numpy, which the core does not require.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of dtypes."""


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, begin: int = 8) -> None:
    """Writes tensors and strings atomically: to a temporary file beside `path`, which then replaces it.

    Args:
        begin: bytes; the first tensor begins at a multiple of it.

    Raises:
        TypeError: a tensor's dtype is not one of `DTYPE_NAMES`.
        OSError: no space or no permission; an existing file is unchanged.

    >>> from safetensors import safe_open
    >>> save(Path("two.safetensors"), {"a": torch.arange(3), "b": torch.eye(2)}, {"made by": "hand"})
    >>> with safe_open("two.safetensors", "pt") as file:
    ...     print(file.metadata(), file.get_tensor("a"))
    {'made by': 'hand'} tensor([0, 1, 2])
    >>> Path("two.safetensors").unlink()
    """
    if sys.byteorder != "little":
        raise NotImplementedError("storage: the format is little-endian, and this machine is not")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"storage: {name} is of {tensor.dtype}; there are {', '.join(map(str, DTYPE_NAMES))}")
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))
    with replacing(path) as new, new.open("wb") as file:
        file.write(_head(ordered, metadata, begin))
        for tensor in ordered.values():
            _put(tensor, file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write to; after the block, the file is synced to disk and replaces `path`.

    Raises:
        OSError: no space or no permission; an existing file is unchanged.
    """
    beside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield beside
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> OSError:
    """An error that names the file that could not be written."""
    kept = "; what was there before is whole" if path.exists() else ""
    return OSError(f"{path}: cannot be written: {error.strerror or error}{kept}")


def _head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], begin: int) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % begin)
    return len(text).to_bytes(8, "little") + text


def _put(tensor: Tensor, file: BinaryIO) -> None:
    """Writes a tensor's bytes, without a copy if it is contiguous on the CPU."""
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    if size:
        file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))
