"""Translates transformers' mask functions to regard masks."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from itertools import product
from operator import and_, or_
from types import CodeType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard.graphs import exporting, tracing
from regard.huggingface.masks import LazyMask, knows_bools
from regard.huggingface.sharing import Whole, whole_text
from regard.huggingface.symbols import GraphMask, rule_of
from regard.masks import EVERYTHING, Band, Causal, Chunk, Document, Mask, Padding, Where, Window
from regard.rules import Rule, serialise
from regard.shapes import Grid


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
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    config: object = None,
    **others: Any,
) -> LazyMask | GraphMask | Tensor | None:
    """The function that transformers calls to create a mask; argument names are its own. Builds nothing quadratic.

    None for one query that sees every key, where transformers allows its own function to say nothing then. A model that
    supports nothing but "eager" gets its mask always, and sees numbers in it: it may append columns to them.

    Args:
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: ``mask_function(batch, head, query, key) -> bool`` on positions; None: causal.
        attention_mask: bool [batch, length], True where a token is real; position 0 first. Keys beyond it are hidden.
        use_vmap: whether the function accepts only single numbers.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether None may stand for a causal mask, or for none.
        dtype: of the numbers that a model adds to its scores, if it knows no masks of bools.
        config: of the model, which says whether it does (`knows_bools`).
        others: options for transformers' own shortcuts, which are not needed here.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> mask_for_transformers(1, 4, 6, q_offset=2, mask_function=sliding_window_causal_mask_function(3))
    LazyMask(Band(2, None, offset=2) & Causal(offset=2), [1, 1, 4, 6])
    """
    bools = knows_bools(type(config))
    kind = torch.bool if bools else dtype
    if tracing():
        return _in_graph(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, use_vmap, device, kind
        )
    _learn()
    device = torch.device(device)
    whole = whole_text.get()
    if whole is not None:
        place = Place(0, 0, whole.length, whole.length, batch_size, device, use_vmap)
        mask = _of_whole(whole, mask_function, place, attention_mask is not None)
        return LazyMask(mask, (batch_size, q_length, kv_length), device, dtype=kind)
    place = Place(int(q_offset), int(kv_offset), q_length, kv_length, batch_size, device, use_vmap)
    real = None
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ValueError(f"regard: padding must be [batch, length], got {list(attention_mask.shape)}")
        real = _from(attention_mask.to(device=device, dtype=torch.bool), place.key_start, kv_length)
        if bool(real.all()):
            real = None
    if q_length == 1 and real is None and bools:
        if allow_is_causal_skip and place.offset + 1 >= kv_length and _sees_all_before(mask_function, place):
            return None
        if allow_is_bidirectional_skip and _maker(mask_function) == "bidirectional_mask_function":
            return None
    mask = Causal(place.offset) if mask_function is None else read(mask_function, place)
    return LazyMask(mask, (batch_size, q_length, kv_length), device, None, real, kind)


def _in_graph(
    batch: int, query_len: int, key_len: int, query_start: int | Tensor, key_start: int | Tensor,
    mask_function: Callable[..., Any] | None, padding: GraphMask | Tensor | None, one_by_one: bool,
    device: torch.device | str, dtype: torch.dtype,
) -> GraphMask | Tensor:  # fmt: skip
    """The mask in a graph: in a compiled one, a regard mask if it depends on positions only; else a dense tensor of
    bools or numbers."""
    device = torch.device(device)
    if isinstance(padding, GraphMask):
        return padding
    if not (exporting() or isinstance(query_start, Tensor) or isinstance(key_start, Tensor)):
        offset = query_start - key_start
        rule = Causal(offset) if mask_function is None else rule_of(mask_function, offset)
        if rule is not None and padding is not None:
            real = Padding(_from(padding.to(device=device, dtype=torch.bool), key_start, key_len))
            rule = real if rule is EVERYTHING else rule & real
        if rule is not None:
            return GraphMask(rule, (batch, query_len, key_len), device, dtype)
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

    written: Callable[..., Any] = sdpa_mask if dtype == torch.bool else partial(eager_mask, dtype=dtype)
    return cast(
        Tensor,
        written(
            batch, query_len, key_len, query_start, key_start, mask_function or causal_mask_function, padding,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False, use_vmap=one_by_one, device=device,
        ),
    )  # fmt: skip


class Place(NamedTuple):
    """The positions of queries and keys in transformers' sequence, and how to call the mask function."""

    query_start: int
    key_start: int
    query_len: int
    key_len: int
    batch: int
    device: torch.device = torch.device("cpu")
    one_by_one: bool = False
    positions: Tensor | None = None
    """Positions of the tokens of packed texts [batch, length], consecutive within each text."""

    @property
    def offset(self) -> int:
        """Position of query 0 where key 0 has position 0, as regard counts."""
        return self.query_start - self.key_start

    def per_token(self, ids: Tensor) -> tuple[Tensor, Tensor] | None:
        """Ids of positions [batch, length] as those of the queries and those of the keys; one tensor if the same, None
        if some queries or keys have none."""
        end = max(self.query_start + self.query_len, self.key_start + self.key_len)
        if self.positions is not None or ids.shape[1] < end:
            return None
        queries = ids[:, self.query_start : self.query_start + self.query_len]
        if (self.query_start, self.query_len) == (self.key_start, self.key_len):
            return queries, queries
        return queries, ids[:, self.key_start : self.key_start + self.key_len]


Inside = Mapping[str, Any]
"""The variables that a mask function of transformers closes over."""

Reading = Callable[[Inside, Place], Mask | None]
"""The mask that a known function represents; None if it cannot be determined."""


def read(function: Callable[..., Any], place: Place) -> Mask:
    """transformers' mask function as a mask: in closed form if it is known, else evaluated tile by tile."""
    known = _KNOWN.get(_maker(function))
    mask = None if known is None else known.reading(_inside(function), place)
    return _asked(function, place) if mask is None else mask


def _of_whole(whole: Whole, function: Callable[..., Any] | None, place: Place, padded: bool) -> Mask:
    """The mask of a text of which this process holds a share: the model has seen only that, so its function may
    depend on nothing but positions."""
    mask = Causal(place.offset) if function is None else read(function, place)
    tensors: list[Tensor] = []
    if serialise(mask, tensors) is None or tensors:
        name = getattr(function, "__qualname__", type(function).__name__).split(".")[0]
        raise ValueError(
            f"parallel.sharded: the model's mask ({name}) depends on more than positions, padding and packed texts, "
            "and the model knows that of one rank's tokens only"
        )
    some = (whole.real is not None and padded) or whole.documents is not None
    if some and _has_chunks(mask):
        raise ValueError(
            "parallel.sharded: the model's mask has chunks, which begin with each text: padding and packed texts are "
            "not supported with them"
        )
    if whole.real is not None and padded:
        mask = mask & Padding(whole.real)
    return mask if whole.documents is None else mask & Document(whole.documents)


def _has_chunks(mask: Rule) -> bool:
    return isinstance(mask, Chunk) or any(map(_has_chunks, mask.parts()))


def _maker(function: object) -> str:
    """The name of what makes such mask functions in transformers, if its reading is trusted; otherwise none."""
    code: CodeType | None = getattr(function, "__code__", None)
    return "" if code is None else _TRUSTED.get(code, "")


def _sees_all_before(function: object, place: Place) -> bool:
    """Whether a causal mask, perhaps with a window, is known to show the first query everything up to its place."""
    maker = _maker(function)
    if maker == "and_masks":
        return all(_sees_all_before(part, place) for part in _inside(function)["mask_functions"])
    if maker == "sliding_window_overlay":
        return bool(place.offset < _inside(function)["sliding_window"])
    return maker == "causal_mask_function"


def _inside(function: Any) -> Inside:
    cells = function.__closure__
    if not cells:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _asked(function: Callable[..., Any], place: Place) -> Mask:
    """Any mask function, evaluated tile by tile."""

    def fn(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        asked_on = query.device  # may differ from the mask's, if a model is spread over devices
        # in transformers, one head stands for all
        axes = [
            axis.to(place.device) for axis in (batch, head[:, :1], query + place.query_start, key + place.key_start)
        ]
        allowed = _one_by_one(function, *(axis.flatten() for axis in axes)) if place.one_by_one else function(*axes)
        return cast(Tensor, allowed).to(asked_on)

    fn.__name__ = getattr(function, "__name__", type(function).__name__)
    return Where(fn)


def _one_by_one(function: Callable[..., Any], *axes: Tensor) -> Tensor:
    """Maps a function of four single numbers over index tensors: [batch, heads, rows, columns]."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axis in reversed(range(4)):
        function = torch.vmap(function, in_dims=tuple(0 if i == axis else None for i in range(4)))
    with TransformGetItemToIndex():  # lets such a function look into a tensor at a place that is itself a tensor
        return cast(Tensor, function(*axes))


def _read_both(inside: Inside, place: Place) -> Mask:
    parts = inside["mask_functions"]
    masks = []
    for part in parts:
        packed = _in_packed_texts(part, parts, place)
        masks.append(read(part, place) if packed is None else packed)
    return reduce(and_, [mask for mask in masks if mask is not EVERYTHING] or [EVERYTHING])


def _in_packed_texts(function: Callable[..., Any], beside: tuple[Callable[..., Any], ...], place: Place) -> Mask | None:
    """A mask function of positions that restart with each packed text, joined with one that separates the texts.

    Within a text, differences of these positions equal those of token indices, so a rule of differences is unchanged.
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
    tokens = place.per_token(inside["packed_sequence_mask"])
    if tokens is None:
        return None
    queries, keys = tokens
    return Document(queries, None if keys is queries else keys)


def _read_blocks(inside: Inside, place: Place) -> Mask | None:
    tokens = place.per_token(inside["block_sequence_ids"])
    if tokens is None:
        return None
    queries, keys = tokens
    return Document(queries.masked_fill(queries < 0, -1), keys.masked_fill(keys < 0, -2))  # below 0: in no block


def _read_padding(inside: Inside, place: Place) -> Mask | None:
    real = inside["padding_mask"]
    if place.positions is not None or real.dtype != torch.bool or real.shape[1] < place.key_start + place.key_len:
        return None
    return Padding(_from(real, place.key_start, place.key_len))


def _from(real: Tensor, start: int, length: int) -> Tensor:
    """The columns from `start` on, padded with False beyond the end."""
    if start or real.shape[1] > length:
        real = real[:, start : start + length]
    missing = length - real.shape[1]
    return nn.functional.pad(real, (0, missing), value=False) if missing else real


class _Known(NamedTuple):
    """How to read the mask functions of one factory, and arguments for examples."""

    reading: Reading
    examples: tuple[tuple[Any, ...], ...]


_IDS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 2, 2, 3, 3]])
_POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [5, 6, 7, 8, 9, 10, 0, 0, 1, 0, 1]])
_BLOCKS = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1]])

_KNOWN = {
    "causal_mask_function": _Known(lambda inside, place: Causal(place.offset), ()),
    "bidirectional_mask_function": _Known(lambda inside, place: EVERYTHING, ()),
    "sliding_window_overlay": _Known(
        lambda inside, place: Band(inside["sliding_window"] - 1, None, place.offset), ((3,),)
    ),
    "sliding_window_bidirectional_overlay": _Known(  # whose window includes the distance that it names
        lambda inside, place: Window(inside["sliding_window"] + 1, place.offset), ((2,),)
    ),
    "chunked_overlay": _Known(_read_chunk, ((3, torch.tensor([0, 2])), (3, torch.tensor([0, 3])))),
    "packed_sequence_mask_function": _Known(_read_texts, ((_IDS,),)),
    "blockwise_overlay": _Known(_read_blocks, ((_BLOCKS,),)),
    "padding_mask_function": _Known(_read_padding, ((_IDS > 0,), (_IDS < 2,))),
    "and_masks": _Known(_read_both, (("causal_mask_function", "sliding_window_overlay"),)),
    "or_masks": _Known(
        lambda inside, place: reduce(or_, [read(part, place) for part in inside["mask_functions"]]),
        (("causal_mask_function", "sliding_window_bidirectional_overlay"),),
    ),
    "remap_positions_for_packed_sequence": _Known(  # read only beside what keeps the texts apart: `_in_packed_texts`
        lambda inside, place: None, (("causal_mask_function", _POSITIONS),)
    ),
}
"""transformers' mask functions, by the name of their maker; those made of others after these."""

_PLACES = (Place(0, 0, 11, 11, 2), Place(4, 0, 7, 11, 2), Place(7, 3, 2, 8, 2), Place(0, 0, 3, 11, 2))
"""Where examples are compared with readings: all at once, after a cache, after one that forgets, before one to fill."""

_TRUSTED: dict[CodeType, str] = {}
"""The makers whose readings were seen to be right, by the code that all functions of one maker share."""


@lru_cache(maxsize=1)
def _learn() -> None:
    """Compares each known function with its reading on examples, once, and trusts those that agree.

    Other versions of transformers may have other functions under these names: that costs speed, not exactness.
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
    """A mask function for some data; a name among the arguments stands for the first example of that factory."""
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
