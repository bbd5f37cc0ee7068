"""Attention over many processes, on torch.distributed: any mask, forward and backward.

The sequence lies in shards on the ranks of a process group (`Shards`). `attention` gives each rank the rows of its own
queries of exactly what `regard.attention` gives on the whole. Keys travel only to ranks whose queries may see them,
which masks tell in closed form. `sharded` does the same for the layers of a whole model.
"""

from regard.parallel.channel import ParallelError
from regard.parallel.functional import attention, attention_with_lse
from regard.parallel.learning import cut, mean_loss, sum_gradients
from regard.parallel.observing import ShardedObservation, observe
from regard.parallel.planner import ParallelPlan, plan
from regard.parallel.recording import ShardedRecording, record
from regard.parallel.sharded import sharded
from regard.parallel.shards import Shards

__all__ = [
    "ParallelError",
    "ParallelPlan",
    "ShardedObservation",
    "ShardedRecording",
    "Shards",
    "attention",
    "attention_with_lse",
    "cut",
    "mean_loss",
    "observe",
    "plan",
    "record",
    "sharded",
    "sum_gradients",
]
