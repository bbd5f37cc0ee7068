"""Attention over many processes, on torch.distributed: any mask, forward and backward.

The sequence lies in shards on the ranks of a process group (`Shards`). `attention` gives each rank the rows of its own
queries of exactly what `regard.attention` gives on the whole. Keys travel only to ranks whose queries may see them,
which masks tell in closed form.
"""

from regard.parallel.channel import ParallelError
from regard.parallel.functional import attention, attention_with_lse
from regard.parallel.observing import ShardedObservation, observe
from regard.parallel.planner import ParallelPlan, plan
from regard.parallel.shards import Shards

__all__ = [
    "ParallelError",
    "ParallelPlan",
    "ShardedObservation",
    "Shards",
    "attention",
    "attention_with_lse",
    "observe",
    "plan",
]
