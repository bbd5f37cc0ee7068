"""Work that takes longer than a question may: in a thread of its own, with progress, to be asked about and stopped.

A job tells how far it is through `Job.progress`, and ends there when it is to stop: because somebody says so, because
nobody has asked about it for a while (its page was closed), or because everything ends. A patient job, of which nobody
waits for the result, also rests there while another runs: the cores are that one's.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from regard.viewer.params import NotFoundError

MAX_RUNNING_JOBS = 4
MAX_FINISHED_JOBS = 16
"""Jobs whose results are kept."""

MAX_SECONDS_UNASKED = 300.0
"""How long a job goes on that nobody asks about. (A page in the background may ask once a minute.)"""

WAIT_SECONDS = 1.0
"""How long a question about a job waits for news."""

REST_SECONDS = 0.05
"""How long a patient job rests before it looks again whether others run."""

Result = tuple[dict[str, Any], bytes]


class StoppedError(Exception):
    """The job was told to stop."""


class Job:
    """One piece of work.

    Args:
        rests: of a patient one, whether it has to wait for others now.
    Attributes:
        state: "running", "done", "failed" or "stopped". done, total: how far it is; total None: not known.
        note: what there is to read meanwhile. result, data: what it came to; a result may be there before the end.
        tick: rises with every change.
    """

    def __init__(self, number: int, what: str, rests: Callable[[], bool] | None = None) -> None:
        self.number, self.what, self._rests, self.patient = number, what, rests, rests is not None
        self.state, self.note = "running", ""
        self.done, self.total = 0, None
        self.error: str | None = None
        self.result: dict[str, Any] | None = None
        self.data = b""
        self.tick = 0
        self._changed = threading.Condition()
        self._stop = False
        self._asked = time.monotonic()

    done: int
    total: int | None

    def progress(self, done: int, total: int | None = None) -> None:
        """Tells how far it is, and rests where it has to.

        Raises:
            StoppedError: it has to end.
        """
        self.tell(done=done, total=total)
        while True:
            if self._stop or time.monotonic() - self._asked > MAX_SECONDS_UNASKED:
                raise StoppedError
            if self._rests is None or not self._rests():
                return
            time.sleep(REST_SECONDS)

    def tell(self, **changes: Any) -> None:
        """Sets attributes, and wakes who waits for news."""
        with self._changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self.tick += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Makes it end at its next report."""
        self._stop = True

    def seen(self, tick: int | None) -> dict[str, Any]:
        """How it stands; where that is known to the asker, after waiting a little for news."""
        self._asked = time.monotonic()
        with self._changed:
            if tick is not None:
                self._changed.wait_for(lambda: self.tick != tick or self.state != "running", WAIT_SECONDS)
            names = ("what", "state", "done", "total", "note", "error", "result", "tick")
            return {"job": self.number, **{name: getattr(self, name) for name in names}}


class Jobs:
    """The jobs of a session."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}
        self._known: dict[object, Job] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._count = 0

    def start(self, what: str, work: Callable[[Job], Result], key: object = None, *, patient: bool = False) -> Job:
        """Starts work in a thread.

        Args:
            key: what is being done; while a job with an equal one runs, that one is returned. None: always a new job.
            patient: whether it rests while any other runs that is not.
        Raises:
            RuntimeError: there are `MAX_RUNNING_JOBS` already.
        """
        with self._lock:
            known = None if key is None else self._known.get(key)
            if known is not None and known.state == "running":
                return known
            running = sum(job.state == "running" for job in self._jobs.values())
            if running >= MAX_RUNNING_JOBS:
                raise RuntimeError(f"start: {running} jobs are running already; stop one, or wait")
            job = Job(self._count, what, self._others_run if patient else None)
            self._count += 1
            self._jobs[job.number] = job
            if key is not None:
                self._known[key] = job
            finished = [number for number, job in self._jobs.items() if job.state != "running"]
            for number in finished[:-MAX_FINISHED_JOBS]:
                gone = self._jobs.pop(number)
                self._known = {key: job for key, job in self._known.items() if job is not gone}
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=_run, args=(job, work), name=f"regard-{what}", daemon=True)
            self._threads.append(thread)
        thread.start()
        return job

    def _others_run(self) -> bool:
        return any(job.state == "running" and not job.patient for job in [*self._jobs.values()])

    def find(self, number: int) -> Job:
        """A job by number."""
        if number not in self._jobs:
            raise NotFoundError(f"job: there is no job {number} any more")
        return self._jobs[number]

    def close(self, seconds: float = 1.0) -> bool:
        """Stops all of them; whether they ended within some seconds."""
        for job in list(self._jobs.values()):
            job.stop()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _run(job: Job, work: Callable[[Job], Result]) -> None:
    try:
        result, data = work(job)
        job.tell(state="done", result=result, data=data)
    except StoppedError:
        job.tell(state="stopped")
    except Exception as error:  # whatever it is, whoever asks about the job reads it
        job.tell(state="failed", error=str(error) or type(error).__name__)
