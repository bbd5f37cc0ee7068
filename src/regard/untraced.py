"""A call of attention in a graph of torch.compile, as one function that Dynamo does not trace.

Before every run of a graph, Dynamo looks whether all that it traced is as it was: each function, constant and attribute
that was read. Of a call of attention these are several hundred, and to look at them takes longer than the attention of
one query: row "1 query, sink, compiled" of features.py. So the graph gets one function of tensors and constants, with
mask and bias as lines of text (`regard.rules.serialise`). Which operators it consists of is found out afterwards, when
torch runs it with tensors that have no numbers.

Only where all lengths are fixed: what is symbolic has to be traced by Dynamo, to whom it is a number.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from regard.biases import Bias
from regard.graphs import exporting, stands_in
from regard.kernels import KernelError, choose
from regard.kernels.strips.compiled import line_of
from regard.masks import Mask
from regard.rules import Rule, deserialise
from regard.scores import Additive
from regard.validation import check_call

Line = tuple[str | None, list[Tensor], list[int]]
"""A mask or bias as a line, with its tensors and numbers."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: object, bias: object, scale: float | None, softcap: float | None,
    sink: Tensor | None, additive: Additive | None, dropout: float, generator: torch.Generator | None, wants_lse: bool,
    kernel: str,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Output and lse of a call that Dynamo is tracing; None if it has to trace the call itself, or to refuse it."""
    if additive is not None or generator is not None or forward_ad._current_level >= 0 or not _stays_here():
        return None
    if not isinstance(mask, Mask | None) or not isinstance(bias, Bias | Tensor | None):
        return None
    mask_line, added = _line_of(mask), (None, [bias], []) if isinstance(bias, Tensor) else _line_of(bias)
    if mask_line is None or added is None:
        return None
    tensors = [query, key, value, *([] if sink is None else [sink]), *mask_line[1], *added[1]]
    if not all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors):
        return None
    numbers = [number for number in (scale, softcap, dropout) if number is not None]
    sizes = [size for tensor in tensors for size in tensor.shape]
    if not _are_fixed([*sizes, *numbers, *mask_line[2], *added[2]]):
        return None
    output, *lse = _attention(query, key, value, *mask_line, *added, scale, softcap, sink, dropout, wants_lse, kernel)
    return output, lse[0] if lse else None


def _line_of(rule: Rule | None) -> Line | None:
    """None if there is none."""
    found = line_of(rule)
    return None if rule is not None and found[0] is None else found


def _are_fixed(numbers: Iterable[float]) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_static_value  # with the compiler, which is there by now

    return all(isinstance(number, int | float) and has_static_value(number) for number in numbers)


def _stays_here() -> bool:
    """Whether the graph is for this process and its tensors are those of the call. If so, Dynamo is told not to trace
    `_attention`: this runs while it traces what comes before, and it takes the answer as it is."""
    if exporting() or torch._C._are_functorch_transforms_active():
        return False
    torch.compiler.allow_in_graph(_attention)
    return True


_stays_here._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: str | None, mask_tensors: list[Tensor], mask_numbers: list[int],
    bias: str | None, bias_tensors: list[Tensor], bias_numbers: list[int], scale: float | None, softcap: float | None,
    sink: Tensor | None, dropout: float, wants_lse: bool, kernel: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The call itself: output, and lse if it is wanted.

    Args:
        mask, bias: as lines, each with its tensors and numbers; None for none, or for the tensor that is the bias.
    """
    hidden = None if mask is None else deserialise(mask, mask_tensors, mask_numbers)
    added = next(iter(bias_tensors), None) if bias is None else deserialise(bias, bias_tensors, bias_numbers)
    function = "attention_with_lse" if wants_lse else "attention"
    given = query, key, value, hidden, added, scale, softcap, sink, None, dropout, None, wants_lse
    try:
        call = check_call(function, *given)
        output, lse = choose(call, kernel).compute(call)
    except (TypeError, ValueError, KernelError) as error:
        if not stands_in():
            raise
        # by this Dynamo leaves the call out of the graph, and there it fails again
        raise NotImplementedError(str(error)) from error
    return (output,) if lse is None else (output, lse)
