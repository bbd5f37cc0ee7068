"""Training a model over many ranks: batches cut, the loss of the whole, gradients added up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.graphs import uncompiled
from regard.parallel.agreement import agree
from regard.parallel.channel import APART, DEFAULT_TIMEOUT, Channel
from regard.parallel.fingerprint import fingerprint
from regard.parallel.shards import Shards, check_shards
from regard.shapes import ShapeError, is_plain, kind

IGNORED = -100
"""The target that counts for nothing, as in torch and transformers."""


def cut(
    batch: Mapping[str, Any], shards: Shards, *, group: object = None, timeout: float = DEFAULT_TIMEOUT
) -> dict[str, Any]:
    """This rank's part of a batch: every tensor [batch, length, ...] without the tokens of other ranks.

    ``labels``, which transformers would shift, are shifted here, before they are cut, since the token after a rank's
    last one is another rank's: ``targets``, at each token the label of the next, -100 at the last.

    Args:
        batch: by name, of the whole text, the same on every rank of the group. Tensors with fewer than two axes, and
            what is no tensor, stay as they are.
        shards: which positions each rank holds.
        group, timeout: as in `sharded`.
    Raises:
        ShapeError: a tensor for another length.
        ParallelError: the ranks were given different batches, as by a sampler that deals them out to all ranks.
    """
    channel = Channel("parallel.cut", group, timeout)

    def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
        check_shards("parallel.cut", "shards", shards, channel.ranks)
        if not isinstance(batch, Mapping):
            raise TypeError(f"parallel.cut: batch must be a dict of tensors, got {kind(batch)}")
        for name, tensor in batch.items():
            if is_plain(tensor) and tensor.dim() > 1 and tensor.shape[1] != shards.length:
                raise ShapeError(f"parallel.cut: {name} must be [batch, length={shards.length}, ...], as the shards "
                                 f"are, got {list(tensor.shape)}")  # fmt: skip
        if "labels" in batch and "targets" in batch:
            raise ValueError("parallel.cut: labels become targets, and the batch has targets already")
        prints = {str(name): fingerprint(part) for name, part in batch.items() if is_plain(part)}
        shown = {name: f"{list(batch[name].shape)}" for name in prints}
        return shown, {**prints, "shards": fingerprint(shards.ranges)}, []

    agree(channel, check, told=0)
    found: dict[str, Any] = {}
    for name, part in batch.items():
        if name == "labels" and part is not None:
            name, part = "targets", torch.cat((part[:, 1:], torch.full_like(part[:, :1], IGNORED)), dim=1)
        cuts = is_plain(part) and part.dim() > 1
        found[name] = shards.take(part, channel.rank, dim=1).contiguous() if cuts else part
    return found


@uncompiled(APART)
def mean_loss(
    losses: Tensor,
    counted: Tensor | None = None,
    *,
    group: object = None,
    averaged: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
) -> Tensor:
    """The mean of the losses of all ranks' tokens, the same number on every rank.

        losses = F.cross_entropy(logits.mT, targets, reduction="none")
        loss = regard.parallel.mean_loss(losses, targets != -100)

    It divides the sum over ranks by the count over ranks, however differently many tokens of the ranks count. Each rank
    gets its own tokens' share of the gradients, which are whole when summed over the ranks.

    Shapes:
        losses of any shape, of this rank's tokens; counted bool, the same shape -> a number, float32 or wider.
    Args:
        counted: which losses count; None: all. The others may be anything, NaN included.
        group: the ranks over which the mean is taken; as in `sharded`.
        averaged: whether gradients are averaged over these ranks afterwards, as by DDP and FSDP, instead of summed.
        timeout: seconds to wait for another rank.
    """
    channel = Channel("parallel.mean_loss", group, timeout)

    def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
        if not is_plain(losses) or not losses.is_floating_point():
            raise TypeError(f"parallel.mean_loss: losses must be a floating tensor, got {kind(losses)}")
        if counted is not None and (not is_plain(counted) or counted.dtype != torch.bool):
            raise TypeError(f"parallel.mean_loss: counted must be a bool tensor, got {kind(counted)}")
        if counted is not None and counted.shape != losses.shape:
            raise ShapeError(f"parallel.mean_loss: losses are {list(losses.shape)}, counted is {list(counted.shape)}")
        return {"averaged": averaged, "dtype": losses.dtype}, {}, []

    agree(channel, check, told=0)
    kept = losses if counted is None else losses.where(counted, 0.0)
    total = kept.to(torch.promote_types(losses.dtype, torch.float32)).sum()
    count = losses.numel() if counted is None else int(counted.sum())
    known = torch.tensor([float(total.detach()), float(count)], dtype=torch.float64, device=channel.device)
    channel.reduce(known, dist.ReduceOp.SUM)
    whole, everything = known.tolist()
    mean = torch.full_like(total, whole / everything if everything else torch.nan)
    factor = (channel.ranks if averaged else 1) / max(everything, 1.0)
    return _Mean.apply(total, mean, factor)  # type: ignore[no-any-return, no-untyped-call]


class _Mean(torch.autograd.Function):
    """The mean over ranks, whose gradient goes to this rank's sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, mean: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return mean.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * ctx.factor, None, None


def sum_gradients(
    parameters: nn.Module | Iterable[Tensor], *, group: object = None, timeout: float = DEFAULT_TIMEOUT
) -> None:
    """Adds up the gradients of parameters over the ranks, in place: those of the whole text, on every rank.

    For a model that neither DDP nor FSDP wraps. A parameter without a gradient on some ranks gets that of the others.

    Args:
        parameters: of a model, the same in the same order on every rank.
        group, timeout: as in `sharded`.
    """
    channel = Channel("parallel.sum_gradients", group, timeout)
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    learned = [parameter for parameter in given if parameter.requires_grad]

    def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
        if any(hasattr(parameter, "full_tensor") for parameter in learned):
            raise TypeError("parallel.sum_gradients: parameters of FSDP are distributed tensors, whose gradients FSDP "
                            "adds up itself")  # fmt: skip
        return {"parameters": [[list(p.shape), p.dtype] for p in learned]}, {}, []

    agree(channel, check, told=0)
    has = channel.gather([int(parameter.grad is not None) for parameter in learned])
    wanted = [parameter for parameter, *anywhere in zip(learned, *has, strict=True) if any(anywhere)]
    for dtype in dict.fromkeys(parameter.dtype for parameter in wanted):
        alike = [parameter for parameter in wanted if parameter.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in alike]
        flat = torch.cat([grad.flatten() for grad in grads])
        channel.reduce(flat, dist.ReduceOp.SUM)
        for parameter, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
            parameter.grad = part.view_as(parameter)
