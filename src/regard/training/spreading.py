"""Where the weights of a model lie when several processes train it.

    copies   each process has all of them, and gradients are averaged (DistributedDataParallel)
    shards   each process has some rows of every tensor, of its gradient and of what the optimizers keep of it; the
             tensors of a block are put together when it is computed (FSDP2 [1])

Both end with the weights that one process ends with, but for the order in which gradients are added up. What is written
to disk is whole, so a run may go on with any number of processes.

References:
    [1] Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel"; FSDP2 is its successor.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from regard.layers import Block
from regard.training.processes import Processes


def spread(model: nn.Module, processes: Processes, *, shards: bool) -> nn.Module:
    """A model as the processes train it together; its parameters are those of `model`, or become shards."""
    shards = shards or os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if processes.count == 1:
        return model
    if not shards:
        devices = None if processes.device.type == "cpu" else [processes.device]
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.count,))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def exchanging(model: nn.Module, wanted: bool) -> AbstractContextManager[Any]:
    """A backward pass that averages gradients over the processes, or leaves that to a later one."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if wanted else model.no_sync()
    of_shards: Any = getattr(model, "set_requires_gradient_sync", None)
    if of_shards is not None:
        of_shards(wanted)
    return nullcontext()


def release(model: nn.Module) -> None:
    """Lets go of the weights that a forward pass has put together, where no backward pass will.

    Until then `model.parameters()` are not the shards that the optimizers know.
    """
    of_shards: Any = getattr(model, "reshard", None)
    if of_shards is not None:
        of_shards()


def sharded(tensor: Tensor) -> bool:
    """Whether a tensor has some of its rows on other processes."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """A tensor with the rows of all processes; all of them have to ask."""
    found: Tensor = tensor.full_tensor() if sharded(tensor) else tensor
    return found


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor as `other` lies: of a shard, this process's rows."""
    if not sharded(other):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(other, DTensor)
    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


class ShardedMuon(torch.optim.Muon):
    """Muon for matrices of which each process has some rows.

    Orthogonalising needs all of a matrix. Each is put together once per step, when its momentum has been added, and
    then computed as on one process; what is kept lies in shards.
    """

    def __init__(self, parameters: Iterable[Tensor], **options: Any) -> None:
        super().__init__(parameters, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for group in self.param_groups:
            momentum = group["momentum"]
            for parameter in [p for p in group["params"] if p.grad is not None]:
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                kept = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = parameter.grad.lerp(kept, momentum) if group["nesterov"] else kept
                change = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=update.device))
                change.grad = whole(update)
                names = ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
                options = {name: group[name] for name in names}
                torch.optim.Muon([change], **options, weight_decay=0.0, momentum=0.0, nesterov=False).step()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(like(change.detach(), parameter))
        return None
