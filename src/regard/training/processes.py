"""The processes of a launch, and how they agree.

    torchrun --nproc-per-node 2 --no-python regard train runs/mine

starts the same command several times, and tells each process its number in environment variables; so does
`accelerate launch`. Every process does the same work on its own share of the rows. Only the first writes and tells.
What one of them cannot do, none goes on with: otherwise the others would wait for it for ever.
"""

import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist


class ElsewhereError(RuntimeError):
    """Another process of the launch has failed; the message is its own."""


class Processes:
    """The processes of a launch: of most runs, this one alone.

    Args:
        rank, count: the number of this process, from 0, and how many there are.
        device: what this process computes on.

    Attributes:
        main: whether this is the first process, the one that writes and tells.
    """

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        self.rank, self.count, self.device = rank, count, device
        self.main = rank == 0

    def sum(self, number: float) -> float:
        """The sum over all processes."""
        return self._reduced(number, "SUM")

    def any(self, wanted: bool) -> bool:
        """Whether any of the processes wants it."""
        return self.largest(wanted) > 0

    def largest(self, number: int) -> int:
        """The largest of all processes."""
        return int(self._reduced(number, "MAX"))

    def first(self, make: Callable[[], Any]) -> Any:
        """What the first process makes, for all of them."""
        with self.together():
            made = [make() if self.main else None]
        if self.count > 1:
            dist.broadcast_object_list(made, src=0)
        return made[0]

    def check_same(self, what: str, fact: object) -> None:
        """Checks that all processes were given the same.

        Raises:
            ValueError: on every process; says which one differs.
        """
        facts = self._all(fact)
        other = next((rank for rank, found in enumerate(facts) if found != facts[0]), None)
        if other is not None:
            error = ValueError(f"{what}: process {other} has another than the first; every process has to see the same")
            raise _known(error)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work that succeeds on all processes or fails on all. It must not itself wait for another process.

        Raises:
            ElsewhereError: it succeeded here, and failed on another process.
        """
        error: BaseException | None = None
        try:
            yield
        except BaseException as failure:
            error = failure
        if self.count > 1:
            words = self._all(None if error is None else f"{error}" or type(error).__name__)
            if error is None and any(word is not None for word in words):
                rank, word = next((rank, word) for rank, word in enumerate(words) if word is not None)
                error = ElsewhereError(f"process {rank}: {word}")
        if error is not None:
            raise _known(error)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Work that waits for other processes.

        Raises:
            ElsewhereError: one of them has ended meanwhile.
        """
        try:
            yield
        except RuntimeError as error:
            lost = isinstance(error, dist.DistError) or "gloo" in str(error)
            if self.count == 1 or not lost:
                raise
            raise ElsewhereError("another process of the launch has ended; what it said last tells why") from error

    def _reduced(self, number: float, how: str) -> float:
        if self.count == 1:
            return number
        tensor = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, how))
        return float(tensor)

    def _all(self, thing: Any) -> list[Any]:
        """One thing of each process, in their order."""
        if self.count == 1:
            return [thing]
        things = [None] * self.count
        dist.all_gather_object(things, thing)
        return things


E = TypeVar("E", bound=BaseException)


def _known(error: E) -> E:
    """An error that all processes raise, or one of them, and the others for its sake."""
    error.__dict__["known"] = True
    return error


def known(error: BaseException) -> bool:
    """Whether the first process raises an error like this one, so that the others need not tell it."""
    return "known" in error.__dict__


def join() -> Processes:
    """Joins the processes of this launch, if it was launched as several and has not joined them yet.

    Raises:
        ValueError: the launcher has left out what the processes need to find each other, or has started more of them
            than this machine has accelerators.
    """
    device = _device()
    if not dist.is_available():
        return Processes(0, 1, device)
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Its functions take the processes of this moment as their default. Imported later, as DDP does, they would hold
        # the group for ever, and its threads would abort the process that ends while others still work.
        import torch.distributed.nn  # noqa: F401

        dist.init_process_group()
    if not dist.is_initialized():
        return Processes(0, 1, device)
    return Processes(dist.get_rank(), dist.get_world_size(), device)


def leave() -> None:
    """Leaves the processes of the launch.

    What the frames of an error hold goes first, as the model of a run that was stopped: if their group ended with it,
    Python would wait for the group's threads, and these for Python.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    error = sys.exception()
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()  # modules refer to themselves
    dist.destroy_process_group()


def _device() -> torch.device:
    """The accelerator with this process's number on its machine, or the processor."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return torch.device("cpu")
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if number >= there:
        raise ValueError(
            f"LOCAL_RANK: process {number} of this machine has no {kind.type} of its own, there are {there}"
        )
    torch.accelerator.set_device_index(number)
    return torch.device(kind.type, number)
