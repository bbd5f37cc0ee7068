"""Strips in transforms of torch.func.

They are planned once the transforms are taken off and tensors have numbers. So a call is handed on as what a graph of
torch.compile would hold of it: mask and bias as lines, and their tensors.

torch.func.vmap gives a call tensors with an axis that it does not see. Where mask and bias say the same of every batch
index, that axis is folded into the batch, and all is one call; otherwise it is one call after another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.dropout import Dropout
from regard.graphs import is_of_many, transformed
from regard.kernels.call import Call, all_scores
from regard.kernels.fused import HALF
from regard.kernels.second import batched_gradients, is_batched, second_gradients
from regard.kernels.strips import native
from regard.kernels.strips.autograd import one_by_one
from regard.kernels.strips.compiled import gradients_of, line_of
from regard.kernels.strips.engines import ENGINES, Engine, able
from regard.kernels.strips.grouping import StripPlan
from regard.rules import Rule, deserialise
from regard.scores import Scoring
from regard.shapes import Grid

_VMAP, _GRAD = torch._C._functorch.TransformType.Vmap, torch._C._functorch.TransformType.Grad
_OfVmap = torch._C._functorch.CVmapInterpreterPtr

LEAST_SCORES = 1 << 19
"""Scores, of all that torch.func.vmap adds, from which on the library takes less time than a few operators, although
torch takes 0.3 ms to begin each function that is not one of its own. Row "8 texts by vmap, causal" of features.py."""


def cannot(call: Call) -> str | None:
    """Why a call cannot be planned so late."""
    scoring, first = call.scoring, range(1)
    if scoring.additive is not None:
        return "in torch.func it does not support additive similarity"
    if not all(scoring.grid[:4]):
        return None
    said: list[Tensor] = []
    if _is_function(scoring.bias):
        if scoring.learned():
            return "in torch.func it does not support a bias of one's own that holds tensors"
        said.append(scoring.biases(first, first, torch.float32))
    if _is_function(scoring.mask):
        said.append(scoring.mask_or_everything.allowed(first, first))
    if any(map(is_of_many, said)):
        return "torch.func.vmap transforms what a function is made of"
    return None


def _is_function(rule: Rule | None) -> bool:
    """Whether something is a mask or bias that is no line."""
    return rule is not None and line_of(rule)[0] is None


def cannot_natively(call: Call) -> str | None:
    """The same of the compiled library."""
    kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
    forward = forward_ad._current_level >= 0 or any(kind not in (_VMAP, _GRAD) for kind in kinds)
    if forward or kinds.count(_GRAD) > 1:
        return "of transforms by torch.func and torch.autograd.forward_ad, it supports vmap and one grad"
    if not native.runs_on(call):
        return "there is no compiled library for these tensors"
    if not (all(call.scoring.grid[:4]) and call.query.shape[3] and call.value.shape[3]):
        return "there is nothing to compute"
    return cannot(call)


def pays(call: Call) -> bool:
    """Whether this takes less time than a few operators on all scores."""
    if not transformed():
        return False
    stack = torch._C._functorch.get_interpreter_stack() or ()
    added = (_OfVmap(interpreter).batchSize() for interpreter in stack if interpreter.key() == _VMAP)
    return all_scores(call) * math.prod(added) >= LEAST_SCORES


def run(call: Call, by: Engine) -> tuple[Tensor, Tensor | None]:
    """Output and lse of such a call."""
    scoring = call.scoring
    mask, of_mask, mask_numbers = line_of(scoring.mask)
    bias, of_bias, bias_numbers = line_of(scoring.bias)
    rules = scoring.mask if mask is None else mask, scoring.bias if bias is None else bias
    numbers = tuple(mask_numbers), tuple(bias_numbers)
    form = _Form(by.name, scoring.grid, scoring.scale, scoring.softcap, call.dropout, rules, numbers, len(of_mask))
    seed = None if call.dropout is None else torch.as_tensor(call.dropout.seed)
    output, lse = _Folded.apply(form, *call[:3], scoring.sink, seed, *of_mask, *of_bias)  # type: ignore[no-untyped-call]
    return output, lse if call.wants_lse else None


@dataclass(frozen=True, slots=True)
class _Form:
    """All of a call but its tensors.

    Attributes:
        by: the name of the engine. dropout: with a seed that counts for nothing.
        rules: mask and bias, as lines; None for none; those with functions as they are.
        numbers: those of each line. of_mask: the number of tensors of the mask, which come before those of the bias.
    """

    by: str
    grid: Grid
    scale: float
    softcap: float | None
    dropout: Dropout | None
    rules: tuple[Rule | str | None, Rule | str | None]
    numbers: tuple[tuple[int, ...], tuple[int, ...]]
    of_mask: int

    def scoring(self, sink: Tensor | None, tensors: Sequence[Tensor]) -> Scoring:
        """Of tensors that have numbers."""
        parts = tensors[: self.of_mask], tensors[self.of_mask :]
        made: list[Any] = [
            deserialise(rule, of_rule, numbers) if isinstance(rule, str) else rule
            for rule, of_rule, numbers in zip(self.rules, parts, self.numbers, strict=True)
        ]
        mask, bias = (None if rule is None else rule.bind(self.grid) for rule in made)
        return Scoring(self.grid, self.scale, self.softcap, bias, mask, sink)

    def dropped(self, seed: Tensor | None) -> Dropout | None:
        """Which weights are dropped by a seed that has a number."""
        return None if self.dropout is None or seed is None else replace(self.dropout, seed=int(seed))

    def planned(
        self, scoring: Scoring, dropout: Dropout | None, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Engine, StripPlan]:
        """What computes it, and its strips."""
        call = Call(query, key, value, scoring, dropout, wants_lse=True)
        by = able(ENGINES[self.by], call)
        return by, by.plan_of(call)

    def differs_by_batch(self, tensors: Sequence[Tensor]) -> bool:
        """Whether mask, bias or dropout differ between batch indices."""
        scoring = self.scoring(None, tensors)
        rules = scoring.mask, scoring.bias
        return self.dropout is not None or any(rule is not None and rule.varies_by_batch for rule in rules)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which gradients are wanted: of the sink, and of the tensors of mask and bias."""

    sink: bool
    tensors: tuple[bool, ...]


class _Folded(torch.autograd.Function):
    """Output and lse, of a form, query, key, value, sink, seed of dropout, and the tensors of mask and bias."""

    @staticmethod
    def forward(
        form: _Form,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        seed: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        scoring, dropout = form.scoring(sink, [tensor.detach() for tensor in tensors]), form.dropped(seed)
        by, plan = form.planned(scoring, dropout, query, key, value)
        output, lse, _exact = by.forward(query, key, value, sink, scoring, dropout, plan, learns=False)
        return output, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.form = inputs[0]
        ctx.save_for_backward(*output, *inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, *three, sink, seed = ctx.saved_tensors[:7]
        tensors = ctx.saved_tensors[7:]
        if grad_output is None and grad_lse is None:  # gradients of gradients do not go through the results
            return None, *(None for _ in ctx.saved_tensors[2:])
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        if is_batched(grad_output, grad_lse) and not transformed():
            with torch.enable_grad():
                given = ctx.form.scoring(None, tensors), ctx.form.dropped(seed), (grad_output, grad_lse)
                found = batched_gradients(*given, (*three, sink, *tensors))
                return None, *found[:4], None, *found[4:]
        wanted = _Wanted(ctx.needs_input_grad[4], tuple(ctx.needs_input_grad[6:]))
        given = ctx.form, wanted, grad_output, grad_lse, output, lse, *three, sink, seed, *tensors
        return None, *_Gradients.apply(*given)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        raise NotImplementedError(
            "regard: derivatives that are carried forward (torch.func.jvp, torch.autograd.forward_ad) are those of "
            "torch's operators, which hold all scores; of so many, only where it is asked for: kernel='direct', or "
            "a part of the queries at a time"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], form: _Form, *inputs: Any) -> tuple[Any, Any]:
        if any(at is not None for at in in_dims[4:]) or form.differs_by_batch(inputs[5:]):
            return one_by_one(_Folded, info, in_dims, form, *inputs)
        return _in_one(_Folded, info.batch_size, in_dims, (form,), inputs, 3)


class _Gradients(torch.autograd.Function):
    """The gradients of query, key, value, sink and tensors, which `second_gradients` differentiates."""

    @staticmethod
    def forward(
        form: _Form, wanted: _Wanted, grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor,
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, seed: Tensor | None, *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        leaves = [one.detach().requires_grad_(wants) for one, wants in zip(tensors, wanted.tensors, strict=True)]
        with torch.set_grad_enabled(any(wanted.tensors)):
            scoring, dropout = form.scoring(sink, leaves), form.dropped(seed)
            by, plan = form.planned(scoring, dropout, query, key, value)
            learned = scoring.learned()
            with torch.no_grad():
                if query.dtype in HALF:  # gradients of scores are differences from the output unrounded
                    _, lse, output = by.forward(query, key, value, sink, scoring, dropout, plan)
                found = by.backward(
                    query, key, value, sink, scoring, dropout, plan, *learned,
                    output=output, lse=lse, grad_output=grad_output, grad_lse=grad_lse,
                )  # fmt: skip
            of_sink = found[3] if wanted.sink else None
            return *found[:3], of_sink, None, *gradients_of(leaves, learned, found[4:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        ctx.form, _, grad_output, grad_lse, _, _, *others = inputs
        ctx.save_for_backward(grad_output, grad_lse, *others)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *six, seed = ctx.saved_tensors[:7]
        tensors, of_tensors = ctx.saved_tensors[7:], grads[5:]
        with torch.enable_grad():
            scoring = ctx.form.scoring(None, tensors)
        given = (*six, *tensors), (*grads[:4], *of_tensors)
        found = second_gradients(scoring, ctx.form.dropped(seed), *given)
        return None, None, *found[:2], None, None, *found[2:6], None, *found[6:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], form: _Form, wanted: _Wanted, *inputs: Any) -> tuple[Any, Any]:
        own = wanted.sink or any(wanted.tensors)  # a gradient of them for each
        if own or any(at is not None for at in in_dims[9:]) or form.differs_by_batch(inputs[9:]):
            return one_by_one(_Gradients, info, in_dims, form, wanted, *inputs)
        return _in_one(_Gradients, info.batch_size, in_dims, (form, wanted), inputs, 7)


def _in_one(
    function: Any, size: int, in_dims: tuple[int | None, ...], fixed: tuple[Any, ...], inputs: Sequence[Any], count: int
) -> tuple[Any, Any]:
    """The rule for torch.func.vmap: the axis that it adds, of so many numbers, is folded into the batch.

    Args:
        fixed: a form, and what else are no tensors. count: of the inputs, those that are of each text.
    """
    form, *more = fixed
    of_all = replace(form, grid=form.grid._replace(batch=size * form.grid.batch))

    def fold(tensor: Tensor | None, at: int | None) -> Tensor | None:
        if tensor is None:
            return None
        return (tensor.expand(size, *tensor.shape) if at is None else tensor.movedim(at, 0)).flatten(0, 1)

    folded = map(fold, inputs[:count], in_dims[len(fixed) :])
    found = function.apply(of_all, *more, *folded, *inputs[count:])
    results = tuple(None if result is None else result.unflatten(0, (size, -1)) for result in found)
    return results, tuple(None if result is None else 0 for result in results)
