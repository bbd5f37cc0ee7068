"""What all tests share: one thread (tiny tensors gain nothing from more), nothing measured, one seed per test, one
hypothesis profile."""

import gc
import os

# Read as torch is imported, here and by processes that tests start: threads that wait sleep. Where there are as many
# tests at a time as processors, they would take time from each other.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
import torch
from hypothesis import settings

os.environ["REGARD_MEASURE"] = "0"  # plans must not depend on the machine; tests of what is measured turn it on
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as Triton is imported: programs for a GPU run in its interpreter

from regard import checked, one_query
from regard.kernels.strips import native, tuning

torch.set_num_threads(1)

# "steady" draws the same examples every time, so that a red test is red for everybody; to look further:
#   python -m pytest --hypothesis-profile=searching
settings.register_profile("steady", deadline=None, max_examples=100, derandomize=True, database=None)
settings.register_profile("searching", deadline=None, max_examples=1000, database=None)
settings.load_profile("steady")


def pytest_collection_modifyitems(items):
    """What takes longest first: at the end one process would wait for the other, which does it."""
    items.sort(key=lambda item: item.path.name not in ("test_install.py", "test_strips.py"))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    """What was imported is there to the end: `gc.collect`, which tests of memory call, need not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_seed_per_test():
    torch.manual_seed(20170612)


@pytest.fixture(autouse=True)
def _no_call_is_like_one_of_another_test():
    checked.forget()  # which may have changed what is chosen
    one_query.forget()


@pytest.fixture
def torch_is_faster(monkeypatch):
    """As on a processor where a score takes a little longer by the library than by torch's operator."""
    monkeypatch.setattr(native, "price", lambda *of, **by: 1.1)


@pytest.fixture
def without_the_library(monkeypatch):
    """As on a processor for which the library was not compiled: torch's operators compute everything."""
    for module in (native, one_query):
        monkeypatch.setattr(module, "is_there", lambda dtype: False)


@pytest.fixture
def sorts_few(monkeypatch):
    """The compiled library sorts documents that lie apart however few scores there are."""
    monkeypatch.setattr(tuning, "SCORES_WORTH_SORTING_DOCUMENTS", -1)
