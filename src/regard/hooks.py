"""Hooks around attention, by which recordings, statistics and interventions see or change a running model.

Every attention layer, regard's own or one of transformers, calls `attend` with its heads. Inside a ``with hooked(...)``
block for that layer, the call goes through the block's hook. A hook works like middleware: it gets the attention
function and returns a wrapped one.

    Attend   (heads, scoring) -> output, lse or None
    Hook     (layer, attend) -> attend

    def double(layer, attend):
        def doubled(heads, scoring):
            output, lse = attend(heads, scoring)
            return 2 * output, lse
        return doubled

A block may also say that the process holds a share of the text only (`Share`): what counts positions asks `share_of`.

A block applies to calls in its own thread (its own context, see `contextvars`). Layers are identified by object
identity and are not modified, so a copy of a model is a different model. While a block is open in the process, compiled
models run uncompiled, since compiled code would skip the hooks.

Activation checkpointing repeats a layer's forward pass during backward. A repeated call goes through the same hooks as
the original call, in their `again` form, even if their blocks are closed by then, and in whatever thread it runs.
"""

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from regard.functional import attention, attention_and_perhaps_lse
from regard.scores import ScoringArguments as ScoringArguments
from regard.shapes import ShapeError


class Heads(NamedTuple):
    """Query, key and value after projection, head split, rotary positions and cache."""

    query: Tensor
    key: Tensor
    value: Tensor


Result = tuple[Tensor, Tensor | None]
"""Output [batch, heads, query_len, value_dim], and lse [batch, heads, query_len] if it was computed anyway."""

Attend = Callable[[Heads, ScoringArguments], Result]
Hook = Callable[[nn.Module, Attend], Attend]


class Compute:
    """Attention itself, inside all hooks: bit-identical to a layer without them."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout = dropout

    def __call__(self, heads: Heads, scoring: ScoringArguments) -> Result:
        return attention_and_perhaps_lse(*heads, **scoring, dropout=self.dropout)


def attend(
    layer: nn.Module, heads: Heads, scoring: ScoringArguments, dropout: float = 0.0, compute: Compute | None = None
) -> Tensor:
    """Attention for the heads of a layer, through the hooks that are open around it.

    Shapes: [batch, heads, query_len, value_dim].
    Args:
        layer: the calling module. dropout: probability that a weight is dropped.
        compute: replaces attention itself, if more than its output is needed; None: attention with that dropout.
    """
    if _active:
        return _through_hooks(layer, heads, scoring, dropout, compute)
    return _alone(heads, scoring, dropout, compute)


def alone() -> bool:
    """Whether no hook is open in this process."""
    return not _active


def _alone(heads: Heads, scoring: ScoringArguments, dropout: float, compute: Compute | None) -> Tensor:
    return attention(*heads, **scoring, dropout=dropout) if compute is None else compute(heads, scoring)[0]


class Share(NamedTuple):
    """The tokens that this process holds of a text, where other processes hold the rest.

    Attributes:
        length: tokens of the whole text. ranges: positions of those held, in order.
    """

    length: int
    ranges: tuple[range, ...]

    def check(self, owner: str, length: int) -> None:
        """Raises where a model does not get as many tokens as this process holds."""
        held = sum(map(len, self.ranges))
        if length != held:
            raise ShapeError(
                f"{owner}: this rank holds {held} of the {self.length} tokens, got {length}; cut what the model reads: "
                "shards.take(tokens, rank, dim=1)"
            )

    def positions(self, device: torch.device | None = None) -> Tensor:
        """The positions of the tokens held: int64 [tokens]."""
        return torch.cat([torch.arange(0), *(torch.arange(part.start, part.stop) for part in self.ranges)]).to(device)


class Block:
    """An open ``with hooked(...)``.

    Attributes:
        elsewhere: whether one of the layers was called in another thread, where the block is not open.
    """

    def __init__(
        self, layers: Iterable[nn.Module], hook: Hook, again: Hook | None, innermost: bool, share: Share | None
    ) -> None:
        self.layers = {id(layer): layer for layer in layers}  # held, so that their ids are not reused
        self.hook, self.again, self.innermost, self.share = hook, again, innermost, share
        self.open, self.elsewhere = True, False


@contextmanager
def hooked(
    layers: Iterable[nn.Module],
    hook: Hook,
    *,
    again: Hook | None = None,
    innermost: bool = False,
    share: Share | None = None,
) -> Iterator[Block]:
    """Puts a hook around the attention of some layers while the ``with`` block runs, in this thread.

    With several blocks, the hook of the inner block wraps that of the outer block. `innermost` hooks are applied next
    to attention itself, that of the inner block nearest.

    Args:
        again: the hook for calls that activation checkpointing repeats in the backward pass; it must compute the same
            as `hook`, and keep nothing. None: attention is repeated without a hook.
        share: the tokens that these modules (not only attention layers) get of a longer text. No other block may then
            apply to the same layers: heads are those of the share, the mask is that of the whole.

    >>> import regard
    >>> layer = regard.MultiHeadAttention(8, 2, output=False)
    >>> def silent(layer, attend):
    ...     return lambda heads, scoring: (0 * attend(heads, scoring)[0], None)
    >>> with hooked([layer], silent):
    ...     output = layer(torch.randn(1, 5, 8))
    >>> bool(output.any())
    False
    """
    block = Block(layers, hook, again, innermost, share)
    try:
        _blocks.set((*(other for other in _blocks.get() if other.open), block))
        _opened(block)
        yield block
    finally:
        block.open = False
        _blocks.set(tuple(other for other in _blocks.get() if other is not block))
        _closed(block)


_blocks: ContextVar[tuple[Block, ...]] = ContextVar("regard.hooks", default=())
"""The blocks of this context, outer ones first. It may hold blocks that were closed in another context."""

_everywhere: list[Block] = []
"""The open blocks of all threads."""

_repeats: dict[int, tuple[weakref.ref[Any], tuple[Block, ...]]] = {}
"""The blocks that applied to the calls of a checkpoint, by its id, for when it is repeated."""

_active = False
"""Whether there is any of either. A constant for compiled code, which is recompiled when it changes."""

_lock = threading.RLock()
_uncompiled: Any = None


def _opened(block: Block) -> None:
    with _lock:
        _everywhere.append(block)
        _settle()


def _closed(block: Block) -> None:
    with _lock:
        if block in _everywhere:
            _everywhere.remove(block)
        _settle()


def _settle() -> None:
    """Updates everything that depends on which blocks are open."""
    global _active, _uncompiled
    _active = bool(_everywhere or _repeats)
    try:
        if _everywhere and _uncompiled is None and "torch._dynamo" in sys.modules:  # else nothing was compiled
            _uncompiled = torch.compiler.set_stance("force_eager")
        elif not _everywhere and _uncompiled is not None:
            _uncompiled.__exit__(None, None, None)
            _uncompiled = None
    except RuntimeError:  # inside a compiled function, where the hooks cause a graph break
        pass


def _through_hooks(
    layer: nn.Module, heads: Heads, scoring: ScoringArguments, dropout: float, compute: Compute | None
) -> Tensor:
    here, repeated = _around(layer)
    if not here:
        return _alone(heads, scoring, dropout, compute)
    if len(here) > 1 and any(block.share is not None for block in here):
        raise ValueError(
            "regard.parallel.sharded: record, gather, intervene and another sharded block cannot be combined with it: "
            "they would see one rank's tokens as if they were all; open one of the blocks at a time"
        )
    call: Attend = compute or Compute(dropout)
    for block in [b for b in reversed(here) if b.innermost] + [b for b in here if not b.innermost]:
        hook = block.again if repeated else block.hook
        call = call if hook is None else hook(layer, call)
    if isinstance(call, Compute):  # no hook wraps this layer
        return _alone(heads, scoring, dropout, compute)
    return call(heads, scoring)[0]


_through_hooks._torchdynamo_disable = True  # type: ignore[attr-defined]
_through_hooks._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "regard's hooks (record, gather, intervene) run uncompiled; call torch.compile before the with block"
)


def _around(module: nn.Module) -> tuple[list[Block], bool]:
    """The blocks that apply to a module's call, outer ones first, and whether a checkpoint repeats the call."""
    forward, repeated = checkpoints()
    if repeated is None:
        blocks = tuple(block for block in _blocks.get() if block.open)
        if len(_everywhere) > len(blocks):
            for other in list(_everywhere):
                other.elsewhere |= other not in blocks and id(module) in other.layers
    else:
        _, blocks = _repeats.get(id(repeated), (None, ()))
    for checkpoint in forward:
        _remember(checkpoint, tuple(block for block in blocks if block.again is not None))
    return [block for block in blocks if id(module) in block.layers], repeated is not None


def share_of(module: nn.Module) -> Share | None:
    """The share of the text that a module gets in this process; None for all of it."""
    return _share_of(module) if _active else None


def _share_of(module: nn.Module) -> Share | None:
    kept = (block for _, blocks in list(_repeats.values()) for block in blocks)
    if all(block.share is None for block in (*_everywhere, *kept)):  # the stack need not be looked at
        return None
    return next((block.share for block in reversed(_around(module)[0]) if block.share is not None), None)


_share_of._torchdynamo_disable = True  # type: ignore[attr-defined]


# --- activation checkpointing -----------------------------------------------------------------------------------------

_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


def checkpoints() -> tuple[list[Any], Any]:
    """The checkpoints in whose forward pass the caller runs, inner ones first; and the one that is being repeated for
    the backward pass, or None.

    A checkpoint is identified by torch's own object: the context of a `torch.autograd.Function` that runs its module
    without gradients and repeats it in backward (``use_reentrant=True``, and other libraries), or the frame of
    ``use_reentrant=False``. They are found on the call stack, since torch has no API for this.
    """
    forward: list[Any] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is _CHECKPOINT:
            generator = frame.f_locals.get("gen")
            state = None if generator is None else generator.gi_frame.f_locals.get("new_frame")
            if state is not None:  # None if no gradient is recorded
                forward.append(state)
        elif code.co_name == "unpack_hook" and code.co_filename == _CHECKPOINT.co_filename:
            return forward, frame.f_locals["frame"]
        elif code.co_name in ("forward", "backward") and code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals["ctx"]
            if isinstance(context, torch.autograd.function.FunctionCtx):
                if code.co_name == "backward":
                    return forward, context
                forward.append(context)
        frame = frame.f_back
    return forward, None


def loses_gradients() -> bool:
    """Whether the caller's results get no gradient although the model's output does: inside the forward pass of a
    `torch.autograd.Function`, such as activation checkpointing with ``use_reentrant=True``."""
    if torch.is_grad_enabled():
        return False
    return any(getattr(checkpoint, "next_functions", ()) for checkpoint in checkpoints()[0])


def _remember(checkpoint: Any, blocks: tuple[Block, ...]) -> None:
    """Keeps the blocks needed to repeat a checkpoint, for as long as torch keeps the checkpoint."""
    key = id(checkpoint)
    if not blocks:
        return
    with _lock:
        known = _repeats.get(key)
        if known is None:
            _repeats[key] = weakref.ref(checkpoint, lambda _: _forget(key)), blocks
        elif known[1] != blocks:
            _repeats[key] = known[0], known[1] + tuple(block for block in blocks if block not in known[1])


def _forget(key: int) -> None:
    global _active
    with _lock:
        _repeats.pop(key, None)
        _active = bool(_everywhere or _repeats)
