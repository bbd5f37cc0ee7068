"""What attention over several processes sends and takes, beside what `regard.parallel.plan` says of it.

    python benchmarks/parallel.py [--length 4096] [--repeats 2] [--ranks 2 4]
    python benchmarks/parallel.py --alone        two processes beside one with two threads, alone
    python benchmarks/parallel.py --report       writes the tables of docs/parallel.md; measures nothing

Processes of one thread, on one machine, exchange by gloo. Each row is one call, forward, and forward with its backward
pass. Bytes are counted where messages begin; they are kept, and the page tells them. Times are only printed: medians
of the slowest rank's, beside the planner's for three speeds of the same run (FLOPs per second of one rank, bytes per
second of an exchange between neighbours, its latency). They mean something where nothing else runs.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
HEADS, HEAD_DIM = 4, 64
ALONE_LENGTH, ALONE_HEADS = 16384, 2
PASSES = {"forward": False, "forward and backward": True}


def documents(length: int) -> Document:
    """Documents of seven lengths that repeat."""
    shares = [3, 5, 2, 9, 4, 7, 2]
    sizes = [length * share // (4 * sum(shares)) for share in shares * 4]
    return Document.from_lengths([*sizes[:-1], length - sum(sizes[:-1])])


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


def slowest(call: Callable[[], object], repeats: int) -> float:
    """Median over repeats of the time of the slowest rank, in seconds; the same on every rank."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        call()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return statistics.median(times)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that the process held during a call, beyond what it held before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def speeds_of(length: int, repeats: int) -> dict[str, dict[str, float]]:
    """What one rank computes and receives while all do the same, for each kind of pass."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tensors = [torch.randn(1, HEADS, length // ranks, HEAD_DIM, requires_grad=True) for _ in range(3)]
    scores = HEADS * (length // ranks) ** 2
    other, mine = torch.empty(1 << 22), torch.empty(1 << 22)

    def exchange(count: int) -> None:
        into = dist.P2POp(dist.irecv, other[:count], (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine[:count], (rank + 1) % ranks), into]):
            work.wait()

    exchange(1 << 22)
    latency = slowest(lambda: [exchange(1) for _ in range(20)], repeats) / 20
    moving = slowest(lambda: [exchange(1 << 22) for _ in range(4)], repeats) / 4 - latency
    link = {"bytes_per_second": (1 << 24) / moving, "latency": latency}
    found = {}
    for name, backward in PASSES.items():
        call = partial(attend, regard.attention_with_lse, tensors, backward)
        call()
        took = slowest(call, repeats)
        flops = scores * HEAD_DIM * (4 + (10 if backward else 0))
        found[name] = {"flops_per_second": flops / took, **link}
    return found


def attend(function: Callable[..., Any], tensors: list[torch.Tensor], backward: bool, **given: Any) -> None:
    """One call, with its backward pass if that is asked for."""
    with torch.set_grad_enabled(backward):
        output, _ = function(*tensors, **given)
    if backward:
        torch.autograd.grad(output.sum(), tensors)


def measure(length: int, repeats: int) -> dict[str, Any]:
    """Every row."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {"speeds": speeds_of(length, repeats), "rows": {}}
    draw = torch.Generator().manual_seed(0)
    for name, given in rows(length, ranks).items():
        sizes = 1, HEADS, given["shards"].size(rank), HEAD_DIM
        mine = [torch.randn(sizes, generator=draw).requires_grad_() for _ in range(3)]
        found["rows"][name] = {}
        for passes, backward in PASSES.items():
            call = partial(attend, regard.parallel.attention_with_lse, mine, backward, **given)
            with Counted() as counted:
                held = peak_bytes(call) + sum(tensor.numel() * 4 for tensor in mine)
            of_rank = torch.zeros(2, ranks, dtype=torch.int64)
            of_rank[:, rank] = torch.tensor([counted.bytes, held])
            dist.all_reduce(of_rank)
            received, peaks = of_rank.tolist()
            row = {"seconds": slowest(call, repeats), "bytes": received, "peak_bytes": peaks}
            found["rows"][name][passes] = row
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


def alone(length: int, repeats: int) -> dict[str, Any]:
    """The causal call on rank 0 with two threads, in turns with that of two ranks."""
    rank, shards, found = dist.get_rank(), Shards.zigzag(length, 2), {"length": length}
    whole = [torch.randn(1, ALONE_HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)] if rank == 0 else []
    mine = [torch.randn(1, ALONE_HEADS, shards.size(rank), HEAD_DIM, requires_grad=True) for _ in range(3)]
    for passes, backward in PASSES.items():

        def one(backward: bool = backward) -> None:
            if rank == 0:
                torch.set_num_threads(2)
                attend(regard.attention_with_lse, whole, backward, mask=Causal())
                torch.set_num_threads(1)

        given = {"mask": Causal(), "shards": shards, "exchange": "keys"}
        two = partial(attend, regard.parallel.attention_with_lse, mine, backward, **given)
        held = torch.zeros(2, 2, dtype=torch.int64)
        for number, (call, tensors) in enumerate(((one, whole), (two, mine))):
            held[number, rank] = peak_bytes(call) + sum(tensor.numel() * 4 for tensor in tensors)
        dist.all_reduce(held)
        pairs = [(slowest(one, 1), slowest(two, 1)) for _ in range(repeats)]
        found[passes] = {
            "seconds": statistics.median(first for first, _ in pairs),
            "ratio of two processes": statistics.median(second / first for first, second in pairs),
            "peak_bytes": held.tolist(),
        }
    return found


# --- the page ---------------------------------------------------------------------------------------------------------


def report(data: dict[str, Any]) -> str:
    """The tables of the page: what is the same on every machine."""
    lines = [f"{data['length']:,} tokens, {HEADS} heads of {HEAD_DIM}, float32."]
    for ranks, found in data["ranks"].items():
        lines += ["", f"### {ranks} processes", "", "| mask and shards | pass | MiB received | planned | balance |"]
        lines += ["| --- | --- | ---: | ---: | ---: |"]
        for name, row in found.items():
            for passes, backward in PASSES.items():
                said = planned(data["length"], int(ranks), name, backward)
                counted, expected = sum(row[passes]) / 2**20, sum(said.bytes_received) / 2**20
                lines.append(f"| {name} | {passes} | {counted:.2f} | {expected:.2f} | {said.balance:.2f} |")
    return "\n".join(lines)


def times(length: int, ranks: int, found: dict[str, Any]) -> str:
    """Seconds of each row, beside what the planner says for the speeds of the same run."""
    lines = [f"{ranks} processes: seconds, planned, MiB of the rank that held most"]
    for name, row in found["rows"].items():
        for passes, backward in PASSES.items():
            said, got = planned(length, ranks, name, backward, found["speeds"][passes]), row[passes]
            held = max(got["peak_bytes"]) / 2**20
            lines.append(f"{name}, {passes}: {got['seconds']:.3g}, {said.seconds:.3g}, {held:.0f}")
    return "\n".join(lines)


def with_tables(page: str, data: dict[str, Any]) -> str:
    """The page with the tables that these results make."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{report(data)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    data = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"ranks": {}}
    if given.alone:
        print(json.dumps(run(2, alone, ALONE_LENGTH, given.repeats), indent=1))
        return
    for ranks in () if given.report else given.ranks:
        found = run(ranks, measure, given.length, given.repeats)
        print(times(given.length, ranks, found), flush=True)
        data["length"] = given.length
        data["ranks"][str(ranks)] = {
            name: {passes: row[passes]["bytes"] for passes in PASSES} for name, row in found["rows"].items()
        }
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
