"""regard inside transformers: one call, and every architecture on its attention interface runs on `regard.attention`.

    regard.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="regard")

Three things are handed over there, and each has its part below: *attention*, of the query, key and value of a layer
(`attend`); a *mask*, as a function of batch row, head, query and key, with lengths, beginnings and padding
(`mask_for_transformers`); and *weights*, which a layer returns beside its output and which end up in
``outputs.attentions`` (`LazyWeights`).

The mask is the heart. transformers builds masks of query_len x key_len from its mask functions. Here the function is
*read*: causal, window, chunk, packed texts, padding and what they are composed of become regard's own masks, whose
empty tiles cost nothing. Each such reading was compared with the function itself, cell by cell, before it is trusted;
a function that is not known, or no longer does what it did, is asked tile by tile instead: slower, and as exact.

What is not understood and would change the result raises an error.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from inspect import signature
from itertools import product
from operator import and_, or_
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from regard.biases import Bias, as_bias
from regard.layers import Attend, Heads, ScoringArguments
from regard.masks import EVERYTHING, Band, Causal, Chunk, Dense, Document, Mask, Not, Padding, Where, Window, indices
from regard.masks import And as Both
from regard.masks import Or as Either
from regard.observation import LARGEST, Observation, observe
from regard.shapes import Grid, ShapeError

NAME = "regard"
"""What to pass as ``attn_implementation``."""

HARMLESS = {
    "attention_mask", "cache_params", "cache_position", "cross_attention_mask", "deterministic", "embedding_output",
    "encoder_attention_mask", "encoder_hidden_states", "input_ids", "inputs_embeds", "interpolate_pos_encoding",
    "labels", "logits_to_keep", "max_length_k", "max_length_q", "mm_token_type_ids", "num_items_in_batch",
    "output_attentions", "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "token_type_ids", "use_cache",
}  # fmt: skip
"""Arguments that pass through transformers' attention layers and are no part of a score. Any other raises."""


def register() -> None:
    """Makes ``attn_implementation="regard"`` known to transformers; a second call changes nothing.

    Raises:
        ImportError: transformers is missing, or older than 5.4, which gives masks in another way.

    Then ``AutoModel.from_pretrained(name, attn_implementation="regard")``; for a model that is there already,
    ``model.set_attn_implementation("regard")``.
    """
    needed = "regard.huggingface needs transformers, 5.4 or newer: pip install regard[hf]"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils
    except ImportError as error:
        raise ImportError(f"{needed} ({error})") from error
    if "q_length" not in signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"{needed} (there is {__version__})")
    # Under the same key: a key that is known for attention alone loses padding and causality without a word. And not
    # compiled: what a kernel does depends on what the mask holds.
    AttentionInterface.register(NAME, torch.compiler.disable(attend))
    AttentionMaskInterface.register(NAME, torch.compiler.disable(mask_for_transformers))


# --- attention ----------------------------------------------------------------------------------------------------


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
    _refuse_unknown(others)
    query, key, value = _alike(query, key, value)
    mask, bias = _given(attention_mask, query, key)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = _without_mask(query.shape[2], key.shape[2], causal, sliding_window)
    if attention_mask is None or isinstance(attention_mask, LazyMask):
        mask = _joined(mask, _packed(*bounds, query, key))
    if position_bias is not None:
        bias = position_bias if bias is None else as_bias(position_bias) + bias
    heads = Heads(query, key, value)
    scoring: ScoringArguments = {
        "mask": mask, "bias": bias, "scale": scaling, "softcap": softcap, "sink": s_aux, "additive": None
    }  # fmt: skip
    compute, watcher = Attend(dropout if module.training else 0.0), getattr(module, "watcher", None)
    output = compute(heads, scoring) if watcher is None else watcher(heads, scoring, compute)
    weights = LazyWeights(heads, scoring) if _weights_are_asked_for(others) else None
    return output.transpose(1, 2).contiguous(), weights


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    unknown = sorted(name for name, value in others.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise ValueError(
            f"regard: the attention layer was given {', '.join(unknown)}, and regard does not know what that does to "
            "the scores; if it does nothing to them, add the name to regard.huggingface.HARMLESS"
        )


def _alike(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one dtype under autocast, where a norm may leave some in float32; of one batch, where a query is learnt."""
    device = query.device.type
    if len({query.dtype, key.dtype, value.dtype}) > 1 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch = max(len(query), len(key))
    query, key, value = (x.expand(batch, -1, -1, -1) if len(x) == 1 < batch else x for x in (query, key, value))
    return query, key, value


def _given(given: Tensor | None, query: Tensor, key: Tensor) -> tuple[Mask | None, Bias | Tensor | None]:
    """A call's mask, or what it adds to the scores."""
    if given is None:
        return None, None
    if isinstance(given, LazyMask):
        return given.of_call(len(query), query.shape[2], key.shape[2], query.device), None
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
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    collected: Mapping[str, Any] = _active_collector.get() or {}  # type: ignore[no-untyped-call]
    return any("attentions" in name for name in collected)


# --- what holds no numbers ----------------------------------------------------------------------------------------


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


def _setter(name: str) -> Any:
    return getattr(Tensor, name).__set__


# what may be asked without touching a number
_OUTSIDE = {
    Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size,
    Tensor.__len__, Tensor.__hash__, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed,
    Tensor.is_contiguous, Tensor.is_inference, _setter("requires_grad"),
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
# what may be done with a mask, for whatever does these means bools
_LOGICAL = {
    Tensor.contiguous, Tensor.clone, Tensor.__and__, Tensor.__rand__, Tensor.__or__, Tensor.__invert__,
    Tensor.logical_and, Tensor.logical_or, Tensor.logical_not, torch.logical_and, torch.logical_or, torch.logical_not,
    torch.cat, Tensor.__deepcopy__, Tensor.__reduce_ex__,
}  # fmt: skip
_INSIDE_PROPERTIES = {_getter(name) for name in ("T", "mT", "H", "mH", "real", "imag", "data")}
_IN_PLACE_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")}
_IN_PLACE_OPERATORS |= {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__"}


class Lazy(Tensor):
    """A tensor of four axes that holds no numbers. It knows its shape; whoever asks for more makes them, if few.

    Every function of torch takes it. What only asks about shape, dtype or device costs nothing; anything else works on
    `dense`, which refuses where that would be large. Nothing can be written into it.
    """

    @staticmethod
    def _empty(cls: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)

    def dense(self) -> Tensor:
        """All the numbers, as an ordinary tensor.

        Raises:
            ValueError: they are too many.
        """
        raise NotImplementedError

    def _advice(self) -> str:
        raise NotImplementedError

    def _check_size(self) -> None:
        if self.numel() > LARGEST:
            raise ValueError(
                f"regard: {type(self).__name__} {list(self.shape)} stands for {self.numel():,} numbers, which are not "
                f"made: more than {LARGEST:,}; {self._advice()}"
            )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OUTSIDE or (name == "__get__" and func not in _INSIDE_PROPERTIES):
                return func(*args, **kwargs)
            written = name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
            if (written and isinstance(args[0], Lazy)) or isinstance(kwargs.get("out"), Lazy):
                raise ValueError(f"regard: {name} would write into a tensor that holds no numbers; write into .dense()")
            if func in (Tensor.contiguous, Tensor.clone):
                return args[0]
            args, kwargs = tree_map_only(Lazy, lambda lazy: lazy.dense(), (args, kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable:
            raise ValueError(f"regard: {func} would write into a tensor that holds no numbers; write into .dense()")
        args, kwargs = tree_map_only(Lazy, lambda lazy: lazy.dense().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


# --- the mask -----------------------------------------------------------------------------------------------------


class LazyMask(Lazy):
    """A regard mask that transformers takes for its bool tensor [batch, 1, query_len, key_len], True = may attend.

    Attributes:
        mask: the mask, with every offset settled.
    """

    mask: Mask

    def __new__(cls, mask: Mask, shape: tuple[int, int, int], device: torch.device) -> "LazyMask":
        batch, query_len, key_len = shape
        made: LazyMask = cls._empty(cls, (batch, 1, query_len, key_len), torch.bool, device)
        made.mask = mask
        return made

    def __init__(self, mask: Mask, shape: tuple[int, int, int], device: torch.device) -> None:
        pass

    def of_call(self, batch: int, query_len: int, key_len: int, device: torch.device) -> Mask:
        """The mask for one layer's lengths, which must be those that it was made for."""
        rows, _, *lengths = self.shape
        if rows not in (1, batch) or lengths != [query_len, key_len]:
            raise ShapeError(
                f"regard: the mask is for [batch={rows}, query_len={lengths[0]}, key_len={lengths[1]}], the layer has "
                f"[{batch=}, {query_len=}, {key_len=}]"
            )
        return self.mask if device == self.device else _moved(self.mask, device)

    def dense(self) -> Tensor:
        self._check_size()
        batch, heads, query_len, key_len = self.shape
        bound = self.mask.bind(Grid(batch, heads, query_len, key_len, self.device))
        rows, columns = indices(range(query_len), self.device), indices(range(key_len), self.device)
        return bound.allowed(rows, columns).expand(self.shape)

    def _advice(self) -> str:
        return "ask .mask.allowed(queries, keys) for a rectangle"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.detach:
            return args[0]
        if func is Tensor.to:
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)
            if dtype in (None, torch.bool):
                return args[0]._on(device)
        if not (func in _OUTSIDE or func in _LOGICAL or getattr(func, "__name__", "") == "__get__"):
            # Above all a model that is not on the interface and adds what it takes for 0 and -inf to its scores.
            raise ValueError(  # not a TypeError, of which `+` would keep the words to itself
                f"regard: the model works on its mask itself ({getattr(func, '__name__', func)}), which regard cannot "
                'follow: is it on transformers\' attention interface? With attn_implementation="eager" it runs. '
                "(.dense() gives the mask's numbers)"
            )
        return super().__torch_function__(func, types, args, kwargs)

    def _on(self, device: torch.device | None) -> "LazyMask":
        if device is None or device == self.device:
            return self
        batch, _, query_len, key_len = self.shape
        return LazyMask(_moved(self.mask, device), (batch, query_len, key_len), device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.mask}, {list(self.shape)})"


def mask_for_transformers(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> LazyMask:
    """What transformers calls to have a mask made; the names are its own. Nothing of q_length x kv_length is made.

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: ``mask_function(batch, head, query, key) -> bool`` on positions; None: causal.
        attention_mask: bool [batch, length], True where a token is real; position 0 first. Keys beyond it are hidden.
        use_vmap: whether the function may be called on single numbers only.
        others: which of transformers' own short cuts are allowed: none is needed.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> mask_for_transformers(1, 4, 6, q_offset=2, mask_function=sliding_window_causal_mask_function(3))
    LazyMask(Band(2, None, offset=2) & Causal(offset=2), [1, 1, 4, 6])
    """
    _learn()
    device = torch.device(device)
    place = Place(int(q_offset), int(kv_offset), q_length, kv_length, batch_size, device, use_vmap)
    mask = Causal(place.offset) if mask_function is None else read(mask_function, place)
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ValueError(f"regard: padding must be [batch, length], got {list(attention_mask.shape)}")
        real = _from(attention_mask.to(device=device, dtype=torch.bool), place.key_start, kv_length)
        if not bool(real.all()):
            mask = mask & Padding(real)
    return LazyMask(mask, (batch_size, q_length, kv_length), device)


class Place(NamedTuple):
    """Which part of transformers' positions a mask is for, and how its function wants to be asked."""

    query_start: int
    key_start: int
    query_len: int
    key_len: int
    batch: int
    device: torch.device = torch.device("cpu")
    one_by_one: bool = False
    positions: Tensor | None = None
    """Positions of tokens of packed texts [batch, length], each text's rising by one from token to token."""

    @property
    def offset(self) -> int:
        """Position of query 0 where key 0 has position 0, as regard counts."""
        return self.query_start - self.key_start

    def per_token(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Ids of positions [batch, length] as those of the queries and those of the keys; one tensor if the same."""
        queries = ids[:, self.query_start : self.query_start + self.query_len]
        if (self.query_start, self.query_len) == (self.key_start, self.key_len):
            return queries, queries
        return queries, ids[:, self.key_start : self.key_start + self.key_len]


Inside = Mapping[str, Any]
"""What a mask function of transformers was made with: the variables that it closes over."""

Reading = Callable[[Inside, Place], Mask | None]
"""The mask that a known function stands for; None where it cannot be said."""


def read(function: Callable[..., Any], place: Place) -> Mask:
    """transformers' mask function as a mask: in closed form where it is known, asked tile by tile where it is not."""
    known = _KNOWN.get(_maker(function))
    mask = None if known is None else known.reading(_inside(function), place)
    return _asked(function, place) if mask is None else mask


def _maker(function: object) -> str:
    """The name of what makes such mask functions in transformers, if its reading is trusted; otherwise none."""
    code: CodeType | None = getattr(function, "__code__", None)
    return "" if code is None else _TRUSTED.get(code, "")


def _inside(function: Any) -> Inside:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _asked(function: Callable[..., Any], place: Place) -> Mask:
    """Any mask function, tile by tile."""

    def fn(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        asked_on = query.device  # another than the mask's, where a model is spread over several
        # transformers asks about one head, for all of them
        axes = [
            axis.to(place.device) for axis in (batch, head[:, :1], query + place.query_start, key + place.key_start)
        ]
        allowed = _one_by_one(function, *(axis.flatten() for axis in axes)) if place.one_by_one else function(*axes)
        return cast(Tensor, allowed).to(asked_on)

    fn.__name__ = getattr(function, "__name__", type(function).__name__)
    return Where(fn)


def _one_by_one(function: Callable[..., Any], *axes: Tensor) -> Tensor:
    """A function of four single numbers, for all of theirs: [batch, heads, rows, columns]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axis in reversed(range(4)):
        function = torch.vmap(function, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with TransformGetItemToIndex():  # lets such a function look into a tensor at a place that is itself a tensor
        return cast(Tensor, function(*axes))


def _read_alone(inside: Inside, place: Place) -> None:
    return None  # what begins anew with each text has a meaning beside what keeps the texts apart: `_in_packed_texts`


def _read_both(inside: Inside, place: Place) -> Mask:
    parts = inside["mask_functions"]
    masks = [_in_packed_texts(part, parts, place) or read(part, place) for part in parts]
    return reduce(and_, [mask for mask in masks if mask is not EVERYTHING] or [EVERYTHING])


def _read_either(inside: Inside, place: Place) -> Mask:
    return reduce(or_, [read(part, place) for part in inside["mask_functions"]])


def _in_packed_texts(function: Callable[..., Any], beside: tuple[Callable[..., Any], ...], place: Place) -> Mask | None:
    """A mask function of positions that begin anew with each packed text, beside one that keeps the texts apart.

    Inside a text those positions differ by as much as the tokens do, so a rule about differences reads as ever.
    """
    texts = [part for part in beside if _maker(part) == "packed_sequence_mask_function"]
    if _maker(function) != "remap_positions_for_packed_sequence" or len(texts) != 1:
        return None
    inside, ids = _inside(function), _inside(texts[0])["packed_sequence_mask"]
    rule, positions = inside["mask_function"], inside["position_ids"]
    changes, steps = ids.diff(), positions.diff()
    whole = place.query_start == place.key_start == 0 and place.query_len == place.key_len == ids.shape[1]
    if not whole or not bool(((changes > 0) | ((changes == 0) & (steps == 1))).all()):
        return None
    known = _KNOWN.get(_maker(rule))
    return None if known is None else known.reading(_inside(rule), place._replace(positions=positions))


def _read_causal(inside: Inside, place: Place) -> Mask:
    return Causal(place.offset)


def _read_everything(inside: Inside, place: Place) -> Mask:
    return EVERYTHING


def _read_window_behind(inside: Inside, place: Place) -> Mask:
    return Band(inside["sliding_window"] - 1, None, place.offset)


def _read_window_around(inside: Inside, place: Place) -> Mask:
    return Window(inside["sliding_window"] + 1, place.offset)  # theirs includes the distance that it names


def _read_chunk(inside: Inside, place: Place) -> Mask:
    size, left = inside["chunk_size"], inside["left_padding"].to(place.device)
    if place.positions is None and not bool((left + place.key_start).remainder(size).any()):
        return Chunk(size, place.offset)
    starts = (place.query_start, place.query_len), (place.key_start, place.key_len)
    if place.positions is not None:
        counted = [place.positions.to(place.device)] * 2
    else:
        counted = [torch.arange(start, start + length, device=place.device)[None] for start, length in starts]
    queries, keys = ((x - left[:, None]).div(size, rounding_mode="floor") for x in counted)
    return Document(queries) if starts[0] == starts[1] else Document(queries, keys)


def _read_texts(inside: Inside, place: Place) -> Mask | None:
    ids = inside["packed_sequence_mask"]
    if place.positions is not None or not _reaches(ids, place):
        return None
    queries, keys = place.per_token(ids)
    return Document(queries, None if keys is queries else keys)


def _read_blocks(inside: Inside, place: Place) -> Mask | None:
    ids = inside["block_sequence_ids"]
    if place.positions is not None or not _reaches(ids, place):
        return None
    queries, keys = place.per_token(ids)
    return Document(queries.masked_fill(queries < 0, -1), keys.masked_fill(keys < 0, -2))  # below 0: in no block


def _read_padding(inside: Inside, place: Place) -> Mask | None:
    real = inside["padding_mask"]
    if place.positions is not None or real.dtype != torch.bool or real.shape[1] < place.key_start + place.key_len:
        return None
    return Padding(_from(real, place.key_start, place.key_len))


def _reaches(ids: Tensor, place: Place) -> bool:
    """Whether there is an id for every query and every key."""
    return ids.shape[1] >= max(place.query_start + place.query_len, place.key_start + place.key_len)


def _from(real: Tensor, start: int, length: int) -> Tensor:
    """So many places of each row from a position on; those behind the end of the row hold no token."""
    part = real[:, start : start + length]
    return nn.functional.pad(part, (0, length - part.shape[1]), value=False)


class _Known(NamedTuple):
    """How to read the mask functions that one maker makes, and what to make examples of."""

    reading: Reading
    examples: tuple[tuple[Any, ...], ...]


_IDS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 3]])
_POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10, 0, 0, 1, 0, 1]])
_BLOCKS = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1]])

_KNOWN = {
    "causal_mask_function": _Known(_read_causal, ()),
    "bidirectional_mask_function": _Known(_read_everything, ()),
    "sliding_window_overlay": _Known(_read_window_behind, ((3,),)),
    "sliding_window_bidirectional_overlay": _Known(_read_window_around, ((2,),)),
    "chunked_overlay": _Known(_read_chunk, ((3, torch.tensor([0, 2])), (3, torch.tensor([0, 3])))),
    "packed_sequence_mask_function": _Known(_read_texts, ((_IDS,),)),
    "blockwise_overlay": _Known(_read_blocks, ((_BLOCKS,),)),
    "padding_mask_function": _Known(_read_padding, ((_IDS > 0,), (_IDS < 2,))),
    "and_masks": _Known(_read_both, (("causal_mask_function", "sliding_window_overlay"),)),
    "or_masks": _Known(_read_either, (("causal_mask_function", "sliding_window_bidirectional_overlay"),)),
    "remap_positions_for_packed_sequence": _Known(_read_alone, (("causal_mask_function", _POSITIONS),)),
}
"""transformers' mask functions, by the name of their maker; those made of others after these."""

_PLACES = (Place(0, 0, 11, 11, 2), Place(4, 0, 7, 11, 2), Place(7, 3, 2, 8, 2), Place(0, 0, 3, 11, 2))
"""Where examples are compared with readings: all at once, after a cache, after one that forgets, before one to fill."""

_TRUSTED: dict[CodeType, str] = {}
"""The makers whose readings were seen to be right, by the code that all functions of one maker share."""


@lru_cache(maxsize=1)
def _learn() -> None:
    """Compares, once, what each known function says of examples with its reading, and trusts those that agree.

    Another transformers may have other functions under these names: that costs speed, not exactness.
    """
    from transformers import masking_utils as theirs

    for name, known in _KNOWN.items():
        try:
            made = [_example(theirs, name, example) for example in known.examples or ((),)]
            _TRUSTED[made[0].__code__] = name  # before it is: `read` has to find it
            if name == "remap_positions_for_packed_sequence":  # read only beside what keeps the texts apart
                rule = _example(theirs, "and_masks", ("causal_mask_function", "sliding_window_overlay"))
                made.append(theirs.packed_sequence_compatibility_function(rule, _POSITIONS, _IDS))
            right = all(_agrees(function, place) for function, place in product(made, _PLACES))
        except Exception:  # it is gone, is made of other things, or closes over other names
            right = False
        if not right:
            for code in [code for code, trusted in _TRUSTED.items() if trusted == name]:
                del _TRUSTED[code]


def _example(theirs: Any, maker: str, arguments: tuple[Any, ...]) -> Any:
    """A mask function made for some data; a name among the arguments stands for the first example of that maker."""
    made = [
        _example(theirs, x, (_KNOWN[x].examples or ((),))[0]) if isinstance(x, str) else x for x in arguments
    ]  # fmt: skip
    return getattr(theirs, maker)(*made) if arguments else getattr(theirs, maker)


def _agrees(function: Callable[..., Any], place: Place) -> bool:
    grid = Grid(place.batch, 1, place.query_len, place.key_len)
    cells = [
        mask.bind(grid).allowed(range(place.query_len), range(place.key_len)).expand(grid[:4])
        for mask in (read(function, place), _asked(function, place))
    ]
    return torch.equal(*cells)


def _moved(mask: Mask, device: torch.device) -> Mask:
    """The same mask with its data on another device."""
    if isinstance(mask, (Both, Either)):
        return type(mask)(_moved(mask.left, device), _moved(mask.right, device))
    if isinstance(mask, Not):
        return Not(_moved(mask.mask, device))
    if isinstance(mask, Document):
        queries = mask.query_ids.to(device)
        return Document(queries, None if mask.key_ids is mask.query_ids else mask.key_ids.to(device))
    if isinstance(mask, Padding):
        return Padding(mask.keys.to(device))
    if isinstance(mask, Dense):
        return Dense(mask.mask.to(device))
    return mask  # a rule alone, or asked where its data lies


# --- the weights --------------------------------------------------------------------------------------------------


class LazyWeights(Lazy):
    """The weights of one layer's call, made when they are looked at: a tensor [batch, heads, query_len, key_len].

    What is in ``outputs.attentions``. It keeps query and key and no weight. A rectangle, ``weights[0, 3, -8:, :64]``,
    is computed when it is asked for, at any length. Whatever function of torch needs all of them gets them where they
    are few, and an error with advice where they are not. Gradients flow through them. They are those before dropout.

    With a cache, keys grow or are written over from step to step. There they are copied; or, where the weights are
    fewer, these are computed at once and kept instead.
    """

    _numbers: Tensor | None
    _call: tuple[Tensor, Tensor, ScoringArguments] | None
    _versions: list[int]

    def __new__(cls, heads: Heads, scoring: ScoringArguments) -> "LazyWeights":
        query, key = heads.query, heads.key
        shape = (*query.shape[:3], key.shape[2])
        lazy: LazyWeights = cls._empty(cls, shape, query.dtype, query.device)
        lazy._numbers, lazy._call = None, (query, key, scoring)
        lazy._versions = lazy._versions_now()
        if shape[2] < shape[3] and lazy.numel() <= key.numel():
            lazy._numbers, lazy._call = lazy._rectangle(), None
        elif shape[2] < shape[3]:
            lazy._call = query, key.clone(), scoring
            lazy._versions = lazy._versions_now()
        return lazy

    def __init__(self, heads: Heads, scoring: ScoringArguments) -> None:
        pass

    @property
    def observation(self) -> Observation:
        """Everything else that can be asked of weights (`regard.observe`): entropy, the largest, an image.

        Raises:
            ValueError: of a step after a cache the weights alone are kept; or query, key or sink was written over.
        """
        if self._call is None:
            raise ValueError(
                "regard: of a step after a cache the weights alone are kept, query and key are not; give the model all "
                "tokens at once, or record the step: with regard.record(model) as recording: ..."
            )
        if self._versions != self._versions_now():
            raise ValueError(
                "regard: these weights can no longer be known: query, key, bias or sink was written over since (by a "
                "static cache or an optimizer); look at them before the next step"
            )
        query, key, scoring = self._call
        return observe(query, key, **scoring)

    def dense(self) -> Tensor:
        self._check_size()
        return self._rectangle()

    def _rectangle(self, rows: range | None = None, columns: range | None = None, head: int | None = None) -> Tensor:
        """Some rows and columns of all batch rows, of one head or of all."""
        if self._numbers is not None:
            heads = slice(None) if head is None else slice(head, head + 1)
            rows, columns = rows or range(self.shape[2]), columns or range(self.shape[3])
            return self._numbers[:, heads, rows.start : rows.stop, columns.start : columns.stop]
        seen = self.observation if head is None else self.observation.head(head)
        return seen.weights(rows, columns).to(self.dtype)

    def _versions_now(self) -> list[int]:
        """How often each tensor that the weights follow from was written to."""
        if self._call is None:
            return []
        query, key, scoring = self._call
        kept = query, key, scoring["sink"], scoring["bias"]
        return [x._version for x in kept if isinstance(x, Tensor) and not x.is_inference()]

    def _advice(self) -> str:
        return (
            "look at a rectangle, weights[0, 3, -64:, -64:], or ask weights.observation for a statistic: entropy(), "
            "top(8), received()"
        )

    def __getitem__(self, index: Any) -> Tensor:
        asked = list(index) if isinstance(index, tuple) else [index]
        if any(type(x) not in (int, slice, type(Ellipsis)) for x in asked) or asked.count(Ellipsis) > 1:
            return self.dense()[index]
        at = asked.index(Ellipsis) if Ellipsis in asked else len(asked)
        asked[at : at + 1] = [slice(None)] * (4 - len(asked) + (Ellipsis in asked))
        if len(asked) != 4:
            raise IndexError(f"regard: weights have four axes {list(self.shape)}, got {index!r}")
        head, rest = None, list(asked)
        if isinstance(asked[1], int):
            head, rest[1] = range(self.shape[1])[asked[1]], 0
        sides: list[range] = []
        for axis in (2, 3):
            side = range(self.shape[axis])[asked[axis] if isinstance(asked[axis], slice) else slice(None)]
            if isinstance(asked[axis], int):
                place = side[asked[axis]]
                side, rest[axis] = range(place, place + 1), 0
            elif side.step > 0:
                side, rest[axis] = range(side.start, max(side.start, side.stop)), slice(None, None, side.step)
            sides.append(side)
        return self._rectangle(sides[0], sides[1], head)[tuple(rest)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _getter("requires_grad"):
            of = args[0]._call[:2] if args[0]._call is not None else (args[0]._numbers,)
            return any(x.requires_grad for x in of)
        return super().__torch_function__(func, types, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyWeights({list(self.shape)}, {self.dtype})"
