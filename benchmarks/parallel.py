"""What attention over several processes sends and takes, beside what `regard.parallel.plan` says of it.

    python benchmarks/parallel.py [--length 4096] [--repeats 5] [--ranks 2 4]
    python benchmarks/parallel.py --alone        two processes beside one with two threads, alone
    python benchmarks/parallel.py --report       writes the tables of docs/parallel.md; measures nothing

Processes of one thread, on one machine, exchange by gloo. Each row is one call, forward, and forward with its backward
pass. Bytes are counted where messages begin. Times are those of the slowest rank in the fastest repeat; rows take
turns. They stand beside the planner's for the speeds of the same run: FLOPs per second of one rank in dense attention,
bytes per second of an exchange between neighbours, its latency, and what a pass takes that computes next to nothing.
Run it where nothing else runs.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import regard
from regard import Causal, Document, Mask, Prefix, Window
from regard.parallel import Shards
from regard.parallel.channel import Channel, Message, Transfer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "parallel.json"
PAGE = ROOT / "docs" / "parallel.md"
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
Key = TypeVar("Key")
HEADS, HEAD_DIM = 4, 64
MUCH = 1 << 22
"""Numbers in a long message."""
ALONE_LENGTH, ALONE_HEADS = 16384, 2
PASSES = {"forward": False, "forward and backward": True}


def documents(length: int) -> Document:
    """Documents of seven lengths that repeat."""
    shares = [3, 5, 2, 9, 4, 7, 2]
    sizes = [length * share // (4 * sum(shares)) for share in shares * 4]
    return Document.from_lengths([*sizes[:-1], length - sum(sizes[:-1])])


@cache
def rows(length: int, ranks: int) -> dict[str, dict[str, Any]]:
    """What is measured: a mask, who holds what, and what travels."""
    ring, zigzag = Shards.contiguous(length, ranks), Shards.zigzag(length, ranks)
    packed = Causal() & documents(length)
    found: dict[str, tuple[Mask, Shards, str]] = {
        "causal, consecutive": (Causal(), ring, "keys"),
        "causal, zigzag": (Causal(), zigzag, "keys"),
        "causal, heads over ranks": (Causal(), ring, "heads"),
        "documents, whole": (packed, Shards.balanced(packed, length, ranks), "keys"),
        "window 256": (Causal() & Window(256), ring, "keys"),
        "prefix 1024 or causal, zigzag": (Causal() | Prefix(1024), zigzag, "keys"),
    }
    return {name: {"mask": mask, "shards": of, "exchange": way} for name, (mask, of, way) in found.items()}


def planned(length: int, ranks: int, name: str, backward: bool, speeds: dict[str, float] | None = None) -> Any:
    """What the planner says of a row."""
    sizes = {"heads": HEADS, "head_dim": HEAD_DIM}
    return regard.parallel.plan(**rows(length, ranks)[name], backward=backward, **sizes, **(speeds or {}))


# --- in the processes -------------------------------------------------------------------------------------------------


class Counted:
    """Bytes that begin to be received, while it is open."""

    def __enter__(self) -> "Counted":
        self.bytes, self._start = 0, Channel.start

        def start(channel: Channel, sent: list[Message], received: list[Message], tag: int) -> Transfer:
            self.bytes += sum(message.tensor.numel() * message.tensor.element_size() for message in received)
            return self._start(channel, sent, received, tag)

        Channel.start = start  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        Channel.start = self._start  # type: ignore[method-assign]


def fastest(calls: Mapping[Key, Callable[[], object]], repeats: int) -> dict[Key, float]:
    """Seconds of the slowest rank in each call's fastest repeat; calls take turns. The same on every rank."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for turn in range(1 + repeats):
        for key, call in calls.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[key] += [float(took)] * (turn > 0)
    return {key: min(found) for key, found in times.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that the process held during a call, beyond what it held before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def exchange(count: int, times: int) -> None:
    """So many numbers to the next rank, and from the one before, so often."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    other, mine = torch.empty(count), torch.empty(count)
    for _ in range(times):
        into = dist.P2POp(dist.irecv, other, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, (rank + 1) % ranks), into]):
            work.wait()


def yardsticks(length: int) -> dict[tuple[str, str], Callable[[], object]]:
    """What tells a rank's speeds, while all do the same: messages, dense attention of a shard, a call of few tokens."""
    ranks = dist.get_world_size()
    dense, few = ([torch.randn(1, HEADS, size, HEAD_DIM, requires_grad=True) for _ in range(3)]
                  for size in (length // ranks, 16))  # fmt: skip
    apart = {"mask": Document.from_lengths([16] * ranks), "shards": Shards.contiguous(16 * ranks, ranks)}
    found: dict[tuple[str, str], Callable[[], object]] = {
        ("exchange", "little"): partial(exchange, 1, 20),
        ("exchange", "much"): partial(exchange, MUCH, 4),
    }
    for passes, backward in PASSES.items():
        found["dense", passes] = partial(attend, regard.attention_with_lse, dense, backward)
        found["few", passes] = partial(attend, regard.parallel.attention_with_lse, few, backward, **apart)
    return found


def speeds_of(length: int, took: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """What the planner is told for each kind of pass, from the seconds of `yardsticks`."""
    latency = took["exchange", "little"] / 20
    scores = HEADS * (length // dist.get_world_size()) ** 2
    return {
        passes: {
            "flops_per_second": scores * HEAD_DIM * (4 + 10 * backward) / took["dense", passes],
            "bytes_per_second": 4 * MUCH / (took["exchange", "much"] / 4 - latency),
            "latency": latency,
            "pass_seconds": took["few", passes] / (1 + backward),
        }
        for passes, backward in PASSES.items()
    }


def attend(function: Callable[..., Any], tensors: list[torch.Tensor], backward: bool, **given: Any) -> None:
    """One call, with its backward pass if that is asked for."""
    with torch.set_grad_enabled(backward):
        output, _ = function(*tensors, **given)
    if backward:
        torch.autograd.grad(output.sum(), tensors)


def measure(length: int, repeats: int) -> dict[str, Any]:
    """Every row."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    calls, received = yardsticks(length), {}
    draw = torch.Generator().manual_seed(0)
    for name, given in rows(length, ranks).items():
        sizes = 1, HEADS, given["shards"].size(rank), HEAD_DIM
        mine = [torch.randn(sizes, generator=draw).requires_grad_() for _ in range(3)]
        for passes, backward in PASSES.items():
            calls[name, passes] = partial(attend, regard.parallel.attention_with_lse, mine, backward, **given)
            with Counted() as counted:
                calls[name, passes]()
            of_ranks = torch.zeros(ranks, dtype=torch.int64)
            of_ranks[rank] = counted.bytes
            dist.all_reduce(of_ranks)
            received[name, passes] = of_ranks.tolist()
    took = fastest(calls, repeats)
    found: dict[str, Any] = {"speeds": speeds_of(length, took), "rows": {name: {} for name in rows(length, ranks)}}
    for (name, passes), count in received.items():
        found["rows"][name][passes] = {"bytes": count, "seconds": took[name, passes]}
    return found


def serve(rank: int, ranks: int, meeting: str, task: Callable[..., Any], given: tuple[int, int], answers: Any) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    found = task(*given)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def alone_calls(length: int) -> dict[str, tuple[Callable[[], None], Callable[[], None], list[torch.Tensor]]]:
    """For each kind of pass: the causal call on rank 0 with two threads, that of two ranks, and a rank's tensors."""
    rank, shards, found = dist.get_rank(), Shards.zigzag(length, 2), {}
    whole = [torch.randn(1, ALONE_HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)] if rank == 0 else []
    mine = [torch.randn(1, ALONE_HEADS, shards.size(rank), HEAD_DIM, requires_grad=True) for _ in range(3)]
    given = {"mask": Causal(), "shards": shards, "exchange": "keys"}
    for passes, backward in PASSES.items():

        def one(backward: bool = backward) -> None:
            if rank == 0:
                torch.set_num_threads(2)
                attend(regard.attention_with_lse, whole, backward, mask=Causal())
                torch.set_num_threads(1)

        two = partial(attend, regard.parallel.attention_with_lse, mine, backward, **given)
        found[passes] = one, two, mine
    return found


def alone_times(length: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Seconds of one process, and how much longer two take, in turns."""
    found = {}
    for passes, (one, two, _) in alone_calls(length).items():
        took = fastest({1: one, 2: two}, repeats)
        found[passes] = {"seconds": took[1], "ratio": took[2] / took[1]}
    return found


def alone_bytes(length: int, repeats: int) -> dict[str, dict[str, Any]]:
    """The most bytes that one process holds, and each of two, their query, key and value included."""
    found = {}
    for passes, (one, two, mine) in alone_calls(length).items():
        held = torch.zeros(2, 2, dtype=torch.int64)
        for number, (call, share) in enumerate(((one, 2), (two, 1))):
            call()
            dist.barrier()
            held[number, dist.get_rank()] = peak_bytes(call) + share * sum(tensor.numel() * 4 for tensor in mine)
            dist.barrier()
        dist.all_reduce(held)
        (of_one, _), of_two = held.tolist()
        found[passes] = {"peak_bytes of one": of_one, "peak_bytes of two": of_two}
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def report(data: dict[str, Any]) -> str:
    """The tables of the page."""
    lines = [f"{data['length']:,} tokens, {HEADS} heads of {HEAD_DIM}, float32."]
    for ranks, found in data["ranks"].items():
        lines += [
            "",
            f"### {ranks} processes",
            "",
            "| mask and shards | pass | MiB received | planned | balance | ms |",
        ]
        lines[-1] += " planned | planned / measured |"
        lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for name, row in found["rows"].items():
            for passes, backward in PASSES.items():
                got, said = row[passes], planned(data["length"], int(ranks), name, backward, found["speeds"][passes])
                counted, expected = sum(got["bytes"]) / 2**20, sum(said.bytes_received) / 2**20
                took, thought = 1e3 * got["seconds"], 1e3 * said.seconds
                numbers = counted, expected, said.balance, thought / took
                sizes, times = [f"{number:.2f}" for number in numbers], [f"{took:.1f}", f"{thought:.1f}"]
                lines.append(f"| {' | '.join([name, passes, *sizes[:3], *times, sizes[3]])} |")
    return "\n".join([*lines, *alone_lines(data["alone"])])


def memory_bound(found: dict[str, Any], passes: str) -> float:
    """Half of what one process holds, and two shards of keys and values, in bytes."""
    shard = 2 * ALONE_HEADS * HEAD_DIM * 4 * Shards.zigzag(found["length"], 2).largest
    return found["passes"][passes]["peak_bytes of one"] / 2 + 2 * shard


def alone_lines(found: dict[str, Any]) -> list[str]:
    """The table of two processes beside one."""
    lines = ["", "### Two processes of one thread beside one of two threads", ""]
    lines += [
        f"{found['length']:,} tokens, {ALONE_HEADS} heads of {HEAD_DIM}, float32, causal, zigzag, on two cores.",
        "",
    ]
    lines += [
        "| pass | ms of one | time of two / of one | MiB of one | MiB of each of two | half, and two shards of keys |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for passes, row in found["passes"].items():
        sizes = row["peak_bytes of one"], *row["peak_bytes of two"], memory_bound(found, passes)
        one, *each, bound = [f"{size / 2**20:.1f}" for size in sizes]
        times = f"{1e3 * row['seconds']:.0f} | {row['ratio']:.2f}"
        lines.append(f"| {passes} | {times} | {one} | {' and '.join(each)} | {bound} |")
    return lines


def with_tables(page: str, data: dict[str, Any]) -> str:
    """The page with the tables that these results make."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{report(data)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    data = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"ranks": {}}
    if given.alone:
        timed = run(2, alone_times, ALONE_LENGTH, given.repeats)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 16)  # what is freed does not count, whatever malloc would keep
        held = run(2, alone_bytes, ALONE_LENGTH, given.repeats)
        data["alone"] = {"length": ALONE_LENGTH, "passes": {name: timed[name] | held[name] for name in PASSES}}
    elif not given.report:
        data["length"] = given.length
        data["ranks"] |= {str(ranks): run(ranks, measure, given.length, given.repeats) for ranks in given.ranks}
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), data))
    print(report(data))


def run(ranks: int, task: Callable[..., Any], length: int, repeats: int) -> dict[str, Any]:
    """Everything that is measured with so many processes."""
    start = multiprocessing.get_context("spawn")
    answers = start.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting").as_uri()
        given = ranks, meeting, task, (length, repeats), answers
        processes = [start.Process(target=serve, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        found: dict[str, Any] = answers.get()
        for process in processes:
            process.join()
    return found


if __name__ == "__main__":
    main()
