"""What the processor and torch's libraries are able to do, as far as they report it."""

import os
import platform
import re
from functools import cache

import torch

MKL = torch.backends.mkl.is_available()
"""Whether torch uses Intel MKL for float32 products; all measurements were made with it."""

_ABLE = torch.cpu.get_capabilities()

_LEVELS = {"avx512_bf16": ("bf16", "fp16", "avx10", "amx"), "avx512_fp16": ("fp16", "avx10", "amx")}
"""What oneDNN calls the levels that include an instruction; those of AMX have it in their names."""


def _uses(*instructions: str) -> bool:
    """Whether torch uses any of these instructions: oneDNN, which multiplies half precision, can be told to leave out
    the later ones, to try what a processor without them would do."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").lower()
    if most not in ("", "default", "all"):
        instructions = tuple(one for one in instructions if any(w in most for w in _LEVELS.get(one, ("amx",))))
    return any(_ABLE.get(name) for name in instructions)


FLOAT16 = _uses("avx512_fp16", "amx_fp16")
BFLOAT16 = _uses("avx512_bf16", "amx_bf16")
"""Whether it has instructions for products in this dtype, which are then faster than in float32."""
ARM_BFLOAT16 = _uses("bf16")
"""The same of a processor of Arm's, by what our own library multiplies; what torch does there was not measured."""
AMX = _uses("amx_tile")
"""Whether it has AMX tile instructions for bfloat16; torch then uses a different fused operator."""


def name() -> str:
    """What the processor calls itself."""
    return _told("model name") or platform.processor() or platform.machine()


def model() -> str:
    """Its name, with the numbers of its family and model, or of its maker and part on Arm, and the instructions that
    torch uses: those who rent out machines give many processors one name, and hide instructions of some."""
    kinds = "cpu family", "model", "CPU implementer", "CPU part"
    numbers = (f"{what} {found}" for what in kinds if (found := _told(what)))
    return ", ".join([name(), *numbers, torch.backends.cpu.get_cpu_capability(), *["AMX"] * AMX])


def _told(what: str) -> str | None:
    """What Linux says of the processor."""
    found = re.search(rf"^{what}\s*:\s*(.+)", _cpuinfo(), re.MULTILINE)
    return found[1].strip() if found else None


@cache
def _cpuinfo() -> str:
    """All that Linux says, read once: of a hundred cores it takes milliseconds to put together."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
