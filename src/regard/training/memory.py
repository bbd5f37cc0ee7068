"""A lower bound on the memory that training needs, to refuse impossible sizes before any work.

    weights, gradients, the optimizers' averages     3 float32 numbers for each parameter
    what the backward pass reads again               per token and layer 6 * dim + 3 * hidden_dim numbers of bfloat16
    logits and their gradient                        per token 2 float32 numbers for each entry of the vocabulary

An actual step takes more: what is refused could not have run, but what is accepted may still run out of memory.
"""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from regard.configuration import ModelConfig
from regard.models import Decoder


def check_memory(
    config: ModelConfig,
    batch_size: int,
    usual: Mapping[str, int],
    make: Callable[[ModelConfig], nn.Module] = Decoder,
    shares: int = 1,
) -> None:
    """Checks that a training step can fit into the memory of this machine.

    Args:
        usual: sizes by name, as they are where nobody asks for others.
        make: makes the model from its configuration.
        shares: processes to which the tokens of each row are dealt out.
    Raises:
        ValueError: it needs more memory than there is; names the size that is farthest from what is usual.
    """
    room, wanted = available_memory(), needed_memory(config, batch_size, make, shares)
    if room is None or wanted <= room:
        return
    asked = {**config.to_dict(), "batch_size": batch_size}
    most = max(usual, key=lambda name: asked[name] / usual[name])
    raise ValueError(
        f"--{most.replace('_', '-')}: {asked[most]:,} is too much for this machine: a step takes {_in_words(wanted)} "
        f"of memory or more, {_in_words(room)} is available; usual is {usual[most]:,}"
    )


def needed_memory(
    config: ModelConfig, batch_size: int, make: Callable[[ModelConfig], nn.Module] = Decoder, shares: int = 1
) -> int:
    """Bytes that a training step takes at the least."""
    one, two = (_parameters(replace(config, layers=layers), make) for layers in (1, 2))
    parameters = one + (config.layers - 1) * (two - one)
    return 12 * parameters + activations(config, batch_size * config.context_length // shares)


def activations(config: ModelConfig, tokens: int) -> int:
    """Bytes that a step keeps for its backward pass at the least."""
    in_layers = 2 * config.layers * (6 * config.dim + 3 * (config.hidden_dim or 4 * config.dim))
    return tokens * (in_layers + 8 * config.vocab_size)


def available_memory() -> int | None:
    """Bytes that this process may still take, by machine, container and its own limit; None where nothing tells."""
    rooms = [room for room in (_of_machine(), _of_container(), _of_process()) if room is not None]
    return min(rooms, default=None)


def _parameters(config: ModelConfig, make: Callable[[ModelConfig], nn.Module]) -> int:
    with torch.device("meta"):  # shapes without memory
        return sum(parameter.numel() for parameter in make(config).parameters())


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # not what is free, but what there is at all
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _of_container() -> int | None:
    """What the control group that a container is leaves."""
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        return None if most == "max" else int(most) - int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _of_process() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    try:
        taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        taken = 0
    return max(0, most - taken)


def _in_words(size: int) -> str:
    """
    >>> _in_words(5 << 20), _in_words(3 << 30), _in_words(9 << 50)
    ('5 MiB', '3.0 GiB', '9,437,184 GiB')
    """
    gibibytes = size / 2**30
    if gibibytes < 1:
        return f"{size / 2**20:,.0f} MiB"
    return f"{gibibytes:,.1f} GiB" if gibibytes < 100 else f"{gibibytes:,.0f} GiB"
