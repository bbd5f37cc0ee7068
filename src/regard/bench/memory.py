"""Peak memory of a call, measured in a separate process."""

import contextlib
import multiprocessing
import os
import platform
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from regard.bench.peer import peers, work
from regard.bench.task import Task, tasks
from regard.shapes import bytes_of

COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx", "torch.nn.attention.flex_attention")
"""Modules that are slow to import, loaded once for all processes that measure memory."""

SECONDS_TO_END = 10
"""How long a process that has answered may take to end."""

# freed memory has to be returned at once, and none cached for the next call
MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MKL_DISABLE_FAST_MM": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def memory_of(task: Task, dtype: torch.dtype, peer: str, shrink: int) -> int | str:
    """Peak bytes of a call beyond query, key and value, measured in a separate process; or why that failed."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "this system cannot fork"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *COMPILER_MODULES])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(
        target=_tell_memory, args=(send, task.label, shrink, dtype, peer, torch.get_num_threads()), daemon=True
    )
    with _environment(MALLOC_SETTINGS):
        process.start()
    send.close()
    try:
        answer: int | str = receive.recv()
        process.join(SECONDS_TO_END)  # what it holds of the system, such as semaphores, is given back
    except EOFError:
        process.join()
        answer = f"its process ended with code {process.exitcode}: out of memory?"
    finally:
        process.kill()
        process.join()
        receive.close()
    return answer


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _tell_memory(send: Any, label: str, shrink: int, dtype: torch.dtype, peer: str, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends this process
    torch.set_num_threads(threads)
    try:
        task = next(task for task in tasks(shrink) if task.label == label)
        inputs = task.inputs(dtype)
        run, holds = work(task, next(p for p in peers(task) if p.name == peer), inputs)
        run()
        send.send(bytes_of(holds) + most_taken(run))
    except Exception as error:
        send.send(in_one_line(error))


def most_taken(run: Callable[[], object]) -> int:
    """Peak bytes that this process held during `run`, beyond what it held before.

    The system reports only the peak of the whole process. So memory is filled up to that peak first.
    """
    ballast: list[Tensor] = []
    level = _most_held()
    while _most_held() <= level + 2**18:  # the system counts in steps of several pages
        ballast.append(torch.ones(2**17, dtype=torch.uint8))
    before = _most_held()
    run()
    return _most_held() - before


def _most_held() -> int:
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if platform.system() == "Darwin" else most * 1024


def in_one_line(error: Exception) -> str:
    """An error, short enough for a row of a table."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
