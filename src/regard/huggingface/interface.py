"""What transformers calls in place of its own attention."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import hooks
from regard.biases import Bias, as_bias
from regard.functional import check_call
from regard.graphs import exporting, tracing
from regard.hooks import Heads, ScoringArguments
from regard.huggingface.gradients import ComputeByWeights
from regard.huggingface.masks import LazyMask
from regard.huggingface.symbols import GraphMask
from regard.masks import Causal, Dense, Document, Mask, Window
from regard.reference import all_weights

HARMLESS = {
    "attention_mask", "cache_params", "cache_position", "cross_attention_mask", "deterministic", "embedding_output",
    "encoder_attention_mask", "encoder_hidden_states", "input_ids", "inputs_embeds", "interpolate_pos_encoding",
    "labels", "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "token_type_ids", "use_cache",
}  # fmt: skip
"""Arguments that pass through transformers' attention layers and are no part of a score. Any other raises."""


_collector: Any = None
"""Where transformers keeps what it collects while a model runs; None in versions that collect nothing."""


def find_collector() -> None:
    """Looks the collector up once: an import in every layer of every step costs more than many checks."""
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
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in place of its own attention; the names are its own.

    Shapes:
        query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim], value [batch, kv_heads,
        key_len, value_dim] -> output [batch, query_len, heads, value_dim], and `LazyWeights` where they are asked for.
    Args:
        attention_mask: a `LazyMask`; a caller's own bool (True = may attend) or floating (added) tensor of four axes;
            or None, which means causal from the top left corner if the layer is causal, and else everything.
        scaling, softcap: as scale and softcap of `regard.attention`. dropout: in training only.
        is_causal: for a call without a mask; None: what ``module.is_causal`` says (True where it says nothing).
        sliding_window: for information where there is a mask, which holds the window already.
        s_aux: a sink's logit for each head. position_bias: added to the scores.
        others: those in `HARMLESS` are passed over, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` keep packed texts apart.
    Raises:
        ValueError: an argument that is not understood and may change the result; continuous batching.
        ShapeError: a mask for other lengths.
    """
    if cache is not None:
        raise ValueError(
            "regard: continuous batching (a paged cache) is not supported; use generate(), with padding or packing"
        )
    bounds = others.pop("cu_seq_lens_q", None), others.pop("cu_seq_lens_k", None)
    if not others.keys() <= HARMLESS:
        _refuse_unknown(others)
    query, key, value = _alike(query, key, value)
    mask, bias = _given(attention_mask, query, key)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _without_mask(query.shape[2], key.shape[2], causal, sliding_window)
    if bounds != (None, None):
        mask = _joined(mask, _packed(*bounds, query, key))
    if position_bias is not None:
        bias = position_bias if bias is None else as_bias(position_bias) + bias
    heads = Heads(query, key, value)
    scoring: ScoringArguments = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sink": s_aux, "additive": None
    }  # fmt: skip
    asked_for, dropped = _weights_are_asked_for(others), dropout if module.training else 0.0
    compute = ComputeByWeights(dropped) if asked_for and not tracing() else None
    if mask is not None and _by_mask_alone(attention_mask, scoring, mask, dropped) and compute is None:
        output = cast(LazyMask, attention_mask).attend(*heads, scaling, softcap)
    else:
        output = hooks.attend(module, heads, scoring, dropped, compute)
    weights = None
    if asked_for:  # a graph looks at nothing, so it has all of them
        weights = _all_weights(heads, scoring) if compute is None else compute.weights(heads, scoring)
    return output.transpose(1, 2).contiguous(), weights


def _by_mask_alone(given: object, scoring: ScoringArguments, mask: Mask, dropout: float) -> bool:
    """Whether a call is the mask's and the tensors' alone, and nothing stands around it: it may be like the one before.

    On another device than the mask's own, or with packed texts beside it, `mask` is another one.
    """
    if not isinstance(given, LazyMask) or given.mask is not mask or dropout or torch.compiler.is_compiling():
        return False
    if scoring["bias"] is not None or scoring["sink"] is not None:
        return False
    return hooks.alone()


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
    """Of one dtype under autocast, where a norm may leave some in float32; of one batch, where a query is learnt."""
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


def _given(given: Tensor | None, query: Tensor, key: Tensor) -> tuple[Mask | None, Bias | Tensor | None]:
    """A call's mask, or what it adds to the scores."""
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
    return (Dense(given), None) if given.dtype == torch.bool else (None, given)


def _without_mask(query_len: int, key_len: int, causal: bool, window: int | None) -> Mask | None:
    """What transformers means by no mask.

    Its own masks are never None here (`mask_for_transformers` makes none), so it is a model that builds none, or a
    caller's own call. Causal is from the top left corner, as in its "sdpa": the first query meets the first key.
    """
    if not causal:
        # models count a window in both directions in more than one way, so only one that hides nothing is understood
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
    """Texts laid end to end in one row, as flash-attn has them: where each begins, and the end of the last."""
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
    """Whether the call was made with ``output_attentions=True``: many layers are told; of others transformers knows."""
    if others.get("output_attentions"):
        return True
    collected: Mapping[str, Any] = (None if _collector is None else _collector.get()) or {}
    return any("attentions" in name for name in collected)
