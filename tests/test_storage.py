"""Tensors on disk: what safetensors would have written, whole or not at all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from regard import storage


def tensors() -> dict[str, torch.Tensor]:
    drawn = {str(dtype): (torch.rand(7, 3) * 2).to(dtype) for dtype in storage.DTYPE_NAMES}
    return {"ten": torch.rand(5), "é": torch.rand(()), "empty": torch.rand(0, 4), **drawn}


@pytest.mark.parametrize("metadata", [{"made": "by hand"}, {"a": 'é\n"', "b": ""}])
def test_the_file_is_read_by_safetensors(tmp_path: Path, metadata: dict[str, str]) -> None:
    written = tensors()
    storage.save(tmp_path / "ours", written, metadata)
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == metadata
        assert set(file.keys()) == set(written)
        for name, tensor in written.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read, tensor), name


@pytest.mark.parametrize("name", ["a", "ab", "abcé"])
def test_the_first_tensor_begins_where_it_was_asked_to(tmp_path: Path, name: str) -> None:
    storage.save(tmp_path / "file", {name: torch.full((3,), 7, dtype=torch.uint8)}, {}, begin=64)
    data = (tmp_path / "file").read_bytes()
    assert data.index(b"\7\7\7") % 64 == 0
    assert data.endswith(b"\7\7\7")
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.get_tensor(name).tolist() == [7, 7, 7]


def test_views_and_tensors_that_share_memory_are_written_as_what_they_hold(tmp_path: Path) -> None:
    whole = torch.arange(12.0, requires_grad=True).view(3, 4)
    storage.save(tmp_path / "views", {"turned": whole.T, "row": whole[1], "whole": whole}, {})
    with safe_open(tmp_path / "views", "pt") as file:
        assert torch.equal(file.get_tensor("turned"), whole.T)
        assert torch.equal(file.get_tensor("row"), whole[1])


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept"
    storage.save(path, {"a": torch.ones(3)}, {})
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_put", full)
    with pytest.raises(OSError, match="No space left"):
        storage.save(path, {"a": torch.zeros(3)}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["kept"]


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        storage.save(tmp_path / "file", {"a": torch.ones(3)}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_dtype_that_the_format_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=re.escape("storage: a is of torch.complex128; there are torch.float64, ")):
        storage.save(tmp_path / "file", {"a": torch.ones(3, dtype=torch.complex128)}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["Ctrl-C", "full"])
def test_any_file_that_was_not_finished_leaves_the_old_one_and_nothing_else(
    error: BaseException, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def work() -> None:
        with storage.replacing(path) as new:
            new.write_text("half of the ne")
            raise error

    if isinstance(error, OSError):
        with pytest.raises(OSError, match=f"^{path}: cannot be written: No space left on device; what was there"):
            work()
    else:
        with pytest.raises(KeyboardInterrupt):
            work()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from regard.storage import replacing
with replacing(Path(sys.argv[1])) as new:
    new.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_half_written_is_gone_after_the_next(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "file")], check=False).returncode == -9
    assert not (tmp_path / "file").exists()
    with storage.replacing(tmp_path / "file") as new:
        new.write_text("whole")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "whole"
