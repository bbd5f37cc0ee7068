"""One training at a time in a folder, whatever became of the one before."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from regard.training import lock
from regard.training.lock import LOCK, hold

HOLDER = """
import sys, time
from pathlib import Path
from regard.training.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def held_elsewhere(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_folder_in_use_is_refused_with_the_name_of_the_process_that_uses_it(tmp_path):
    with held_elsewhere(tmp_path / "run") as process:
        try:
            says = rf"run is in use, process {process.pid} on .* is training there"
            with pytest.raises(ValueError, match=says), hold(tmp_path / "run"):
                pass
        finally:
            process.kill()


def test_a_process_that_is_killed_leaves_the_folder_to_the_next(tmp_path):
    with held_elsewhere(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK).exists()
    with hold(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_thread_holds_it_may_hold_again_and_another_thread_may_not(tmp_path):
    said = []

    def other():
        try:
            with hold(tmp_path):
                said.append("held")
        except ValueError as error:
            said.append(str(error))

    with hold(tmp_path):
        with hold(tmp_path / "." / "x" / ".."):
            pass
        assert (tmp_path / LOCK).exists()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert f"process {os.getpid()}" in said[0]
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert said[1] == "held"


def test_of_many_that_want_a_folder_one_has_it_at_a_time(tmp_path):
    inside, most, turns = 0, 0, []

    def want():
        nonlocal inside, most
        mine = 0
        while mine < 50:  # as many turns on a busy machine as on an idle one: 200 of all four
            try:
                with hold(tmp_path):
                    inside += 1
                    most = max(most, inside)
                    turns.append(True)
                    mine += 1
                    inside -= 1
            except ValueError:
                pass

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert len(turns) >= 200


def test_a_lock_on_a_file_that_was_removed_meanwhile_counts_for_nothing(tmp_path, monkeypatch):
    locked, refused = lock._locked, []

    def after_the_holder_has_left(descriptor, folder):
        monkeypatch.setattr(lock, "_locked", locked)
        (folder / LOCK).unlink()
        return locked(descriptor, folder)

    monkeypatch.setattr(lock, "_locked", after_the_holder_has_left)

    def another():
        with pytest.raises(ValueError, match="is in use"), hold(tmp_path):
            pass
        refused.append(True)

    with hold(tmp_path):
        assert (tmp_path / LOCK).exists()
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
    assert refused == [True]


def test_folders_that_were_made_for_nothing_are_removed(tmp_path):
    with pytest.raises(ZeroDivisionError), hold(tmp_path / "a" / "b"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "c").mkdir()
    with hold(tmp_path / "c" / "d"):
        (tmp_path / "c" / "d" / "file").touch()
    with hold(tmp_path / "c"):
        pass
    assert (tmp_path / "c" / "d" / "file").exists()


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("text")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ValueError, match=f"folder: {place} cannot be a folder"), hold(place):
            pass
    assert (tmp_path / "file").read_text() == "text"


def test_a_folder_that_cannot_be_written_in_is_named(tmp_path, monkeypatch):
    def denied(*arguments, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(OSError, match=f"^folder: cannot write in {tmp_path}: Permission denied$"), hold(tmp_path):
        pass


def test_where_files_cannot_be_locked_it_is_said(tmp_path, monkeypatch):
    import fcntl

    def without_locks(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.warns(UserWarning, match="cannot be locked here"), hold(tmp_path):
        pass
