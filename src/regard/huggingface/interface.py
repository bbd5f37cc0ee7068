"""The attention function that transformers calls instead of its own."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import hooks
from regard.biases import Bias, as_bias
from regard.graphs import as_it_stands, exporting, tracing
from regard.hooks import Heads, ScoringArguments
from regard.huggingface.gradients import ComputeByWeights
from regard.huggingface.masks import Cells, LazyMask, knows_bools
from regard.huggingface.selected import selected_cells
from regard.huggingface.symbols import GraphMask
from regard.kernels.hidden import Hidden
from regard.masks import Causal, Dense, Document, Mask, Window
from regard.numerics import all_zero, wide
from regard.one_query import EVERY_KEY, Seen, attend_one
from regard.reference import all_weights
from regard.validation import check_call

HARMLESS = {
    "attention_mask", "cache_params", "cache_position", "cross_attention_mask", "deterministic", "embedding_output",
    "encoder_attention_mask", "encoder_hidden_states", "input_ids", "inputs_embeds", "interpolate_pos_encoding",
    "labels", "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "token_type_ids", "use_cache",
}  # fmt: skip
"""Arguments that pass through transformers' attention layers and do not affect scores. Any other raises an error."""


_collector: Any = None
"""The context variable of transformers for collected outputs; None in versions without it."""


def find_collector() -> None:
    """Looks up the collector once: an import in every layer of every step is slow."""
    global _collector
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return
    _collector = _active_collector


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: object = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls; the names of its arguments are those of transformers.

    Shapes:
        query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim], value [batch, kv_heads,
        key_len, value_dim] -> output [batch, query_len, heads, value_dim], and `LazyWeights` if weights are requested.
    Args:
        attention_mask: a `LazyMask`; a bool (True = may attend) or floating (added) tensor of four axes; or None, which
            means causal, aligned at the top left, if the layer is causal, and otherwise no mask.
        scaling, softcap: as scale and softcap of `regard.attention`. dropout: in training only.
        is_causal: for a call without a mask; None: ``module.is_causal``, or True if that does not exist.
        sliding_window: ignored if there is a mask, which includes the window.
        s_aux: a sink logit for each head. position_bias: added to the scores.
        indices, block_indices: the keys that each query may see, of those that the mask allows (`selected_cells`).
        others: those in `HARMLESS` are ignored; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` separate packed texts.
    Raises:
        ValueError: an unknown argument that may change the result; continuous batching.
        ShapeError: a mask for other lengths.
    """
    if cache is not None:
        raise ValueError(
            "regard: continuous batching (a paged cache) is not supported; use generate(), with padding or packing"
        )
    if position_bias is not None and query.shape[2] > 1 and _adds_nothing(position_bias, query.shape[2], key.shape[2]):
        position_bias = None  # of one query, to add it takes no longer than to ask
    if _alone(others, dropout and module.training):
        results, added, selects = None, position_bias, indices is not None or block_indices is not None
        if type(attention_mask) is LazyMask and not selects:
            results = attention_mask.attend(query, key, value, scaling, softcap, s_aux, added)
        elif query.shape[2] == 1 and (
            sliding_window is None or sliding_window >= key.shape[2]
            if attention_mask is None
            else isinstance(attention_mask, Tensor)
        ):
            seen: Seen | None = EVERY_KEY
            if attention_mask is not None:
                seen, added = _seen_by_one(attention_mask, query, key, added)
            if seen is not None:
                chosen = selected_cells(module, query, key, indices, block_indices, wide(query.dtype))
                if chosen is not None:
                    added = chosen if added is None else added + chosen
                results = attend_one(query, key, value, scaling, softcap, s_aux, added, seen)
        if results is not None:
            return results[0].transpose(1, 2).contiguous(), None
    bounds = others.pop("cu_seq_lens_q", None), others.pop("cu_seq_lens_k", None)
    if not others.keys() <= HARMLESS:
        _refuse_unknown(others)
    query, key, value = _alike(query, key, value)
    mask, bias = _given(module, attention_mask, query, key)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        share = hooks.share_of(module)
        lengths = (query.shape[2], key.shape[2]) if share is None else (share.length, share.length)
        mask = _without_mask(*lengths, causal, sliding_window)
    if bounds != (None, None):
        mask = _joined(mask, _packed(*bounds, query, key))
    chosen = selected_cells(module, query, key, indices, block_indices)
    mask = _joined(mask, None if chosen is None else Dense(chosen))
    if position_bias is not None:
        bias = position_bias if bias is None else as_bias(position_bias) + bias
    heads = Heads(query, key, value)
    scoring: ScoringArguments = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sink": s_aux, "additive": None
    }  # fmt: skip
    asked_for, dropped = _weights_are_asked_for(others), dropout if module.training else 0.0
    compute = ComputeByWeights(dropped) if asked_for and not tracing() else None
    output = hooks.attend(module, heads, scoring, dropped, compute)
    weights = None
    if asked_for:  # a graph cannot compute them on demand, so it computes all
        weights = _all_weights(heads, scoring) if compute is None else compute.weights(heads, scoring)
    return output.transpose(1, 2).contiguous(), weights


def _seen_by_one(given: Tensor, query: Tensor, key: Tensor, bias: Tensor | None) -> tuple[Seen | None, Tensor | None]:
    """What the only query of a call sees under the mask that it is given, and what is added to its scores. Nothing for
    what it sees if the ordinary way has to find out."""
    if type(given) is LazyMask:
        return (given.seen_by_one(query, key) if given.bias is None else None), bias
    (batch, heads, _, _), key_len = query.shape, key.shape[2]
    fits = given.dim() == 4 and given.shape[2:] == (1, key_len) and given.is_cpu
    if not (fits and given.shape[0] in (1, batch) and given.shape[1] in (1, heads)):
        return None, bias
    if given.dtype == torch.bool:
        return Seen(None, Hidden(given.as_subclass(Tensor), hides=True)), bias
    return (EVERY_KEY, given) if bias is None else (None, bias)


def _adds_nothing(bias: Tensor, query_len: int, key_len: int) -> bool:
    """Whether a bias is known to be 0, as that of T5's cross attention, which every layer would add to its scores."""
    return tuple(bias.shape[2:]) == (query_len, key_len) and all_zero(bias)


def _alone(others: Mapping[str, Any], dropout: float) -> bool:
    """Whether a call consists of tensors and its mask only, without hooks, so that it may repeat an earlier one."""
    if dropout or not hooks.alone() or not as_it_stands():
        return False
    return others.keys() <= HARMLESS and not _weights_are_asked_for(others)


def _all_weights(heads: Heads, scoring: ScoringArguments) -> Tensor:
    call = check_call("attention", *heads, **scoring)
    return all_weights(heads.query, heads.key, call.scoring).to(heads.query.dtype)


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    unknown = [name for name, value in others.items() if value is not None and name not in HARMLESS]
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(
            f"regard: the attention layer was given {names}, and regard does not know what that does to "
            "the scores; if it does nothing to them, add the name to regard.huggingface.HARMLESS"
        )


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Converts to one dtype under autocast, where norms may leave some in float32; expands a learned query's batch."""
    if query.dtype == key.dtype == value.dtype and query.shape[0] == key.shape[0] == value.shape[0]:
        return query, key, value
    device = query.device.type
    if len({query.dtype, key.dtype, value.dtype}) > 1 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    return query, key, value


def _given(
    module: nn.Module, given: Tensor | None, query: Tensor, key: Tensor
) -> tuple[Mask | None, Bias | Tensor | None]:
    """The mask of a call, or the bias; in that, the least number of a mask made for a model of numbers hides."""
    if given is None:
        return None, None
    if isinstance(given, (LazyMask, GraphMask)):
        mask = given.of_call(query.shape[0], query.shape[2], key.shape[2], query.device)
        added = given.bias if isinstance(given, LazyMask) else None
        return mask, None if added is None else added.to(query.device)
    if (
        not isinstance(given, Tensor)
        or given.dim() != 4
        or not (given.dtype == torch.bool or given.is_floating_point())
    ):
        got = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(
            "regard: attention_mask must be bool (True = may attend) or floating (added to the scores) "
            f"[batch, heads, query_len, key_len] where a layer gets it, got {got}"
        )
    if isinstance(given, Cells):
        given = given.as_subclass(Tensor)
    if given.dtype == torch.bool:
        return Dense(given), None
    config = getattr(module, "config", None)
    if config is not None and not knows_bools(type(config)):
        given = given.masked_fill(given <= torch.finfo(given.dtype).min, -math.inf)
    return None, given


def _without_mask(query_len: int, key_len: int, causal: bool, window: int | None) -> Mask | None:
    """The mask that transformers means by None.

    `mask_for_transformers` returns None only for one query that sees every key; otherwise the model builds no mask, or
    its caller passed None. Causal is aligned at the top left, as in its "sdpa": the first query sees the first key.
    """
    if not causal:
        # models define bidirectional windows in different ways, so only one that hides nothing is supported
        if window is not None and window < max(query_len, key_len):
            raise ValueError(
                f"regard: sliding_window={window} without a mask, in a layer that is not causal: pass the mask that "
                "holds the window"
            )
        return None
    offset = 0 if query_len > 1 else key_len - 1  # a single query is the last token
    mask = Causal(offset) if query_len > 1 else None
    return _joined(mask, None if window is None else Window(window, offset))


def _packed(query_bounds: Tensor | None, key_bounds: Tensor | None, query: Tensor, key: Tensor) -> Mask | None:
    """Texts concatenated in one row, as in flash-attn, from the start of each and the end of the last."""
    if query_bounds is None and key_bounds is None:
        return None
    if exporting():
        raise ValueError(
            "regard: cu_seq_lens_q and cu_seq_lens_k cannot be exported: a graph cannot ask where texts begin; give "
            "the model position_ids that begin anew with each text, or one text in each row and an attention_mask"
        )
    same = query_bounds is not None and key_bounds is not None and torch.equal(query_bounds, key_bounds)
    if not same or len(query) != 1 or not query.shape[2] == key.shape[2] == int(cast(Tensor, query_bounds)[-1]):
        raise ValueError(
            "regard: cu_seq_lens_q and cu_seq_lens_k must be equal and end at the length of one row that holds all "
            f"texts, got {query_bounds} and {key_bounds} for {len(query)} rows of {query.shape[2]} queries and "
            f"{key.shape[2]} keys"
        )
    starts = cast(Tensor, query_bounds)[1:-1].to(query.device)
    places = torch.arange(query.shape[2], device=query.device, dtype=starts.dtype)
    return Document(torch.searchsorted(starts.contiguous(), places, right=True))


def _joined(left: Mask | None, right: Mask | None) -> Mask | None:
    return right if left is None else left if right is None else left & right


def _weights_are_asked_for(others: Mapping[str, Any]) -> bool:
    """Whether weights are requested: by ``output_attentions=True``, or by transformers' collector of outputs."""
    if others.get("output_attentions"):
        return True
    collected: Mapping[str, Any] | None = None if _collector is None else _collector.get()
    return any("attentions" in name for name in collected) if collected else False
