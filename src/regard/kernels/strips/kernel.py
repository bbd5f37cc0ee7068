"""Any mask, at a cost proportional to what it allows: a plan of dense calls, one for each strip.

A mask is cut into *strips* (`plan`). A strip is one dense attention call over its concatenated spans: without a mask if
all of it is allowed, else with a small one. Nothing of size query_len x key_len is built, not even for planning. There
are three kernels, which differ in what computes a strip: torch's fused operator and plain products (`engine`), the
compiled library (`native`), or programs on a GPU (`gpu`), whose strips are blocks of equal size.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.biases import Bias, Given
from regard.dropout import Dropout
from regard.graphs import exporting, tracing, transformed
from regard.kernels import fused
from regard.kernels.call import Call, Kernel, Prepared, learns
from regard.kernels.hidden import Hidden, hidden_in, known_numbers
from regard.kernels.strips import alone, engine, native, options, products, ready, transforms
from regard.kernels.strips.added import is_by_distance
from regard.kernels.strips.autograd import apply, unwrap_if_dead
from regard.kernels.strips.compiled import in_graph, line_of, write
from regard.kernels.strips.engines import GPU, NATIVE, OPERATORS, Engine, able
from regard.kernels.strips.gpu import passes
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.options import is_given, plan_of
from regard.kernels.strips.order import by_form
from regard.kernels.strips.plan import Kind, Strip
from regard.kernels.strips.reordering import Reordering, reordering, take
from regard.kernels.strips.single import Alone, is_told, single
from regard.masks import EVERYTHING
from regard.masks.planning import is_top_left_causal
from regard.matmul import is_regular, onednn_beats_fused
from regard.numerics import add_sink, upcast, wide
from regard.scores import Scoring

Three = tuple[Tensor, Tensor, Tensor]


def cannot(call: Call) -> str | None:
    """Why strips do not support a call: an exported graph cannot contain them, nor torch.func see into functions."""
    if exporting():
        return "an exported graph can hold only torch's own operators"
    return transforms.cannot(call) if transformed() else None


def cannot_natively(call: Call) -> str | None:
    """The same of the compiled library; what a graph does not know yet, its node will ask."""
    if transformed():
        return transforms.cannot_natively(call)
    return cannot(call) or (None if tracing() and native.runs_on(call) else native.cannot(call))


def cannot_on_a_gpu(call: Call) -> str | None:
    """The same of programs on a GPU."""
    return passes.cannot(call) or cannot(call)


def run(call: Call, by: Engine = OPERATORS) -> tuple[Tensor, Tensor | None]:
    """Computes the strips; in a graph of torch.compile, as one node."""
    if not tracing():
        if transformed():
            return _transformed(call, by)
        attend = _of_one(call) if by is NATIVE else None
        if attend is None:
            return _run(call, by)
        return attend(*call[:3], call.scoring.sink, *_added_to_one(call.scoring, wide(call.query.dtype)))
    if not is_one_node(call):
        broken: Callable[[Call, Engine], tuple[Tensor, Tensor | None]] = torch.compiler.disable(_run)
        return broken(call, by)  # a graph break
    scoring, dropout = call.scoring, call.dropout
    given = scoring.sink, *write(call, by.name), scoring.scale, scoring.softcap
    if by is NATIVE and dropout is None and not call.learns:
        output, *only = alone.in_graph(*call[:3], *given)
        return output, only[0] if only else None
    three = _in_precision(call[:3], scoring, dropout, call.wants_lse) if by is OPERATORS else call[:3]
    seed, rate = (None, 0.0) if dropout is None else (torch.as_tensor(dropout.seed), dropout.rate)
    output, lse, _ = in_graph(*three, *given, seed, rate)
    return output.to(call.query.dtype), lse


def _transformed(call: Call, by: Engine) -> tuple[Tensor, Tensor | None]:
    scoring, dtype = call.scoring, call.query.dtype
    three = _in_precision(call[:3], scoring, call.dropout, call.wants_lse) if by is OPERATORS else call[:3]
    output, lse = transforms.run(Call(*three, *call[3:]), by)
    return output.to(dtype), lse


def is_one_node(call: Call) -> bool:
    """Whether a graph of torch.compile can hold the call as one node, which has room for numbers and tensors, but not
    for functions, nor for biases of one's own, which may hold more than the arguments that they are made of."""
    scoring = call.scoring
    if scoring.additive is not None or line_of(scoring.mask_or_everything)[0] is None:
        return False
    terms = () if scoring.bias is None else scoring.bias.terms()
    return all(":" not in term.kind for term in terms)  # as those that are regard's own are called


def _in_precision(three: Three, scoring: Scoring, dropout: Dropout | None, wants_lse: bool) -> Three:
    """Query, key and value.

    In half precision, torch's operator approximates exp: accurate enough for the output, but not for an lse from which
    weights are recomputed. That is computed in float32.
    """
    query, key, value = three
    if wants_lse and engine.flash_can(query, scoring, dropout):
        return upcast(query), upcast(key), upcast(value)
    return three


def _run(call: Call, by: Engine) -> tuple[Tensor, Tensor | None]:
    return _planned(call, able(by, call))(call.query, call.key, call.value, call.scoring.sink, None)


def prepare(call: Call, by: Engine = OPERATORS) -> Prepared | None:
    """The strips are planned once; None where the mask is asked in every call, and for one query, which has no plan."""
    if not call.concrete or (by is NATIVE and _of_one(call) is not None):
        return None
    planned = _planned(call, by)
    if not planned.plan.is_kept:
        return None
    if by is NATIVE:
        planned = replace(planned, plan=by_form(planned.plan, call.query, call.value, planned.scoring))
    bias = call.scoring.bias
    if isinstance(bias, Given):
        if planned.changed is not None:
            return None
        planned = replace(planned, scoring=planned.scoring.with_bias(None), given=bias.without_numbers())
    dropout = planned.dropout
    if dropout is None:
        return planned.alone if planned.is_told_once else planned

    def with_new_seed(
        query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return planned(query, key, value, sink, bias, dropout.drawn_anew())

    return with_new_seed


def _of_one(call: Call) -> Alone | None:
    """One query that reads all keys, or some side by side, without a plan: in the next call there may be one more. None
    where strips leave keys out for all batch indices, and where gradients are wanted."""
    scoring, mask = call.scoring, call.scoring.mask
    if scoring.grid.query_len > 1 or call.dropout is not None:
        return None
    attend = single(call)
    if attend is not None and mask is not None and mask.closed_form and not mask.varies_by_batch:
        hidden = hidden_in(mask, scoring.grid)
        return attend if hidden is None or is_told(hidden) else None
    return attend


def _added_to_one(scoring: Scoring, dtype: torch.dtype) -> tuple[Hidden | None, Tensor | None]:
    """What the mask hides from one query, and what is added to its scores besides; or all that is added."""
    if scoring.bias is None:
        return hidden_in(scoring.mask, scoring.grid), None
    if isinstance(scoring.bias, Given):
        return hidden_in(scoring.mask, scoring.grid), scoring.bias.numbers
    look_up = known_numbers(scoring, dtype)
    if look_up is not None:  # as in the next call like this one
        return None, look_up()[1]
    return hidden_in(scoring.mask, scoring.grid), scoring.biases(range(1), range(scoring.grid.key_len), dtype)


def _planned(call: Call, by: Engine) -> "Planned":
    call, changed = _sorted(call) if by is OPERATORS else (call, None)
    plan = by.plan_of(call)
    alone = plan.only if by is OPERATORS and not plan.others else None
    whole = alone if alone is not None and _is_one_call(alone, call) else None
    return Planned(by, call.scoring.with_sink(None), call.dropout, plan, changed, whole, call.wants_lse, call.learns)


def _sorted(call: Call) -> tuple[Call, Reordering | None]:
    """The call of which the strips by torch's operators are, and how its tokens are sorted, or None."""
    changed = reordering(call, copies=True)
    return call if changed is None else changed.planned(call), changed


@dataclass(frozen=True, slots=True)
class Planned:
    """A call with its strips, which waits for its tensors.

    Attributes:
        engine: what computes the strips.
        scoring, dropout, plan: of the tokens in the order in which they are computed, the scoring without its sink.
        changed: how tokens are sorted for that, or None; the library's plan has it itself.
        whole: the only strip, if it is one call of torch's on some of the keys, as in decoding; None if not.
        learns: whether anything needs a gradient.
        given: as what each call binds its bias tensor; None if the scoring has the bias.
    """

    engine: Engine
    scoring: Scoring
    dropout: Dropout | None
    plan: StripPlan
    changed: Reordering | None
    whole: Strip | None
    wants_lse: bool
    learns: bool
    given: Given | None = None

    @property
    def is_told_once(self) -> bool:
        """Whether the library is told the same in every call, but for tensors and dropout, and nothing learns."""
        alike = self.plan.told is not None and not self.plan.others
        return alike and not self.learns

    def alone(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same, of such a call."""
        of_call = self.scoring.bias if self.given is None else self.given.of(bias)
        wants_lse = self.wants_lse
        found = ready.forward(query, key, value, sink, of_call, None, self.plan, wants_lse, False)
        if found is None:
            return self(query, key, value, sink, bias)
        return found[0], found[1] if wants_lse else None

    def last_pass(self, sink: Tensor | None) -> ready.Pass | None:
        """That of the last such call, if the library can be told all of it at once."""
        if not self.learns:
            return ready.last_forward(self.plan, sink, self.wants_lse, learns=False)
        if self.plan.others or self.dropout is not None or any(map(learns, self.scoring.learned())):
            return None
        return ready.last_forward(self.plan, sink, wants_lse=True, learns=True)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | Tensor | None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """dropout: with a seed of this call; None: that of the call that was planned."""
        changed, dropout = self.changed, self.dropout if dropout is None else dropout
        if changed is None:
            scoring = self.scoring if self.given is None else self.scoring.with_bias(self.given.of(bias))
            return self._in_order(query, key, value, sink, scoring, dropout)
        query, key, value = take(query, changed.queries), take(key, changed.keys), take(value, changed.keys)
        output, lse = self._in_order(query, key, value, sink, self.scoring, dropout)
        return take(output, changed.back), None if lse is None else take(lse, changed.back)

    def _in_order(
        self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, scoring: Scoring, dropout: Dropout | None
    ) -> tuple[Tensor, Tensor | None]:
        dtype = query.dtype
        if self.whole is not None:
            span = self.whole.spans[0]
            key, value = (tensor.narrow(2, span.start, len(span)) for tensor in (key, value))
            if sink is None and not self.wants_lse:
                return fused.full_attention(query, key, value, scale=scoring.scale), None
        three = query, key, value
        if self.engine is OPERATORS:
            three = _in_precision(three, scoring, dropout, self.wants_lse)
        if self.whole is not None:
            causal, three = self.whole.kind is Kind.CAUSAL, fused.with_whole_features(*three)
            output, lse = fused.flash(*three, scale=scoring.scale, is_causal=causal)
            if sink is not None:
                output, lse = add_sink(output, lse, sink, out=output)
            return output.to(dtype), lse if self.wants_lse else None
        if self.learns:
            scoring = scoring.with_sink(sink)
            sink = None if sink is None else unwrap_if_dead(sink)
            learned = map(unwrap_if_dead, scoring.learned())
            output, lse = apply(self.engine, scoring, dropout, self.plan, *map(unwrap_if_dead, three), sink, *learned)
            return output if output.dtype is dtype else output.to(dtype), lse
        # without gradients, skip autograd, whose overhead equals a small call
        output, lse, _ = self.engine.forward(
            *three, sink, scoring, dropout, self.plan, wants_lse=self.wants_lse, learns=False
        )
        return output if output.dtype is dtype else output.to(dtype), lse if self.wants_lse else None


def _is_one_call(strip: Strip, call: Call) -> bool:
    """Whether the only strip of a plan is one call on some of the keys, as in decoding: of torch's function, or of its
    operator, which tells the log-sum-exp, without gradients."""
    scoring, kinds = call.scoring, [Kind.FULL]
    if call.wants_lse or scoring.sink is not None:
        if call.learns or not call.concrete or not call.query.numel() or call.query.shape[3] != call.value.shape[3]:
            return False
        kinds.append(Kind.CAUSAL)
    whole = strip.batch_index is None and strip.kind in kinds and len(strip.spans) == strip.spans[0].step == 1
    if scoring.bias is not None or not (whole and engine.flash_can(call.query, scoring, call.dropout)):
        return False
    return strip.times == 1 and not engine.products_pay(strip, call.query, call.key, backward=call.learns)


def products_pay_alone(call: Call) -> bool:
    """Whether plain products are faster than one call of torch's function that would do the same."""
    if not _is_one_call_of_torchs(call):
        return False
    widens = call.query.dtype in fused.HALF and not (call.learns or onednn_beats_fused(call.query.dtype))
    if call.scoring.bias is not None and widens:
        return False  # a table is copied to float32 for every text, which torch's operator reads in place
    causal, (batch, kv_heads), grid = _is_causal(call), call.key.shape[:2], call.scoring.grid
    rows = grid.query_len * (grid.heads // kv_heads)
    given = call.query.dtype, batch * kv_heads, rows, grid.key_len
    return products.pay(*given, causal=causal, backward=call.learns)


def products_pay_in_full(call: Call) -> bool:
    """Whether plain products take less time than torch's operator, if nothing is left out: by oneDNN, or in a dtype in
    which the operator is slow."""
    grid, kv_heads, dtype = call.scoring.grid, call.key.shape[1], call.query.dtype
    rows, keys = grid.query_len * (grid.heads // kv_heads), grid.key_len
    by_onednn = onednn_beats_fused(dtype) and is_regular(rows) and is_regular(keys)
    if not (by_onednn or fused.torch_imitates(dtype, backward=call.learns)):
        return False
    return products.pay(dtype, grid.batch * kv_heads, rows, keys, causal=False, backward=call.learns)


def _is_causal(call: Call) -> bool:
    return is_top_left_causal(call.scoring.mask) and call.scoring.grid.query_len == call.scoring.grid.key_len


def _is_one_call_of_torchs(call: Call) -> bool:
    mask, bias = call.scoring.mask_or_everything, call.scoring.bias
    plain = bias is None and (mask is EVERYTHING or _is_causal(call))
    reads_a_table = isinstance(bias, Given) and mask is EVERYTHING
    return (plain or reads_a_table) and engine.flash_can(call.query, call.scoring, call.dropout)


def num_scores(call: Call) -> int:
    """Scores of all strips; of a causal square those that its engine computes."""
    call, _ = _sorted(call)
    plan = plan_of(call)
    return sum(options.num_scores(strip, call) for part in plan.parts for strip in part.strips)


def cost(call: Call) -> float:
    """The scores of a dense call, over batch and heads, that takes as long."""
    return options.cost(_sorted(call)[0]) if all(call.scoring.grid[:4]) else 0.0


def one_by_one(call: Call) -> int:
    """How many strips take time each before they begin."""
    return options.one_by_one(_sorted(call)[0]) if all(call.scoring.grid[:4]) else 0


def peak_bytes(call: Call) -> int:
    """The log-sum-exp, and for the largest strip its mask and bias, copied keys, result and pieces of scores."""
    call, _ = _sorted(call)
    plan = plan_of(call)
    grid, query, key, scoring = call.scoring.grid, call.query, call.key, call.scoring
    size = upcast(query[:0]).element_size()
    flash = engine.flash_can(query, scoring, call.dropout)
    by_distance = flash and is_by_distance(scoring)
    sizes = []
    for strip in (strip for part in plan.parts for strip in part.strips):
        batch = grid.batch if strip.batch_index is None else 1
        of_one = len(strip.queries) * strip.keys
        masked = of_one * (1 + size) if strip.kind is Kind.MASKED and not by_distance else 0
        in_place = scoring.bias is None or by_distance or (is_given(call) and strip.kind is Kind.FULL)
        biases = 0 if in_place else 2 * batch * grid.heads * of_one * size
        together = 0 if len(strip.spans) == 1 else 2 * batch * key.shape[1] * strip.times * strip.keys * key.shape[3]
        result = batch * grid.heads * len(strip.queries) * strip.times * call.value.shape[3]
        by_torch = flash and not engine.products_pay(strip, query, key)
        pieces = 0 if by_torch else 2 * products.most_scores(strip, grid.heads // key.shape[1], query.dtype) * size
        sizes.append(masked + biases + pieces + (together + result) * query.element_size())
    of_call = grid.batch * grid.heads * grid.query_len * size
    return max(sizes, default=0) + of_call * (1 + len(plan.others) * (1 + call.value.shape[3]))


KERNEL = Kernel(
    "strips", cannot, run, num_scores, quadratic_numbers=lambda call: 0, peak_bytes=peak_bytes, prepare=prepare,
    reads_in_place=lambda call: True,
)  # fmt: skip
NATIVE_KERNEL = Kernel(
    "native",
    cannot_natively,
    run=lambda call: run(call, NATIVE),
    num_scores=native.num_scores,
    quadratic_numbers=lambda call: 0,
    peak_bytes=native.peak_bytes,
    prepare=lambda call: prepare(call, NATIVE),
    single=single,
    reads_in_place=lambda call: True,
)
GPU_KERNEL = Kernel(
    "triton",
    cannot_on_a_gpu,
    run=lambda call: run(call, GPU),
    num_scores=passes.num_scores,
    quadratic_numbers=lambda call: passes.evaluated_numbers(call.scoring),
    peak_bytes=passes.peak_bytes,
    reads_in_place=lambda call: True,
)
