"""A layer's computation step by step, with its numbers.

    steps(layer, x)["softmax"].tensor        any step by name
    print(steps(layer, x))                   all of them as a table

The steps of attention are: project (x times each weight matrix), split (into heads), rotate (where there is a rotary
encoding), score, scale, cap, bias, mask (those that the layer has), softmax, weigh (the values by the weights), join
(the heads) and project (the output). The scores come from `Scoring.stages`, the definition that every kernel is held
to, and the last step is the layer's own output.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from regard.biases import Bias
from regard.feed_forward import ACTIVATIONS, FeedForward
from regard.hooks import share_of
from regard.layers import Block, MultiHeadAttention, join, split
from regard.masks import Mask
from regard.numerics import grouped_matmul, softmax, upcast, zero_unseen
from regard.scores import Scoring
from regard.shapes import Grid
from regard.validation import check_call

MAX_SHOWN_SCORES = 1 << 24
"""Most scores that are shown at once; for more, ask for single queries."""

SATURATED_WEIGHT = 0.999
"""A softmax row is saturated when one of several keys has more than this weight: its gradient is almost gone."""


class Step(NamedTuple):
    """One step: what it is called, its formula, its axes by name, its numbers, and a remark where one is due."""

    name: str
    formula: str
    axes: tuple[str, ...]
    tensor: Tensor
    note: str = ""

    def __str__(self) -> str:
        sizes = ", ".join(f"{a}={n}" for a, n in zip(self.axes, self.tensor.shape, strict=True))
        lines = [f"{self.name}: {self.formula}", f"  [{sizes}]"]
        lines += ["  " + line for line in numbers(self.tensor)]
        return "\n".join(lines + ([f"  note: {self.note}"] if self.note else []))


class Steps(Sequence[Step]):
    """The steps of a layer, by number or by name. Prints as a table."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)

    @overload
    def __getitem__(self, which: int | str) -> Step: ...
    @overload
    def __getitem__(self, which: slice) -> "Steps": ...
    def __getitem__(self, which: int | str | slice) -> "Step | Steps":
        if isinstance(which, slice):
            return Steps(self._steps[which])
        if isinstance(which, int):
            return self._steps[which]
        for step in self._steps:
            if step.name == which:
                return step
        raise KeyError(f"steps: no step {which!r}; there are: {', '.join(self.names)}")

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    @property
    def names(self) -> list[str]:
        """The steps' names in order."""
        return [step.name for step in self._steps]

    @property
    def output(self) -> Tensor:
        """The last step's numbers: what the layer returns."""
        return self._steps[-1].tensor

    def __str__(self) -> str:
        return "\n".join(str(step) for step in self._steps)


@torch.no_grad()
def steps(
    layer: MultiHeadAttention | FeedForward | Block,
    x: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    context_mask: Mask | None = None,
    query: int | None = None,
) -> Steps:
    """Every step of a layer from input to output, with formula, shape and numbers (evaluation: nothing is dropped).

    Args:
        layer: an attention layer, a feed-forward layer, or a block of both.
        x: [batch, length, dim]. key, value: for cross-attention, as in the layer's own call (for a block with
            cross-attention, `key` is its context).
        mask, bias, context_mask: for this call, as in the layer's own call.
        query: show only this token's query; for a text too long to show whole.
    Raises:
        ValueError: there are too many scores to show at once; TypeError: not a layer of regard.

    >>> layer = MultiHeadAttention(4, 2, mask=Causal())
    >>> shown = steps(layer, torch.randn(1, 3, 4))
    >>> shown.names[6:]
    ['score', 'scale', 'mask', 'softmax', 'weigh', 'join', 'project output']
    """
    if not isinstance(layer, (MultiHeadAttention, FeedForward, Block)):
        raise TypeError(f"steps: expected MultiHeadAttention, FeedForward or Block, got {type(layer).__name__}")
    if query is not None and not 0 <= query < x.shape[1]:
        raise ValueError(f"steps: query must be 0 to {x.shape[1] - 1}, got {query}")
    if isinstance(layer, MultiHeadAttention):
        return Steps(list(_attention(layer, x, key, value, mask, bias, query)))
    if isinstance(layer, Block):
        return Steps(list(_block(layer, x, key, mask, bias, context_mask, query)))
    return Steps(list(_feed_forward(layer, x if query is None else x[:, query : query + 1])))


def _attention(
    layer: MultiHeadAttention,
    x: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: Mask | None,
    bias: Bias | Tensor | None,
    query: int | None,
) -> Iterator[Step]:
    if share_of(layer) is not None:
        raise ValueError("steps: in regard.parallel.sharded a rank has only some of the keys; ask outside the block")
    heads = layer.project(x, key, value)
    call = check_call("steps", *heads, **layer.scoring(mask, bias), wants_lse=True)
    grid = call.scoring.grid
    rows = range(grid.query_len) if query is None else range(query, query + 1)
    check_size(grid, rows)
    cut = slice(rows.start, rows.stop)
    key = x if key is None else key
    parts = (
        # name, what goes in, how many heads it makes, and the axes
        ("query", x[:, cut], layer.heads, ("batch", "heads", "query_len", "head_dim")),
        ("key", key, layer.kv_heads, ("batch", "kv_heads", "key_len", "head_dim")),
        ("value", key if value is None else value, layer.kv_heads, ("batch", "kv_heads", "key_len", "value_dim")),
    )
    projected = []
    for name, given, _, axes in parts:
        linear: nn.Linear = getattr(layer, name)
        features = linear(given)
        projected.append(features)
        yield Step(f"project {name}", _times(f"{name}_input", name, linear), ("batch", axes[2], "features"), features)
    for (name, _, count, axes), features in zip(parts, projected, strict=True):
        apart = split(features, count)
        yield Step(f"split {name}", f"features into {count} {axes[1]} of {apart.shape[-1]}", axes, apart)
        norm: nn.Module | None = getattr(layer, f"{name}_norm", None)
        if norm is not None:
            yield Step(f"norm {name}", f"{type(norm).__name__}({name}), for each head", axes, norm(apart))
    if layer.rotary is not None:
        for (name, _, _, axes), turned in zip(parts[:2], (heads.query[:, :, cut], heads.key), strict=True):
            yield Step(f"rotate {name}", "each pair of features turned by position * frequency", axes, turned)

    attended = heads.query
    for step in attention_steps(heads.query, heads.key, heads.value, call.scoring, rows):
        attended = step.tensor
        yield step
    joined = join(attended)
    yield Step("join", "heads side by side", ("batch", "query_len", "features"), joined)
    if layer.output is not None:
        formula = _times("joined", "output", layer.output)
        yield Step("project output", formula, ("batch", "query_len", "dim"), layer.output(joined))


def attention_steps(query: Tensor, key: Tensor, value: Tensor | None, scoring: Scoring, rows: range) -> Iterator[Step]:
    """The steps from heads to what they give: the scores' stages, softmax and, where there are values, weigh.

    Shapes: query, key and value are those of the whole call; rows: the queries that are shown.
    """
    square, keys = ("batch", "heads", "query_len", "key_len"), range(scoring.grid.key_len)
    scores = query
    for stage in scoring.stages(query[:, :, rows.start : rows.stop], key, rows, keys):
        scores = stage.scores
        yield Step(stage.name, stage.formula, square, scores)
    weights, _ = softmax(scores, scoring.sink)
    formula = "exp(scores) / sum over keys of exp(scores)" + (" and exp(sink)" if scoring.sink is not None else "")
    yield Step("softmax", formula, square, weights, _saturation(scores, weights))
    if value is not None:
        seen = zero_unseen(value, scoring.allowed(rows, keys))
        attended = grouped_matmul(weights, upcast(seen)).to(value.dtype)
        yield Step("weigh", "weights @ value", ("batch", "heads", "query_len", "value_dim"), attended)


def check_size(grid: Grid, rows: range) -> None:
    """Refuses what is too much to show at once."""
    cells = grid.batch * grid.heads * len(rows) * grid.key_len
    if cells > MAX_SHOWN_SCORES:
        raise ValueError(f"steps: {cells:,} scores are too many to show; give query=i to see one token's")


def _feed_forward(layer: FeedForward, x: Tensor) -> Iterator[Step]:
    middle = ("batch", "length", "hidden_dim")
    activate = ACTIVATIONS[layer.activation]
    hidden = layer.input(x)
    yield Step("widen", _times("x", "input", layer.input), middle, hidden)
    if layer.gate is None:
        hidden = activate(hidden)
        yield Step("activate", f"{layer.activation}(widened)", middle, hidden)
    else:
        gate = activate(layer.gate(x))
        name = "silu" if layer.activation == "swiglu" else "gelu"
        yield Step("gate", f"{name}({_times('x', 'gate', layer.gate)})", middle, gate)
        hidden = gate * hidden
        yield Step("multiply", "gate * widened", middle, hidden)
    yield Step("narrow", _times("hidden", "output", layer.output), ("batch", "length", "dim"), layer.output(hidden))


def _block(
    block: Block,
    x: Tensor,
    context: Tensor | None,
    mask: Mask | None,
    bias: Bias | Tensor | None,
    context_mask: Mask | None,
    query: int | None,
) -> Iterator[Step]:
    cross, feed_forward, length = block.cross, block.feed_forward, x.shape[1]
    if (cross is None) != (context is None):
        has = "no cross-attention; it takes no key" if cross is None else "cross-attention; give its context as `key`"
        raise ValueError(f"steps: this block has {has}")
    if not isinstance(feed_forward, FeedForward):
        raise TypeError(f"steps: expected a FeedForward in the block, got {type(feed_forward).__name__}")

    def attend(x: Tensor) -> Iterator[Step]:
        return _attention(block.attention, x, None, None, mask, bias, query)

    def look_across(x: Tensor) -> Iterator[Step]:
        assert cross is not None
        # a single query has to stand at its own place again; what stands at the others is not shown
        x = x if query is None else x.expand(-1, length, -1)
        return _attention(cross, x, context, None, context_mask, None, query)

    # only self-attention needs the other tokens, as keys; from there on a token is alone
    shown = slice(None) if query is None else slice(query, query + 1)
    norms = block.attention_norm, block.attention_output_norm
    x = yield from _sublayer(block, "attention", norms, x, attend, shown)
    if block.cross_norm is not None:
        x = yield from _sublayer(block, "cross", (block.cross_norm, block.cross_output_norm), x, look_across)
    norms = block.feed_forward_norm, block.feed_forward_output_norm
    yield from _sublayer(block, "feed-forward", norms, x, lambda x: _feed_forward(feed_forward, x))


def _sublayer(
    block: Block,
    name: str,
    norms: tuple[nn.Module, nn.Module | None],
    x: Tensor,
    inner: Callable[[Tensor], Iterator[Step]],
    shown: slice = slice(None),
) -> Generator[Step, None, Tensor]:
    """Norms, the sublayer's own steps, and the sum, in the block's order; returns what goes on.

    Args:
        norms: of what goes in (or of the sum), and of what comes out.
    """
    axes = ("batch", "length", "dim")
    norm, output_norm = norms
    normed = f"{type(norm).__name__}(x)"
    given = x
    if block.norm_first:
        given = norm(x)
        yield Step(f"{name} norm", normed, axes, given[:, shown])
    last = given
    for step in inner(given):
        last = step.tensor
        yield step._replace(name=f"{name} {step.name}")
    if output_norm is not None:
        last = output_norm(last)
        yield Step(f"{name} output norm", f"{type(output_norm).__name__}({name})", axes, last)
    x = x[:, shown] + last
    yield Step(f"{name} add", f"x + {name}", axes, x)
    if not block.norm_first:
        x = norm(x)
        yield Step(f"{name} norm", normed, axes, x)
    return x


def _times(given: str, name: str, linear: nn.Linear) -> str:
    """The formula of a linear map."""
    return f"{given} @ W_{name}" + ("" if linear.bias is None else f" + b_{name}")


def _saturation(scores: Tensor, weights: Tensor) -> str:
    several = (scores > -math.inf).sum(-1) > 1
    if not several.any():
        return ""
    full = (weights.amax(-1) > SATURATED_WEIGHT) & several
    share = float(full.sum() / several.sum())
    if share < 0.5:
        return ""
    largest = float(scores[scores > -math.inf].abs().max())
    return (
        f"saturated: {share:.0%} of the queries put more than {SATURATED_WEIGHT} of their weight on one key (largest "
        f"score {largest:.3g}); almost no gradient passes. "
        "Are the scores scaled by 1/sqrt(head_dim), the weights small?"
    )


def three_tokens() -> tuple[MultiHeadAttention, Tensor]:
    """The smallest example that shows everything: three tokens of four features, one head of three, whole numbers.

    Returns:
        The layer (scale 1, no output projection) and its input [1, 3, 4]; ``print(steps(*three_tokens()))``.
    References:
        Karim 2019, "Illustrated: Self-Attention", whose numbers these are.
    """
    layer = MultiHeadAttention(4, 1, key_dim=3, value_dim=3, output=False, projection_bias=False, scale=1.0)
    matrices = {
        "query": [[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]],
        "key": [[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]],
        "value": [[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]],
    }
    with torch.no_grad():
        for name, matrix in matrices.items():
            layer.get_submodule(name).weight.copy_(torch.tensor(matrix).T)  # type: ignore[operator]
    return layer, torch.tensor([[[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]]])


def numbers(tensor: Tensor, *, widest: int = 8, tallest: int = 8) -> list[str]:
    """A tensor of two axes or more as text: all of it where it is small, its corner and its range where it is not."""
    matrix = tensor.reshape(-1, *tensor.shape[-2:]) if tensor.dim() > 2 else tensor[None]
    rows, columns = matrix.shape[-2:]
    lines = []
    for part, values in enumerate(matrix[:tallest]):
        if len(matrix) > 1:
            place = torch.unravel_index(torch.tensor(part), tensor.shape[:-2])
            lines.append(f"({', '.join(str(int(i)) for i in place)})")
        cells = [[format_number(float(v)) for v in row[:widest]] for row in values[:tallest]]
        width = max((len(cell) for row in cells for cell in row), default=0)
        dots = " ..." if columns > widest else ""
        lines += ["".join(cell.rjust(width + 1) for cell in row) + dots for row in cells]
        if rows > tallest:
            lines.append(f" ... {rows - tallest} more rows")
    if len(matrix) > tallest:
        lines.append(f"... {len(matrix) - tallest} more")
    if rows > tallest or columns > widest or len(matrix) > tallest:
        finite = tensor[tensor.isfinite()].float()
        if finite.numel():
            least, most = format_number(float(finite.min())), format_number(float(finite.max()))
            lines.append(f"{tensor.numel():,} numbers, {least} to {most}")
    return lines


def format_number(value: float) -> str:
    """A number in five significant digits, whole ones without a point."""
    if value.is_integer():
        return str(int(value)) if abs(value) < 1e6 else f"{value:.4e}"
    return f"{value:.5g}"
