"""Models of transformers under a process group: they are told of the whole text what they cannot see on one rank."""

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.hooks import checkpoints
from regard.parallel.agreement import agree
from regard.parallel.channel import Channel
from regard.parallel.shards import Shards


def models_in(model: nn.Module, *, outer_only: bool = False) -> list[nn.Module]:
    """The models of transformers that a model consists of."""
    known: Any = sys.modules.get("transformers.modeling_utils")
    found = [] if known is None else [part for part in model.modules() if isinstance(part, known.PreTrainedModel)]
    inner = {id(part) for whole in found for part in whole.modules() if part is not whole}
    return [part for part in found if not outer_only or id(part) not in inner]


def try_out(model: nn.Module, length: int) -> Any:
    """What has to be known of a model of transformers that gets a share of a text of that length (`sharing.Found`);
    raises if it cannot be run so."""
    from regard.huggingface import sharing

    return sharing.try_out(model, length)


@contextmanager
def told(model: nn.Module, found: Any, shards: Shards, channel: Channel) -> Iterator[None]:
    """While the block is open, the model gets positions in the whole text, and its masks are those of the whole.

    Args:
        found: about it, or about the model that it is a part of, by `try_out`.
    """
    from regard.huggingface import sharing

    parameters = inspect.signature(model.forward).parameters
    names = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    running: list[Any] = []

    def begin(model: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if sharing.whole_text.get() is not None:  # inside another model of transformers, which has been told
            running.append(None)
            return None
        given = dict(zip(names, arguments, strict=False)) | named
        whole, given = _known(model, found, given, shards, channel, names)
        running.append(sharing.whole_text.set(whole))
        return (), given

    def end(model: nn.Module, arguments: Any, output: Any) -> None:
        token = running.pop() if running else None
        if token is not None:
            sharing.whole_text.reset(token)

    handles = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        while running:
            end(model, (), None)


def _known(
    model: nn.Module, found: Any, given: dict[str, Any], shards: Shards, channel: Channel, names: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """What all ranks know of the text, and what the model is given."""
    from regard.huggingface import sharing

    rank, name = channel.rank, type(model).__name__
    read = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    real, positions = given.get("attention_mask"), given.get("position_ids")

    def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
        if any(checkpoints()):
            raise ValueError(f"parallel.sharded: {name} runs inside activation checkpointing as a whole, which would "
                             "repeat it outside the block; use model.gradient_checkpointing_enable()")  # fmt: skip
        sharing.check_arguments(model, given)
        if not isinstance(read, Tensor) or read.dim() < 2:
            raise TypeError(f"parallel.sharded: {name} has to be given input_ids or inputs_embeds")
        if "position_ids" not in names:
            raise ValueError(
                f"parallel.sharded: {name} takes no position_ids, so it cannot be told where its tokens stand"
            )
        for what, tensor in given.items():
            if isinstance(tensor, Tensor) and tensor.shape[1] != shards.size(rank):
                raise ValueError(f"parallel.sharded: {what} has to be that of the {shards.size(rank)} tokens of rank "
                                 f"{rank}, got {list(tensor.shape)}; cut the batch: regard.parallel.cut")  # fmt: skip
        if positions is None and not found.counts_from_0[0]:
            raise ValueError(f"parallel.sharded: {name} counts positions by rules of its own; pass position_ids")
        shapes = {what: [] if t is None else [len(t), t.dtype] for what, t in
                  (("input", read), ("attention_mask", real), ("position_ids", positions))}  # fmt: skip
        return {"model": name, **shapes}, {}, []

    agree(channel, check, told=0)
    assert read is not None
    whole_real = None if real is None else _joined(real.bool(), shards, channel)
    if whole_real is not None and bool(whole_real.all()):
        whole_real = None
    documents = None
    if positions is None:
        if whole_real is not None and not found.counts_from_0[1]:
            raise ValueError(f"parallel.sharded: {name} counts positions by its padding; pass position_ids")
        given["position_ids"] = shards.positions(rank, read.device)[None]
    elif real is None:
        documents = sharing.documents_of(_joined(positions, shards, channel).expand(len(read), -1))
        if documents is not None and not _separates(model, found, given):
            documents = None
    if real is None:  # else its masks would separate texts where this rank's positions are not consecutive
        given["attention_mask"] = torch.ones(read.shape[:2], dtype=torch.bool, device=read.device)
    if "use_cache" in names:
        given["use_cache"] = False
    return sharing.Whole(shards.length, whole_real, documents), given


def _separates(model: nn.Module, found: Any, given: Mapping[str, Any]) -> bool:
    """Whether position_ids that begin anew separate texts, as they do for this model on one process."""
    if found.separates is None:
        raise ValueError(f"parallel.sharded: where position_ids begin anew, some layers of {type(model).__name__} "
                         "separate the texts, others do not")  # fmt: skip
    cached = given.get("use_cache")
    if found.separates and (getattr(model.config, "use_cache", False) if cached is None else cached):
        raise ValueError("parallel.sharded: position_ids begin anew, but transformers does not separate texts where it "
                         "keeps a cache; pass use_cache=False")  # fmt: skip
    return bool(found.separates)


def _joined(tensor: Tensor, shards: Shards, channel: Channel) -> Tensor:
    """The tensor of the whole text [batch, length], from that of each rank's tokens."""
    with torch.inference_mode(False), torch.no_grad():
        padded = tensor.new_zeros(len(tensor), shards.largest, dtype=torch.int64)
        padded[:, : tensor.shape[1]] = tensor
        found = channel.collect(padded.to(channel.device))
        parts = [part[:, : shards.size(rank)] for rank, part in enumerate(found)]
        return shards.join(parts, dim=1).to(tensor.device, tensor.dtype)
