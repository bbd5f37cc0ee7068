"""Time and memory of regard and of other implementations, in one run on one machine.

A `Task` is a row of the results: tensors of some sizes and a mask. A `Peer` is an implementation: regard, torch's
function in its best form for the task, torch's function with a dense bool mask, compiled FlexAttention, the explicit
formula; for a whole layer also `nn.MultiheadAttention` and x-transformers, with the same weights. A peer that cannot do
a task reports why, and one with a different result is not timed, so that only equal work is compared.

    time     median over repeats in which the peers take turns on the same tensors, without the first call and without
             building masks; on a GPU, between two CUDA events
    spread   quartiles of a peer's time relative to regard's in the same repeat; for regard, relative to its median
    others   the share of the processors used by other programs meanwhile, if the system reports it
    memory   peak of a second call beyond query, key and value, in a separate process: includes results and what the
             peer prepared (a dense mask), but not what libraries cache; on a GPU, what torch's allocator held, in the
             same process

This runs wherever regard is installed. What is measured for the project's own pages is in its `benchmarks` folder.
"""

from regard.bench.device import check_device
from regard.bench.memory import MALLOC_SETTINGS, memory_of, most_taken
from regard.bench.peer import FUNCTIONS, Peer, Prepared, Results, difference, peers, work
from regard.bench.report import QUICK_REPEATS, QUICK_SHRINK, busy, load, machine, run, shown
from regard.bench.task import Task, chosen, name_of, ragged, sdpa, tasks
from regard.bench.timing import Others, in_turn, measure, quartiles

__all__ = [
    "FUNCTIONS",
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
