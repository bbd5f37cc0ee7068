"""`attention` checks a call, chooses a kernel and runs it; `plan` reports the same without running it."""

import warnings
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from regard import any_length, checked, hints, repeated, untraced
from regard.biases import Bias
from regard.checked import Form, form_of, recall, remember
from regard.graphs import as_it_stands, tracing
from regard.hints import hinted
from regard.kernels import KERNELS, Call, Kernel, choose, kernel_with_lse, preference, why_not
from regard.kernels.strips import NATIVE_KERNEL, compiled
from regard.masks import Mask, Tile
from regard.one_query import attention_of_one
from regard.reference import AttentionOutput
from regard.scores import Additive, ScoringArguments
from regard.shapes import as_bytes, check_whole
from regard.validation import check_call

MIN_WARNED_NUMBERS = 1 << 28
"""A call warns from this many numbers in quadratic tensors on (1 GiB in float32)."""

is_transforming = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is at work."""

Arguments = tuple[
    Tensor, Tensor, Tensor, Mask | None, Bias | Tensor | None, float | None, float | None, Tensor | None,
    Additive | None, float, torch.Generator | None, bool, str,
]  # fmt: skip
"""Those of `attention` from query to generator, whether lse is wanted, and the kernel."""


class QuadraticMemoryWarning(UserWarning):
    """A call is about to hold very large quadratic tensors (query_len x key_len)."""


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
    kernel: str = "auto",
) -> Tensor:
    """For every query, the average of the values, weighted by how well their keys match it.

        scores  = softcap(scale * query @ key^T) + bias,   -inf where the mask does not allow
        weights = softmax(scores), with exp(sink) added to the denominator where a sink is given
        output  = dropout(weights) @ value

    Shapes:
        query [batch, heads, query_len, head_dim], key [batch, kv_heads, key_len, head_dim],
        value [batch, kv_heads, key_len, value_dim] -> output [batch, heads, query_len, value_dim] in query's dtype.
        kv_heads divides heads; query head h uses kv head ``h // (heads // kv_heads)``.
    Args:
        mask: who may attend to whom (`regard.masks`); None: everybody to everybody.
        bias: added to the scores: a tensor that broadcasts to [batch, heads, query_len, key_len], or a lazy one
            (`regard.biases`); may hold -inf. None for none.
        scale: factor on query @ key^T; None: 1/sqrt(head_dim) (1 with `additive`).
        softcap: c in ``c * tanh(s / c)``, applied before bias and mask (Gemma 2); None for none.
        sink: [heads], a logit that takes weight and gives no value (gpt-oss); None for none.
        additive: Bahdanau's similarity in place of the product; None for the product.
        dropout: probability that a weight is dropped, in this call: pass 0.0 outside training.
        generator: where the seed of dropout comes from; None: torch's default generator.
        kernel: "auto" or the name of a kernel, which is then used or refused, never replaced by another.
    Raises:
        ShapeError: axes, mask or bias that do not fit each other.
        TypeError, ValueError: something of the wrong type or out of range.
        KernelError: the named kernel does not support this call.
    Notes:
        A fully masked query gets output 0 and gradient 0. NaN or inf in a fully masked key or value reaches neither
        output nor gradients.
    References:
        Vaswani et al. 2017, "Attention Is All You Need", section 3.2.

    >>> query = torch.tensor([[[[1., 0.], [0., 1.]]]])
    >>> attention(query, query, query, mask=Causal(), scale=1.0)
    tensor([[[[1.0000, 0.0000],
              [0.2689, 0.7311]]]])
    """
    given = query, key, value, mask, bias, scale, softcap, sink, additive, dropout, generator, False, kernel
    results, form = _like_an_earlier_one(given)
    if results is None:
        results = _first(form, check_call("attention", *given[:-1]), given)
    return results[0]


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
    kernel: str = "auto",
) -> AttentionOutput:
    """`attention`, and the log-sum-exp of each query's scores, from which any weight can be recomputed.

        lse[b, h, i]       = log sum_j exp(score[b, h, i, j])          with exp(sink[h]) in the sum where there is one
        weight[b, h, i, j] = exp(score[b, h, i, j] - lse[b, h, i])

    Takes the arguments of `attention` and raises what it raises.

    Shapes:
        lse [batch, heads, query_len], natural logarithm, float32 or wider; -inf for a fully masked query.
    """
    given = query, key, value, mask, bias, scale, softcap, sink, additive, dropout, generator, True, kernel
    results, form = _like_an_earlier_one(given)
    if results is None:
        results = _first(form, check_call("attention_with_lse", *given[:-1]), given)
    output, lse = results
    assert lse is not None  # the call wants it, and a kernel without lse does not support such a call
    return AttentionOutput(output, lse)


compiled.attention, compiled.attention_with_lse = attention, attention_with_lse


def _like_an_earlier_one(given: Arguments) -> tuple[tuple[Tensor, Tensor | None] | None, Form | None]:
    """Output and lse of a call that is like an earlier one, or None; and the form by which it is known, if any."""
    if is_dynamo_compiling():
        results = untraced.attend(*given)
        if results is not None:
            return results, None
    # tensors without memory of their own, as torch.export and torch.func have them: to find out takes torch long
    elif not is_transforming():
        results = repeated.repeat(given, checked.noted)
        if results is not None:
            return results, None
    query, key, value, _, bias, _, _, sink, *_ = given
    if type(query) is Tensor and not query.is_nested and query.ndim == 4 and query.shape[2] == 1:
        results = attention_of_one(*given)
        if results is not None:
            return any_length.note(given) or results, None
    form = form_of(*given)
    known = None if form is None else recall(form)
    if form is None or known is None:
        return _like_one_under_cells(given, form), form
    results = known.run(query, key, value, sink, bias)
    repeated.note(given, form, known)
    return results, form


def _like_one_under_cells(given: Arguments, form: Form | None) -> tuple[Tensor, Tensor | None] | None:
    """Output and lse of a call with a function as mask, if it is like an earlier one but for the answers. Only of the
    first of a form: the second is planned, and from then on known by that."""
    if not as_it_stands() or not checked.noted or (form is not None and checked.is_again(form)):
        return None
    cells = any_length.with_cells(given)
    return None if cells is None else repeated.repeat(cells, checked.noted)


def _first(form: Form | None, call: Call, given: Arguments) -> tuple[Tensor, Tensor | None]:
    """Output and lse of a call that was not cached; now it is, if its form is known."""
    _, _, _, _, bias, *_, kernel = given
    chosen = choose(call, kernel)
    known = None if form is None else remember(form, call, chosen, bias)
    _warn_of_squares(call, chosen)
    results = any_length.note(given) if known is not None and chosen is NATIVE_KERNEL else None
    if results is not None:
        return results
    if known is None or call.dropout is not None:  # whose seed is drawn
        return chosen.compute(call)
    return known.run(call.query, call.key, call.value, call.scoring.sink, bias)


def attention_and_perhaps_lse(
    query: Tensor, key: Tensor, value: Tensor, *, dropout: float, **scoring: Unpack[ScoringArguments]
) -> tuple[Tensor, Tensor | None]:
    """Bit-identical to `attention`; also returns lse if the chosen kernel computes it anyway. For recordings."""
    call = check_call("attention", query, key, value, **scoring, dropout=dropout)
    return run_perhaps_with_lse(call)


def run_perhaps_with_lse(call: Call) -> tuple[Tensor, Tensor | None]:
    """The same of a validated call."""
    kernel = kernel_with_lse(call)
    return run(call, "auto") if kernel is None else compute(call._replace(wants_lse=True), kernel)


def run(call: Call, name: str) -> tuple[Tensor, Tensor | None]:
    """Output and lse (None if the call does not want it) of a validated call, by the kernel of that name."""
    return compute(call, choose(call, name))


def compute(call: Call, kernel: Kernel) -> tuple[Tensor, Tensor | None]:
    """Output and lse of a validated call, by a kernel that supports it."""
    _warn_of_squares(call, kernel)
    return kernel.compute(call)


def _warn_of_squares(call: Call, kernel: Kernel) -> None:
    grid = call.scoring.grid
    large = not tracing() and grid.batch * grid.heads * grid.query_len * grid.key_len >= MIN_WARNED_NUMBERS
    if large and kernel.quadratic_numbers(call) >= MIN_WARNED_NUMBERS:
        warnings.warn(
            f"attention: kernel {kernel.name!r} holds {kernel.quadratic_numbers(call):,} numbers of query_len x "
            f"key_len for the scores {grid}; regard.plan(...) says why",
            QuadraticMemoryWarning,
            stacklevel=5,  # the caller of the public function, past the wrapper of `hinted`
        )


@dataclass(frozen=True)
class Plan:
    """How a call would be computed, and what that costs. Prints as a short report.

    Attributes:
        kernel: the kernel that would run.
        why: the reason for this choice.
        others: for each other kernel, why it is not used.
        tiles: number of tiles of `tile_size` x `tile_size` scores that are empty, partial and full under the mask.
        flops_needed: floating-point operations (a multiply-add is two) for the scores that the mask allows, counted in
            whole tiles, or for those that the kernel computes, if they are fewer.
        flops_computed: the same for the scores that the kernel computes.
        bytes_moved: query, key and value read once, output written once.
        quadratic_numbers: numbers that the kernel holds in quadratic tensors (query_len x key_len); 0 if it needs none.
        peak_bytes: estimated peak memory of a forward pass beyond its inputs, output included.
    """

    kernel: str
    why: str
    others: dict[str, str]
    mask: str
    grid: str
    tile_size: int
    tiles: dict[Tile, int]
    flops_needed: int
    flops_computed: int
    bytes_moved: int
    quadratic_numbers: int
    peak_bytes: int

    def __str__(self) -> str:
        total, numbers = max(1, sum(self.tiles.values())), self.quadratic_numbers
        lines = [
            f"scores  {self.grid}, mask {self.mask}",
            f"kernel  {self.kernel}: {self.why}",
            *(f"        not {name}: {why}" for name, why in self.others.items()),
            f"tiles   {', '.join(f'{n} {tile.value} ({n / total:.0%})' for tile, n in self.tiles.items())}"
            f" of {self.tile_size} x {self.tile_size}",
            f"FLOPs   {self.flops_needed:.3g} needed, {self.flops_computed:.3g} computed",
            f"memory  {as_bytes(self.bytes_moved)} read and written, "
            f"{as_bytes(self.peak_bytes)} beside inputs at most; "
            f"{f'{numbers:,} numbers of query_len x key_len' if numbers else 'nothing quadratic'}",
        ]
        return "\n".join(lines)


@hinted(hints.ATTENTION)
def plan(
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
    lse: bool = False,
    kernel: str = "auto",
    tile_size: int = 128,
) -> Plan:
    """Which kernel `attention` would use for this call, why, and what it costs; nothing is computed.

        FLOPs of a score: 2 * head_dim for the product with the key, 2 * value_dim for its share of the value

    Takes the arguments of `attention` and raises what it raises.

    Args:
        lse: plan `attention_with_lse` instead of `attention`.
        tile_size: rows and columns of the tiles that are counted.

    >>> print(plan(*torch.zeros(3, 1, 2, 8192, 8), mask=Causal()))
    scores  [batch=1, heads=2, query_len=8192, key_len=8192], mask Causal(offset=0)
    kernel  native: the compiled library computes what the mask allows, and little else, in less time
            not sdpa: supported, but native is preferred
            not triton: its programs run on CUDA devices only
            not strips: supported, but native is preferred
            not direct: supported, but holds 402,653,184 numbers of query_len x key_len
            not reference: supported, but holds 402,653,184 numbers of query_len x key_len
    tiles   2016 empty (49%), 64 partial (2%), 2016 full (49%) of 128 x 128
    FLOPs   2.15e+09 needed, 2.15e+09 computed
    memory  2.0 MiB read and written, 576.0 KiB beside inputs at most; nothing quadratic
    """
    generator = torch.Generator()  # nothing is dropped here, so torch's default generator must not advance
    call = check_call("plan", query, key, value, mask, bias, scale, softcap, sink, additive, dropout, generator, lse)
    check_whole("plan", "tile_size", tile_size)
    chosen = choose(call, kernel)
    grid = call.scoring.grid
    others = {k.name: why_not(k, call, chosen) for k in KERNELS if k is not chosen}
    bound = call.scoring.mask_or_everything
    tiles, cells = count_tiles(bound, grid.query_len, grid.key_len, tile_size)
    per_score, computed = 2 * (query.shape[3] + value.shape[3]), chosen.num_scores(call)
    output = query.numel() // max(1, query.shape[3]) * value.shape[3]
    return Plan(
        kernel=chosen.name,
        why="requested by name" if kernel != "auto" else preference(call).reason,
        others=others,
        mask=repr(bound),
        grid=str(grid),
        tile_size=tile_size,
        tiles=tiles,
        flops_needed=min(cells * grid.batch * grid.heads, computed) * per_score,
        flops_computed=computed * per_score,
        bytes_moved=(query.numel() + key.numel() + value.numel() + output) * query.element_size(),
        quadratic_numbers=chosen.quadratic_numbers(call),
        peak_bytes=chosen.peak_bytes(call) + output * query.element_size(),
    )


def count_tiles(mask: Mask, query_len: int, key_len: int, size: int) -> tuple[dict[Tile, int], int]:
    """Number of empty, partial and full tiles, and number of scores in those that are not empty.

    Empty and full rectangles are counted as a whole; only partial ones are halved further.
    """
    counts, cells = dict.fromkeys(Tile, 0), 0
    todo = [(range(query_len), range(key_len))] if query_len and key_len else []
    while todo:
        rows, columns = todo.pop()
        across, down = -(-len(columns) // size), -(-len(rows) // size)
        tile = mask.tile(rows, columns)
        if tile is not Tile.PARTIAL or across == down == 1:
            counts[tile] += across * down
            cells += len(rows) * len(columns) * (tile is not Tile.EMPTY)
        elif across >= down:
            half = columns.start + across // 2 * size
            todo += [(rows, range(columns.start, half)), (rows, range(half, columns.stop))]
        else:
            half = rows.start + down // 2 * size
            todo += [(range(rows.start, half), columns), (range(half, rows.stop), columns)]
    return counts, cells
