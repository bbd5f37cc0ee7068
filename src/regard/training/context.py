"""Texts on several processes, where one would not hold them: each has some of the tokens of every row.

Processes stand in a grid: those that hold the same rows together (`Settings.context_parallel` of them) side by side,
the others below.

    process  0  1     rows 0 to 3    tokens of the outer half of each row, tokens of the inner half
             2  3     rows 4 to 7

Attention runs over the processes of a row of the grid (`regard.parallel.sharded`), everything else on each alone. What
a process foretells is weighted by its share of what is foretold in the step, as where rows are dealt out, so gradients
are those of the whole.
"""

from typing import Any

from torch import Tensor, nn

from regard.training.data import Examples
from regard.training.processes import Processes


class Context:
    """The processes among which the tokens of a row are dealt out.

    Args:
        size: how many.

    Attributes:
        rank: which of them this is. rows, row: into how many parts the rows are dealt out, and which is here.
    """

    def __init__(self, processes: Processes, size: int) -> None:
        self.size = size
        self.row, self.rank = divmod(processes.rank, size)
        self.rows = processes.count // size
        self._group: Any = None
        if size > 1:
            from torch.distributed.device_mesh import init_device_mesh

            mesh = init_device_mesh(processes.device.type, (self.rows, size), mesh_dim_names=("data", "context"))
            self._group = mesh["context"]

    def loss(self, model: nn.Module, data: Examples, rows: Any) -> tuple[Tensor, int]:
        """The loss on the tokens of some rows that this process holds, and over how many answers it is the mean.

        Args:
            rows: whole; those that hold them together give the same.
        """
        if self.size == 1:
            return data.loss(model, rows), data.counted(rows)
        if not hasattr(rows, "per_token"):
            raise ValueError(
                f"context_parallel: {type(rows).__name__} cannot be dealt out by tokens: its answers are of whole texts"
            )
        from regard.parallel import Shards, sharded  # most runs have one process and need not load it

        def ends(tokens: Tensor) -> Shards:
            """Tokens from both ends for each process, which makes equal work under a causal mask."""
            return Shards.zigzag(tokens.shape[1], self.size)

        text, other = ({name: ends(getattr(rows, name)) for name in names} for names in rows.per_token())
        along = text | other
        mine = {name: of.take(getattr(rows, name), self.rank, dim=1).contiguous() for name, of in along.items()}
        cut = rows._replace(**mine)
        of_other = next(iter(other.values()), None)
        with sharded(model, next(iter(text.values())), source_shards=of_other, group=self._group):
            loss = data.loss(model, cut)
        answers = data.counted(cut)
        return loss if answers else loss.nan_to_num(), answers  # the mean over nothing: it only helps the others
