"""`attention` over many processes: every rank holds a shard of the sequence and gets the rows of its queries."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard import hints
from regard.biases import Bias
from regard.graphs import uncompiled
from regard.hints import hinted
from regard.kernels.call import Call
from regard.masks import Mask, check_mask
from regard.numerics import without_autocast
from regard.parallel import heads, passes
from regard.parallel.agreement import agree
from regard.parallel.channel import APART, DEFAULT_TIMEOUT, Channel, check_first_order
from regard.parallel.exchange import plan_exchange
from regard.parallel.fingerprint import fingerprint, of_mask
from regard.parallel.heads import Deal, heads_pay
from regard.parallel.passes import ShardedCall
from regard.parallel.shards import Shards, check_shards
from regard.reference import AttentionOutput
from regard.scores import Additive
from regard.shapes import ShapeError, check_attention, kind
from regard.validation import check_call

TAGS = 16
"""Tags of one call's messages: more than either exchange has kinds of them."""


@hinted(hints.ATTENTION)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    additive: Additive | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    shards: Shards | None = None,
    key_shards: Shards | None = None,
    group: object = None,
    timeout: float = DEFAULT_TIMEOUT,
    exchange: str = "auto",
) -> Tensor:
    """`regard.attention` of a sequence that lies in shards on many ranks: the rows of this rank's queries.

        attention(shards.take(q, rank), ...) == shards.take(regard.attention(q, k, v, ...), rank)

    Every rank of the group calls it, in the same order as other calls on this group. Keys and values travel to the
    ranks whose queries may see them; what nobody on a rank can see is not sent to it. Gradients of query, key and value
    are those of the rank's own tokens. Sink, bias and additive are the same on all ranks, and each rank gets its own
    queries' share of their gradients: summed over the ranks (as data parallelism does for parameters) they are whole.

    Shapes:
        query [batch, heads, query_len of this rank, head_dim], key [batch, kv_heads, key_len of this rank, head_dim],
        value [batch, kv_heads, key_len of this rank, value_dim] -> [batch, heads, query_len of this rank, value_dim].
    Args:
        mask, bias: of the whole sequence: positions, lengths and per-token data count over all ranks.
        generator: where the seed of dropout comes from; that of rank 0 decides, for all ranks.
        shards: which positions each rank's queries are; None: consecutive ones, in the order of the ranks.
        key_shards: the same for keys; None: as for queries, or consecutive ones where `shards` is None.
        group: a process group or a device mesh of one axis; None for all processes.
        timeout: seconds to wait for another rank.
        exchange: what travels: "keys" to the queries that may see them; "heads", of all tokens, each to the rank that
            computes it, which needs kv_heads that the ranks divide; "auto", whichever moves fewer numbers.
        others: as in `regard.attention`.
    Raises:
        ParallelError: no process group; ranks whose calls differ, with what differs; a rank that does not answer.
        ShapeError, TypeError, ValueError: as `regard.attention`, on every rank that is to blame; the others get a
            ParallelError with the same text.
    """
    found: AttentionOutput = _attend(
        "parallel.attention", query, key, value, mask, bias, scale, softcap, sink, additive, dropout, generator, shards,
        key_shards, group, timeout, exchange=exchange, wants_lse=False,
    )  # fmt: skip
    return found.output


@hinted(hints.ATTENTION)
def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    additive: Additive | None = None,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    shards: Shards | None = None,
    key_shards: Shards | None = None,
    group: object = None,
    timeout: float = DEFAULT_TIMEOUT,
    exchange: str = "auto",
) -> AttentionOutput:
    """`attention`, and the log-sum-exp of each of this rank's queries over the keys of all ranks.

    Takes the arguments of `attention` and raises what it raises.

    Shapes:
        lse [batch, heads, query_len of this rank], natural logarithm, float32 or wider.
    """
    found: AttentionOutput = _attend(
        "parallel.attention_with_lse", query, key, value, mask, bias, scale, softcap, sink, additive, dropout,
        generator, shards, key_shards, group, timeout, exchange=exchange, wants_lse=True,
    )  # fmt: skip
    return found


class AgreedCall(NamedTuple):
    """A call that all ranks make.

    Attributes:
        tag: of its messages, the first of several. call: the whole call, whose tensors stand for their shapes alone.
        queries, keys: which positions each rank holds.
    """

    channel: Channel
    tag: int
    call: Call
    queries: Shards
    keys: Shards


def agree_on_call(
    function: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    sink: Tensor | None,
    additive: Additive | None,
    dropout: float,
    generator: torch.Generator | None,
    shards: Shards | None,
    key_shards: Shards | None,
    group: object,
    timeout: float,
    *,
    exchange: str = "keys",
    more: str = "",
) -> AgreedCall:
    """The gate: checks the arguments of this rank, and that all ranks make the same call.

    Args:
        more: what else must be equal on all ranks.
    """
    channel = Channel(function, group, timeout)
    three = query, key, value

    def whole_call(queries: Shards, keys: Shards) -> Call:
        """The call of the whole sequence, checked; its tensors stand for their shapes alone."""
        for name, tensor, of in (("query", query, queries), ("key", key, keys)):
            if tensor.shape[2] != of.size(channel.rank):
                raise ShapeError(
                    f"{function}: {name} must hold the {of.size(channel.rank)} positions of rank {channel.rank} in "
                    f"{of!r}, got {name}_len={tensor.shape[2]}"
                )
        q, k, v = (_of_length(t, of.length) for t, of in zip(three, (queries, keys, keys), strict=True))
        return check_call(function, q, k, v, mask, bias, scale, softcap, sink, additive, dropout, generator, True)

    def check() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
        grid = check_attention(function, query, key, value)
        if mask is not None:
            check_mask(function, "mask", mask)
        if exchange not in ("auto", "keys", "heads"):
            raise ValueError(f'{function}: exchange must be "auto", "keys" or "heads", got {kind(exchange)}')
        if exchange == "heads" and key.shape[1] % channel.ranks:
            raise ShapeError(
                f'{function}: exchange="heads" needs kv_heads that the ranks divide, got kv_heads={key.shape[1]} and '
                f"{channel.ranks} ranks"
            )
        found = None
        if shards is not None:
            queries = check_shards(function, "shards", shards, channel.ranks)
            found = whole_call(queries, queries if key_shards is None else
                               check_shards(function, "key_shards", key_shards, channel.ranks))  # fmt: skip
        elif key_shards is not None:
            raise TypeError(f"{function}: key_shards needs shards")
        checked.append(found)
        learns = torch.is_grad_enabled()
        shown = {
            "batch": grid.batch, "heads": grid.heads, "kv_heads": key.shape[1], "head_dim": query.shape[3],
            "value_dim": value.shape[3], "dtype": query.dtype, "mask": repr(mask), "bias": kind(bias),
            "scale": scale, "softcap": softcap, "sink": kind(sink), "additive": kind(additive), "dropout": dropout,
            "exchange": exchange, "more": more, "shards": repr(shards), "key_shards": repr(key_shards),
            "gradients of query, key, value": [learns and tensor.requires_grad for tensor in three],
        }  # fmt: skip
        prints = {
            "mask": of_mask(mask),
            "bias": fingerprint(bias),
            "sink": fingerprint(sink),
            "additive": fingerprint(None if additive is None else additive.v),
            "shards": fingerprint(None if shards is None else shards.ranges),
            "key_shards": fingerprint(None if key_shards is None else key_shards.ranges),
        }
        seed = 0 if found is None or found.dropout is None else int(found.dropout.seed)
        return shown, prints, [seed, query.shape[2], key.shape[2]]

    checked: list[Call | None] = []
    agreed = agree(channel, check, told=3)
    (call,), seed = checked, agreed.own[0][0]
    if call is None:
        shards, key_shards = (Shards.of_sizes([row[n] for row in agreed.own]) for n in (1, 2))
        both = shards, key_shards

        def check_whole() -> tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]:
            checked[:] = [whole_call(*both)]
            dropped = checked[0].dropout if checked[0] is not None else None
            return {}, {}, [0 if dropped is None else int(dropped.seed)]

        ((seed,), *_) = agree(channel, check_whole, told=1).own
        (call,) = checked
    assert call is not None
    assert shards is not None
    dropped = None if call.dropout is None else replace(call.dropout, seed=seed)
    whole = call._replace(dropout=dropped)
    return AgreedCall(channel, TAGS * agreed.number, whole, shards, key_shards or shards)


@uncompiled(APART)
def _attend(
    function: str, query: Tensor, key: Tensor, value: Tensor, *others: Any, exchange: str, wants_lse: bool
) -> AttentionOutput:
    """The call, with `others` as `agree_on_call` takes them."""
    channel, tag, call, queries, keys = agree_on_call(function, query, key, value, *others, exchange=exchange)
    three = query, key, value
    sizes = key.shape[1], query.shape[3], value.shape[3]
    if exchange == "heads" or (exchange == "auto" and heads_pay(call.scoring, queries, keys, *sizes)):
        deal = Deal(channel, tag)
        with without_autocast(query.device):
            output, lse = heads.attend(deal, *three, call.scoring, call.dropout, queries, keys, wants_lse)
        return AttentionOutput(output, query.new_empty(0) if lse is None else lse)
    sharded = ShardedCall(
        channel,
        tag,
        call.scoring,
        call.dropout,
        plan_exchange(call.scoring.mask_or_everything, queries, keys, channel.rank),
        learns_keys=torch.is_grad_enabled() and (key.requires_grad or value.requires_grad),
    )
    output, lse = _Sharded.apply(sharded, *three, call.scoring.sink, *call.scoring.learned())  # type: ignore[no-untyped-call]
    return AttentionOutput(output.to(query.dtype), lse)


def _of_length(tensor: Tensor, length: int) -> Tensor:
    """A tensor of another length that takes no memory, for what asks only for shapes."""
    return tensor.new_zeros(1).expand(*tensor.shape[:2], length, tensor.shape[3])


class _Sharded(torch.autograd.Function):
    """One rank's share of a call, as a differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, call: ShardedCall, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, *learned: Tensor
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(query.device):
            output, lse = passes.forward(call, query, key, value, sink)
        ctx.call = call
        ctx.save_for_backward(query, key, value, sink, output, lse, *learned)
        ctx.set_materialize_grads(False)
        return output, lse

    @staticmethod
    @uncompiled(APART)
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        check_first_order(ctx.call.channel.function)
        query, key, value, sink, output, lse, *learned = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        with without_autocast(query.device):
            *three, of_sink, more = passes.backward(
                ctx.call, query, key, value, sink, output, lse, grad_output, grad_lse
            )
        return (
            None,
            *(grad.to(tensor.dtype) for grad, tensor in zip(three, (query, key, value), strict=True)),
            of_sink,
            *(None if grad is None else grad.to(tensor.dtype) for grad, tensor in zip(more, learned, strict=True)),
        )
