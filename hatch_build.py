"""Compiles src/regard/kernels/strips/c when regard is installed or built: once for each set of vector
instructions and dtype, in a few seconds. Where there is no compiler, or another processor or system, nothing is
compiled, and regard computes everything by torch's operators. The build says so in a line, which pip shows with -v; so
does `regard.plan`, of every call.

CC names the compiler, as for make: cc by default, of GCC 12 or Clang 15 on.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/regard/kernels/strips/c/attention.c")
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno"]
OLDEST_MACOS = "11.0"  # the first one of Macs with processors of Apple's
FOR_MACOS = ["-arch", "arm64", f"-mmacosx-version-min={OLDEST_MACOS}"]
INSTRUCTIONS = {  # of a system and a machine, with the flags for each; kernels/strips/binding.py chooses
    ("linux", "x86_64"): {
        "x86-64-v4": ["-march=x86-64-v4", "-mprefer-vector-width=512"],  # AVX-512
        "x86-64-v3": ["-march=x86-64-v3"],  # AVX2
    },
    ("linux", "aarch64"): {
        "armv8-a": ["-march=armv8-a"],  # NEON
        "armv8-a+bf16": ["-march=armv8.2-a+bf16"],
    },
    ("darwin", "arm64"): {
        "armv8-a": FOR_MACOS,
        "armv8-a+bf16": [*FOR_MACOS, "-march=armv8.2-a+bf16"],
    },
}
DTYPES = ("float32", "float64")


class Compile(BuildHookInterface):
    """The hook that hatchling calls before it builds a wheel, or installs one that refers to this folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles, and tells hatchling what belongs to the wheel."""
        if self.target_name != "wheel":
            return
        why = compile_all(Path(self.root))
        if why is not None:
            self.app.display_warning(f"regard: the faster kernel is not compiled: {why}; torch's operators do its work")
            return
        build_data["artifacts"].append(f"{SOURCE.parent}/*.so.1")
        build_data["pure_python"] = False
        # no part of Python's own interface is used, so one wheel serves every version
        build_data["tag"] = f"py3-none-{_platform()}"


def _platform() -> str:
    """The one that a wheel is for. Python's own name for it may be that of two processors."""
    name = f"macosx-{OLDEST_MACOS}-{platform.machine()}" if sys.platform == "darwin" else sysconfig.get_platform()
    return name.replace("-", "_").replace(".", "_")


def compile_all(root: Path) -> str | None:
    """Compiles all variants, beside the source; returns why it could not, or None."""
    variants = INSTRUCTIONS.get((sys.platform, platform.machine()))
    if variants is None:
        known = ", ".join(f"{system} on {machine}" for system, machine in INSTRUCTIONS)
        return f"it is written for {known}, not for {sys.platform} on {platform.machine()}"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        return f"no C compiler ({compiler[0]})"
    source, made = root / SOURCE, []
    for instructions, flags in variants.items():
        for dtype in DTYPES:
            # not .so alone, which Python takes for modules of its own
            path = source.with_name(f"attention-{instructions}-{dtype}.so.1")
            beside = path.with_suffix(f".{os.getpid()}")  # moved there when whole: another process may be reading it
            command = [
                *compiler,
                *FLAGS,
                *flags,
                f"-D{dtype.upper()}",
                str(source),
                "-o",
                str(beside),
            ]
            done = subprocess.run([*command, "-lm", "-lpthread"], capture_output=True, text=True)
            if done.returncode:
                beside.unlink(missing_ok=True)
                return f"{shlex.join(compiler)} failed: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
            made.append((beside, path))
    for beside, path in made:
        beside.replace(path)
    return None


if __name__ == "__main__":
    sys.exit(compile_all(Path(__file__).parent))
