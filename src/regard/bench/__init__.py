"""What a call costs beside the other ways to compute it: time and memory, in one run on one machine.

A `Task` is a row: tensors of some sizes and a mask. A `Peer` is a way to do it: regard, torch's function in the form
that suits the task best, torch's function with a dense bool mask, compiled FlexAttention, the explicit formula; and for
a whole layer `nn.MultiheadAttention` and x-transformers, with the same weights. A peer that cannot do a task says why,
and one that gives another result is not timed, so that nobody is compared on different work.

    time     median of repeats in which the peers take turns on the same tensors; a first call is not counted, neither
             is the making of masks; on a GPU between two CUDA events
    spread   the quartiles of how many times regard's time a peer took in the same repeat; of regard itself, of its
             times as shares of their median
    others   the share of the processors that other programs took meanwhile, where the system tells
    memory   the most that a second call takes beyond query, key and value, in a process of its own: results
             and what the peer prepared (a dense mask) included, what libraries keep for themselves not; on a GPU what
             torch's allocator held, in the same process

Here belongs what measures regard beside others wherever it is installed. What is measured for the project's own pages
is in its `benchmarks` folder.
"""

from regard.bench.device import check_device
from regard.bench.memory import MALLOC_SETTINGS, memory_of, most_taken
from regard.bench.peer import FUNCTIONS, LAYERS, Peer, Prepared, Results, difference, peers, work
from regard.bench.report import QUICK_REPEATS, QUICK_SHRINK, busy, load, machine, run, shown
from regard.bench.task import Task, chosen, name_of, ragged, sdpa, tasks
from regard.bench.timing import Others, in_turn, measure, quartiles

__all__ = [
    "FUNCTIONS",
    "LAYERS",
    "MALLOC_SETTINGS",
    "QUICK_REPEATS",
    "QUICK_SHRINK",
    "Others",
    "Peer",
    "Prepared",
    "Results",
    "Task",
    "busy",
    "check_device",
    "chosen",
    "difference",
    "in_turn",
    "load",
    "machine",
    "measure",
    "memory_of",
    "most_taken",
    "name_of",
    "peers",
    "quartiles",
    "ragged",
    "run",
    "sdpa",
    "shown",
    "tasks",
    "work",
]
