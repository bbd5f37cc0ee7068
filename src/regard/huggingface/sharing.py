"""Models of transformers that get a share of a text, where other processes hold the rest.

Here stands what they are told of the whole, and whether they can be run so at all.

Such a model computes the same as on the whole text if each token's numbers depend, outside of attention, on the token
and its position alone. That is *tried*, with four tokens and an attention that mixes none of them: some of the tokens,
with their positions, have to give the same as among the others. A convolution, a state that is carried along, positions
that are counted instead of given, or frequencies that depend on the longest one are noticed, whatever they are called.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.hooks import Attend, Heads, Result, ScoringArguments, hooked
from regard.masks import Document
from regard.numerics import without_autocast

FUNCTION = "parallel.sharded"

PER_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
"""The tensors that a model may be given: one row or number for each token that this process holds."""

TOLERATED = {torch.float64: 1e-3, torch.float32: 1e-3}
"""By how much, relative to its size, a model's output may differ between the two ways, by the dtype of its weights; in
half precision, or with quantised weights, 5 %."""


class Whole(NamedTuple):
    """What all processes together know of a text.

    Attributes:
        length: of the whole text.
        real: bool [batch, length], False where a token is padding; None if none is.
        documents: int [batch, length], the text of a row that each token belongs to; None if there is one.
    """

    length: int
    real: Tensor | None
    documents: Tensor | None


whole_text: ContextVar[Whole | None] = ContextVar("regard.huggingface.sharing", default=None)
"""Of the model that is running; None if it has been given all of its text."""


def check_arguments(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuses what a model cannot be asked on a share of a text."""

    def refuse(what: str, instead: str) -> None:
        raise ValueError(f"{FUNCTION}: {type(model).__name__} was given {what}; {instead}")

    config = model.config
    if given.get("labels") is not None:
        refuse("labels, and would take the mean over one rank's tokens", "take regard.parallel.mean_loss of its logits")
    if given.get("past_key_values") is not None or given.get("use_cache"):
        refuse("a cache, which would hold one rank's tokens as if they were all", "generate outside the block")
    kept = given.get("logits_to_keep")
    if kept is not None and (isinstance(kept, Tensor) or kept != 0):
        refuse(f"logits_to_keep={kept}, which counts one rank's tokens", "leave it out")
    for name in ("output_attentions", "output_router_logits"):
        asked = given.get(name)
        if asked or (asked is None and getattr(config, name, False)):
            refuse(f"{name}=True, which needs the tokens of all ranks", "leave it out")
    for name, value in given.items():
        if isinstance(value, Tensor) and name not in PER_TOKEN:
            refuse(f"{name}, a tensor that may belong to the tokens of all ranks", f"pass only {', '.join(PER_TOKEN)}")
        if name in PER_TOKEN[2:] and value is not None and not (isinstance(value, Tensor) and value.dim() == 2):
            refuse(f"{name} that is no tensor [batch, length]", "pass that of this rank's tokens")


def documents_of(positions: Tensor) -> Tensor | None:
    """Which text of its row each token belongs to, where positions begin anew with each: transformers' own rule."""
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1) if bool(begins.any()) else None


class Found(NamedTuple):
    """What was found out about a model.

    Attributes:
        counts_from_0: whether the positions that it is not given are 0, 1, 2 and so on; and with padding in front.
        separates: whether positions that begin anew separate texts in all of its layers; None: in some.
    """

    counts_from_0: tuple[bool, bool]
    separates: bool | None


_found: "WeakKeyDictionary[nn.Module, dict[int, Found]]" = WeakKeyDictionary()


def try_out(model: nn.Module, length: int) -> Found:
    """Whether a model can be run on a share of a text of that length; tried once.

    Raises:
        ValueError: it cannot, and why.
    """
    known = _found.setdefault(model, {})
    if length not in known:
        _check_kind(model)
        known[length] = _tried(model, length)
    return known[length]


def _check_kind(model: nn.Module) -> None:
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{FUNCTION}: {name} reads one text and writes another: supported for regard's models")
    used = {getattr(part.config, "_attn_implementation", None) for part in model.modules() if hasattr(part, "config")}
    others = ", ".join(sorted(repr(one) for one in used - {"regard", None}))
    if others:
        raise ValueError(
            f"{FUNCTION}: {name} uses attn_implementation={others}, whose attention would see one rank's tokens; call "
            'model.set_attn_implementation("regard")'
        )


def _tried(model: nn.Module, length: int) -> Found:
    count, avoided = _vocabulary(model), getattr(model.config, "pad_token_id", None)
    tokens = [n for n in range(min(5, count)) if n != avoided][:4]
    device = next(model.parameters()).device
    tolerated = max(TOLERATED.get(dtype, 0.05) for dtype in {parameter.dtype for parameter in model.parameters()})
    masks: list[Any] = []

    def run(chosen: list[int], positions: list[int] | None, padded: int = 0) -> list[Tensor]:
        ids = torch.tensor([[tokens[n % len(tokens)] for n in chosen]], device=device)
        given: dict[str, Any] = {} if positions is None else {"position_ids": torch.tensor([positions], device=device)}
        if padded:
            given["attention_mask"] = torch.tensor([[int(n >= padded) for n in chosen]], device=device)
        if "use_cache" in signature(model.forward).parameters:
            given["use_cache"] = False
        with hooked(model.modules(), _each_alone(masks)), _evaluating(model), without_autocast(device):
            found = list(_tensors(model(input_ids=ids, **given)))
        if any(part.dim() < 2 or part.shape[1] != len(chosen) for part in found):
            raise _RefusalError("its output is not one for each token, so that no rank could compute its own")
        return found

    def same(one: list[Tensor], other: list[Tensor], places: list[int]) -> bool:
        """Whether two runs say the same of these tokens, which may be all that the other was given."""
        return all(
            _near(x[:, places], y if y.shape[1] == len(places) else y[:, places], tolerated)
            for x, y in zip(one, other, strict=True)
        )

    last = max(4, length) - 1
    try:
        every = [0, 1, 2, 3]
        right = same(run(every, [0, 1, 2, last]), run([1, 2], [1, 2]), [1, 2])
        counts = (
            same(run(every, None), run([1, 3], [1, 3]), [1, 3]),
            same(run(every, None, 1), run(every, every, 1), [1, 2, 3]),
        )
        masks.clear()
        run(every, [0, 1, 0, 1])
    except Exception as error:
        said = " ".join(str(error).split())
        raise ValueError(
            f"{FUNCTION}: {type(model).__name__} cannot be run on a share of a text: {said or type(error).__name__}"
        ) from error
    if not right:
        raise ValueError(
            f"{FUNCTION}: {type(model).__name__} cannot be run on a share of a text: outside of attention, a token's "
            "output depends on more than the token and its position_ids (as with convolutions, recurrence, or "
            "frequencies of the longest position), so the ranks' numbers would be wrong"
        )
    separated = {_has_documents(mask) for mask in masks}
    return Found(counts, separated.pop() if len(separated) == 1 else None)


def _vocabulary(model: Any) -> int:
    """How many tokens a model knows."""
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError):
        name = type(model).__name__
        raise ValueError(f"{FUNCTION}: {name} reads no tokens; what else models read cannot be cut yet") from None


class _RefusalError(Exception):
    """Why a model cannot be run so."""


def _each_alone(masks: list[Any]) -> Any:
    """An attention in which each token gets numbers of its own: its value, weighed by its query and key."""

    def hook(layer: nn.Module, attend: Attend) -> Attend:
        def alone(heads: Heads, scoring: ScoringArguments) -> Result:
            masks.append(scoring["mask"])
            query, key, value = heads
            groups = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
            features = torch.linspace(-1, 1, query.shape[3], dtype=query.dtype, device=query.device)
            told = torch.tanh((query * features).sum(-1, keepdim=True) + (key * features.flip(0)).sum(-1, keepdim=True))
            return value * (1 + told), None

        return alone

    return hook


def _has_documents(mask: Any) -> bool:
    return isinstance(mask, Document) or (mask is not None and any(map(_has_documents, mask.parts())))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; every part is as it was afterwards."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for name, part in found.items():
            if name != "past_key_values":
                yield from _tensors(part)
    elif isinstance(found, (list, tuple)):
        for part in found:
            yield from _tensors(part)


def _near(one: Tensor, other: Tensor, tolerated: float) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    difference = (one.double() - other.double()).norm()
    return bool(difference <= tolerated * one.double().norm())
