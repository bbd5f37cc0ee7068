"""Processes that make up a process group: started once, given many cases."""

import datetime
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist


class Ranks:
    """So many processes, one rank each, of which the first few can be asked to run a function as a group of their own.

    A function of a module that the processes can import is called as ``function(group, *arguments)``.
    """

    def __init__(self, count: int, timeout: float = 600.0) -> None:
        self.count, self.timeout = count, timeout
        start = _server()
        self._folder = tempfile.TemporaryDirectory()
        meeting = Path(self._folder.name, "meeting").as_uri()
        self._pipes, self._processes = [], []
        for rank in range(count):
            mine, other = start.Pipe()
            process = start.Process(target=_serve, args=(other, rank, count, meeting), daemon=True)
            process.start()
            other.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function, *arguments, ranks=None, spare=0):
        """What every rank answers, or the text of what it raises.

        Args:
            spare: the number of the group, for a case after which it cannot be used any more.
        """
        asked = self._pipes[: ranks or self.count]
        for pipe in asked:
            pipe.send_bytes(pickle.dumps(((len(asked), spare), function, arguments)))
        answers = []
        for rank, pipe in enumerate(asked):
            assert pipe.poll(self.timeout), f"rank {rank} does not answer"
            try:
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionError) as error:
                answers.append(Raised(error))
        return answers

    def results(self, function, *arguments, ranks=None):
        """What every rank answers; none may raise."""
        answers = self.run(function, *arguments, ranks=ranks)
        for rank, answer in enumerate(answers):
            assert not isinstance(answer, Raised), f"rank {rank}: {answer.trace}"
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


class Raised:
    """An error in another process."""

    def __init__(self, error: BaseException) -> None:
        self.kind, self.text = type(error).__name__, str(error)
        self.trace = "".join(traceback.format_exception(error))

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def _server():
    """Processes are forked from one that has imported what they need, and computed nothing."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["ranks", "sharded", "sharded_models", "launched"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return server


def _serve(pipe, rank, count, meeting):
    torch.set_num_threads(1)
    patience = datetime.timedelta(seconds=600)  # with a machine that is busy with other tests
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count, timeout=patience)
    wanted = [(size, spare) for size in range(2, count + 1) for spare in range(1 + 2 * (size == 3))]
    groups = {(size, spare): dist.new_group(list(range(size))) for size, spare in wanted}
    while True:
        try:
            wanted, function, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = function(groups[wanted], *arguments)
        except BaseException as error:
            answer = Raised(error)
        pipe.send_bytes(pickle.dumps(answer))
