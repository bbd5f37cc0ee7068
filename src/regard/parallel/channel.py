"""Messages between the ranks of a process group, with a time limit; what fails is one error that says where."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from regard.shapes import is_number, kind

DEFAULT_TIMEOUT = 300.0
"""Seconds that a rank waits for the others."""

APART = "ranks talk to each other outside of a graph"
"""Why torch.compile leaves out what does so (`regard.graphs.uncompiled`)."""

_counted: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""How many calls each group has agreed on."""


class ParallelError(RuntimeError):
    """Ranks disagree about a call, or one of them does not answer."""


def check_first_order(function: str) -> None:
    """In a backward pass: raises if its result is to be differentiated again (``create_graph=True``)."""
    if torch.is_grad_enabled():
        raise ParallelError(
            f"{function}: gradients of gradients are not computed over ranks\n  hint: pass create_graph=False"
        )


class Message(NamedTuple):
    """A tensor to send or to receive into, and the rank at the other end."""

    rank: int
    tensor: Tensor


class Channel:
    """The ranks of a group as one of them sees them.

    Args:
        function: the public function that is called, for errors.
        group: a process group, a device mesh of one axis, or None for all processes.
        timeout: seconds to wait for the others.
    """

    def __init__(self, function: str, group: object, timeout: float) -> None:
        self.function = function
        if not dist.is_available() or not dist.is_initialized():
            raise ParallelError(
                f"{function}: torch.distributed has no process group\n  hint: start with torchrun, and call "
                'torch.distributed.init_process_group("gloo") first ("nccl" on GPUs)'
            )
        self.group = _group_of(function, group)
        if not is_number(timeout) or not timeout > 0:
            raise ValueError(f"{function}: timeout must be a number of seconds above 0, got {kind(timeout)}")
        self.timeout = timeout
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if self.rank < 0:
            raise ParallelError(f"{function}: this process is not in the group")
        self._peers = dist.get_process_group_ranks(self.group)
        self.device = torch.device("cuda" if "nccl" in dist.get_backend(self.group) else "cpu")

    def count(self) -> int:
        """The number of this call, the same on every rank that made the same calls."""
        number = _counted.get(self.group, 0)
        _counted[self.group] = number + 1
        return number

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Equally many numbers from every rank."""
        return torch.stack(self.collect(torch.tensor(numbers, dtype=torch.int64, device=self.device))).tolist()

    def collect(self, given: Tensor) -> list[Tensor]:
        """A tensor of the same shape from every rank."""
        found = [torch.empty_like(given) for _ in range(self.ranks)]
        with self._in_words("agree on the call"):
            work = dist.all_gather(found, given, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))
        return found

    def reduce(self, tensor: Tensor, way: Any) -> None:
        """Sums, or what `way` says, over the ranks, in place."""
        with self._in_words("add up a result"):
            work = dist.all_reduce(tensor, way, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))

    def tell(self, text: str) -> list[str]:
        """A text from every rank."""
        given = text.encode()
        longest = max(length for (length,) in self.gather([len(given)]))
        return [bytes(row[1 : 1 + row[0]]).decode() for row in self.gather([len(given), *given.ljust(longest)])]

    def start(self, sent: Sequence[Message], received: Sequence[Message], tag: int) -> "Transfer":
        """Begins to send and to receive; the tensors must stay as they are until `Transfer.wait`."""
        peers = [message.rank for message in (*sent, *received) if message.tensor.numel()]
        operations = [
            dist.P2POp(operation, message.tensor, self._peers[message.rank], self.group, tag)
            for operation, messages in ((dist.isend, sent), (dist.irecv, received))
            for message in messages
            if message.tensor.numel()
        ]
        with self._in_words(f"begin an exchange with {_ranks(peers)}"):
            return Transfer(self, dist.batch_isend_irecv(operations) if operations else [], peers)

    @contextmanager
    def _in_words(self, what: str) -> Iterator[None]:
        """What torch says of ranks that do not answer, as one error."""
        try:
            yield
        except RuntimeError as error:  # torch.distributed.DistError, and gloo's own errors
            said = " ".join(str(error).split())
            raise ParallelError(
                f"{self.function}: rank {self.rank} of {self.ranks} could not {what} within {self.timeout:g} s: a rank "
                f"has ended, hangs, or has made another call ({said[:200]})\n  hint: the group cannot be used any "
                "more; the rank that failed first says why"
            ) from error


class Transfer:
    """Messages on their way."""

    def __init__(self, channel: Channel, works: Sequence[Any], peers: Sequence[int]) -> None:
        self._channel, self._works, self._peers = channel, works, peers

    def wait(self) -> None:
        """Until everything has been sent and received."""
        with self._channel._in_words(f"finish an exchange with {_ranks(self._peers)}"):
            for work in self._works:
                work.wait(timedelta(seconds=self._channel.timeout))


def _group_of(function: str, group: object) -> dist.ProcessGroup:
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{function}: group must be a device mesh of one axis, got {group.ndim} axes {group.mesh_dim_names}"
                '; take one: mesh["context"]'
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to processes that are not in it
        raise ParallelError(f"{function}: this process is not in the group")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{function}: group must be a process group, a device mesh or None, got {kind(group)}")
    return group


def _ranks(ranks: Sequence[int]) -> str:
    shown = sorted(set(ranks))
    return f"rank{'s' * (len(shown) != 1)} {', '.join(map(str, shown))}" if shown else "nobody"
