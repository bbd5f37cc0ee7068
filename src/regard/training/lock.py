"""Allows one training run at a time per folder.

A folder is locked with the operating system's own lock on an open file (flock), which ends with the process, however
that ends: a killed run leaves nothing that would keep the next one out.
"""

import contextlib
import os
import platform
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".training.lock"
_held = threading.local()


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Makes a folder, and keeps every other training out of it until the block is done.

    What a thread holds already it may hold again. A folder that was made and stays empty is removed.

    Raises:
        ValueError: another training is running there (the message names its process), or it is a file.
        OSError: the folder cannot be written in.
    """
    held: set[Path] = _held.__dict__.setdefault("folders", set())
    place = folder.resolve()
    if place in held:
        yield
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _lock(folder, lock)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"folder: {folder} cannot be a folder, there is a file of that name") from None
    except OSError as error:
        raise OSError(f"folder: cannot write in {folder}: {error.strerror}") from error
    held.add(place)
    try:
        yield
    finally:
        held.remove(place)
        with contextlib.suppress(OSError):
            lock.unlink()  # before it is closed, so that nobody locks a file that is about to go
        os.close(descriptor)
        for path in missing:
            try:
                path.rmdir()
            except OSError:  # not empty
                break


def _lock(folder: Path, path: Path) -> int:
    """A locked file with this process's name in it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _locked(descriptor, folder):
                if _is_at(descriptor, path):
                    break
            else:
                holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
                raise ValueError(
                    f"folder: {folder} is in use, {holder} is training there\n"
                    "  hint: wait for it or stop it, or give another folder"
                )
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever held it has just removed it
    with contextlib.suppress(OSError):  # a full disk: the name only helps
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()} (since {since})".encode(), 0)
    return descriptor


def _locked(descriptor: int, folder: Path) -> bool:
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            pass
    warnings.warn(f"{folder}: cannot be locked here; make sure that only one training writes to it", stacklevel=4)
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
