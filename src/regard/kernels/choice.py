"""Which kernel computes a call: a table, of which the first row that applies wins. `regard.plan` prints that row.

Only this file holds preferences. A kernel knows what it supports and what that costs; kernels do not import each other.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from regard.biases import Given
from regard.graphs import exporting, tracing, transformed
from regard.kernels import direct, fused, sdpa, strips
from regard.kernels.call import Call, Kernel, KernelError, all_scores
from regard.kernels.strips import engine, native, options, transforms
from regard.kernels.strips import kernel as strips_kernel
from regard.masks import EVERYTHING, Document, Mask
from regard.masks.planning import hides_later_keys, holds_data, is_likely_new
from regard.matmul import onednn_beats_fused
from regard.reference import reference

REFERENCE = Kernel(
    name="reference",
    cannot=lambda call: None,
    run=lambda call: reference(call.query, call.key, call.value, call.scoring, call.dropout),
    num_scores=all_scores,
    quadratic_numbers=lambda call: 3 * all_scores(call),
    peak_bytes=lambda call: 3 * all_scores(call) * max(4, call.query.element_size()),
    reads_in_place=lambda call: True,
)

KERNELS: tuple[Kernel, ...] = (
    sdpa.KERNEL, strips.GPU_KERNEL, strips.NATIVE_KERNEL, strips.KERNEL, direct.KERNEL, REFERENCE,
)  # fmt: skip

FEW_NUMBERS = 1 << 16
"""Up to this many numbers of query_len x key_len, computing them all costs less than avoiding them."""


SCORES_TO_BEGIN = 1 << 14
"""Scores that a thread computes in the time that strips take to begin, and each of them again unless they lie apart, as
packed documents. Found from 644 random calls with masks, on two threads, where MKL multiplies."""

SCORES_TO_CUT_A_TEXT = 1 << 18
"""Scores that torch's operator computes, on two threads, in the time in which Python looks at the data of a text in a
mask, such as padding, and cuts strips of it: two thirds of a millisecond. With REGARD_NATIVE=0, rows "half of the keys,
new in every call" and "documents apart, new in every call"."""

NEARLY_ALL = 0.85
"""A share of all scores that take as long as six products where seven are computed of them."""

KEEPS_WEIGHTS = 512
BY_WHOLE_PRODUCTS = 1.05
"""Features of a head from which gradients take less time with all weights kept than by the compiled library, too; and
the library's price up to which plain products without gradients take longer than it. From 1 to 8 heads of 256 to 768
features, 128 to 2,048 tokens, with AVX2 and with AVX-512; rows "100 queries, 1 head of 512" and "cells and bias, 2
heads of 256"."""

WORTH_LEAVING_OUT = 0.75
WORTH_LEAVING_OUT_BY_ONEDNN = 0.6
WORTH_LEAVING_OUT_IN_HALF_PRECISION = 0.3
"""Strips by torch's operator are faster than all scores at once if they cost less than this share of them: a score
takes them that much longer. Where oneDNN multiplies faster than MKL, so are all scores multiplied, but not the strips,
least of all their gradients in half precision. Row "8 documents, causal"."""

MAKES_A_TABLE = 1.5
"""Times as long as all else torch's operators take with a table made anew. Row "cells and bias, 2 heads of 256"."""

SCORES_TO_PLAN = 1 << 17
"""Scores that the library computes in the time in which Python finds out what a mask hides, or what is added. The
library finds out about data by itself, so that few scores are its own with a mask, or a sum of biases, that may be
another in every call. Of 8 to 12 queries of 4 heads and 387 keys, cells and a bias take 0.02 ms so, and took 1. Rows
"new in every call" of features.py."""

SCORES_IN_A_GRAPH = 1 << 12
"""Scores that operators in a graph of torch.compile compute on a thread in the time in which a node of the compiled
library begins, where torch's own function cannot compute the call; with gradients four times as many. From calls of 1
to 128 queries with a sink, a softcap, dropout or a bias that learns, on two threads; rows "sink, causal, compiled" and
"1 query, sink, compiled" of features.py."""

SCORES_ADDED_UP = 1 << 13
"""Scores of few queries, of 64 features, that a graph computes on a thread by sums of products, in the time in which a
node does it; with gradients four times as many. From calls of 1 to 8 queries of 8 or 32 heads, of which 1 to 8 share
keys and values, with a sink or padding: 1,024 to 131,072 scores, in float32 and bfloat16; rows "1 query, sink,
compiled" and "1 query, padded left, compiled" of features.py."""

MAX_SCORES_ON_A_GPU = 1 << 27
"""Scores that a GPU computes and holds at once, 512 MiB in float32, where its programs do not support a call."""


class Preference(NamedTuple):
    """A row of the table: the kernel used if it supports the call and the condition holds, and the reason."""

    kernel: Kernel
    reason: str
    condition: Callable[[Call], bool]


def _in_process(condition: Callable[[Call], bool]) -> Callable[[Call], bool]:
    """False in a graph that is exported, where sizes are symbolic and must not decide anything."""
    return lambda call: not exporting() and condition(call)


def _hides_most(call: Call, kernel: Kernel) -> bool:
    """Whether strips would leave out most of the work of another kernel, the price of every strip included."""
    mask = call.scoring.mask
    if not call.concrete or mask is None:
        return False
    most, to_begin = _worth_leaving_out(call) * kernel.num_scores(call), _to_begin(call)
    if to_begin + _to_cut(call) >= most or mask.structure() is None:
        return False
    return strips_kernel.cost(call) + to_begin * (1 + strips_kernel.one_by_one(call)) < most


def _worth_leaving_out(call: Call) -> float:
    """The share of all scores of which strips by torch's operator take as long as that takes for all of them."""
    if not onednn_beats_fused(call.query.dtype):
        return WORTH_LEAVING_OUT
    in_half = call.query.dtype in fused.HALF and call.learns
    return WORTH_LEAVING_OUT_IN_HALF_PRECISION if in_half else WORTH_LEAVING_OUT_BY_ONEDNN


def _to_begin(call: Call) -> int:
    return SCORES_TO_BEGIN * fused.speed(call.query.dtype) * torch.get_num_threads()


def _to_cut(call: Call) -> int:
    """Scores computed while strips are cut of data. Packed documents are cut at any price: strips of them leave out
    most scores, and the layers of a model share them."""
    leaves = call.scoring.mask_or_everything.leaves()
    if any(holds_data(leaf) and not (isinstance(leaf, Document) and leaf.closed_form) for leaf in leaves):
        return SCORES_TO_CUT_A_TEXT * call.scoring.grid.batch
    return 0


def _holds_little(call: Call) -> bool:
    """Whether torch's own function holds few numbers of query_len x key_len; those of a table are not asked for where
    the lengths alone are too many."""
    lengths = call.scoring.grid.query_len * call.scoring.grid.key_len
    needs_no_table = direct.plain(call.scoring) or fused.reads_a_table(call)
    return (needs_no_table or lengths <= FEW_NUMBERS) and sdpa.quadratic_numbers(call) <= FEW_NUMBERS


def _leaves_out_faint(call: Call) -> bool:
    """Whether strips leave out so many weights too faint to matter that torch's operator would take longer."""
    scores = options.scores_of_faint(call)
    return scores > 0.0 and scores > _to_begin(call) * (1 + strips_kernel.one_by_one(call))


_SKIPS = "it skips what the mask hides, in memory linear in the length"


def _kind(call: Call) -> tuple[torch.dtype, bool, bool, int]:
    """What it depends on how long the compiled library takes for a score."""
    return call.query.dtype, call.learns, native.has_table(call.scoring), native.head_size(call)


def _library_pays(call: Call) -> bool:
    """Whether strips take no more time by the compiled library than by torch's operator."""
    return native.pays(*_kind(call))


def _finds_a_table(call: Call) -> bool:
    """Whether what a bias and a mask add need not be written into one table in every call, for torch's operators."""
    if call.scoring.bias is None or options.is_given(call):
        return True
    return fused.reads_a_table(call) or sdpa.keeps_a_table(call)


def is_found_out(call: Call, mask: Mask | None) -> bool:
    """Whether it has so few scores that the library computes it in less time than it takes to find out what a new mask
    hides, or to write a new tensor and another bias into one table."""
    if all_scores(call) > SCORES_TO_PLAN:
        return False
    bias = call.scoring.bias
    of_sum = bias is not None and not isinstance(bias, Given) and any(isinstance(term, Given) for term in bias.terms())
    return of_sum or (mask is not None and is_likely_new(mask))


def _suits_the_library(call: Call) -> bool:
    """Whether the compiled library takes less time than all others: of one query always, and of few scores under a mask
    of data; otherwise, where torch's own function and strips by its operator do not exist, or compute so much more that
    a score may cost what it costs here."""
    if tracing():
        if direct.may_add_up(call) and not call.learns:  # and more scores than sums are good for
            return strips_kernel.is_one_node(call)
        share = 0.5 if hides_later_keys(call.scoring.mask_or_everything) else 1.0
        saved, to_begin = native.saved_by_a_node(*_kind(call), share)
        return all_scores(call) * saved >= to_begin and strips_kernel.is_one_node(call)
    if call.scoring.grid.query_len == 1 and not call.learns:
        return True
    if is_found_out(call, call.scoring.mask):
        return True
    by_torch = sdpa.cannot(call) is None and not call.bias_learns  # then it is plain operators
    if by_torch:
        scores, by_table = sdpa.num_scores(call), not direct.plain(call.scoring)
        if not native.beats(call, scores, by_table=by_table) and (
            _finds_a_table(call) or not native.beats(call, scores * MAKES_A_TABLE, by_table=by_table)
        ):
            return False
    if _library_pays(call) or not engine.flash_can(call.query, call.scoring, call.dropout):
        return True
    return native.beats(call, strips_kernel.cost(call) / _worth_leaving_out(call))


def _suits_the_library_in_a_graph(call: Call) -> bool:
    """The same of a call whose lengths are not known yet."""
    if not tracing():
        return False
    by_torch = engine.flash_can(call.query, call.scoring, call.dropout)
    return not by_torch or _library_pays(call)


def _most_scores_in_a_graph(of_a_thread: int, learns: bool) -> int:
    """Most that operators in a graph compute before a node has."""
    return of_a_thread * torch.get_num_threads() * (4 if learns else 1)


_most_scores_in_a_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the answer is as it is


def _suits_sums(call: Call) -> bool:
    """Whether a graph adds up the products of few queries in less time than a node begins and computes them."""
    if not (tracing() and direct.may_add_up(call)):
        return False
    products = all_scores(call) * max(64, call.query.shape[3], call.value.shape[3])
    return products <= 64 * _most_scores_in_a_graph(SCORES_ADDED_UP, call.learns)


def _suits_all_at_once(call: Call) -> bool:
    """Whether a few products and a softmax take less time than the other operators. Where the library takes less time
    for a score, it leaves only what torch's own function begins sooner, and these begin last."""
    if strips.NATIVE_KERNEL.cannot(call) is None and _library_pays(call):
        return False
    return direct.pays(call) and not _hides_most(call, direct.KERNEL)


def _saves_a_product(call: Call) -> bool:
    """Whether large heads take less time with all weights kept, under a mask of which the library, too, would compute
    nearly all scores."""
    smallest = min(call.query.shape[3], call.value.shape[3])
    if not direct.saves_a_product(call) or (smallest < KEEPS_WEIGHTS and _costs_less(call)):
        return False
    if call.scoring.mask_or_everything is EVERYTHING:
        return True
    library = strips.NATIVE_KERNEL
    return library.cannot(call) is None and library.num_scores(call) >= NEARLY_ALL * all_scores(call)


def _multiplies_faster(call: Call) -> bool:
    """Whether large heads take less time by two products of whole matrices."""
    return direct.multiplies_faster(call) and not _costs_less(call, BY_WHOLE_PRODUCTS)


def _costs_less(call: Call, price: float = 1.0) -> bool:
    """Whether the compiled library computes the call, for less than this price."""
    return strips.NATIVE_KERNEL.cannot(call) is None and native.price(*_kind(call)) < price


def _is_torchs_own(call: Call) -> bool:
    """Whether torch's own function computes nothing that the mask hides, and is given no table."""
    return sdpa.cannot(call) is None and direct.plain(call.scoring)


def _fits_a_gpu(call: Call) -> bool:
    """Whether it is on a GPU, where every strip is many short launches, and holds so little that all can be computed at
    once."""
    here = call.query.device.type == "cuda" and all_scores(call) <= MAX_SCORES_ON_A_GPU
    return here and not (tracing() or transformed())


PREFERENCES = (
    Preference(
        strips.NATIVE_KERNEL,
        "the compiled library computes all that torch.func.vmap adds as one call",
        transforms.pays,
    ),
    Preference(
        direct.KERNEL,
        "torch.func and forward_ad take derivatives of any kind and order, which plain operators have",
        lambda call: transformed() and all_scores(call) <= direct.MAX_SCORES,
    ),
    Preference(
        strips.GPU_KERNEL,
        "one program for each block of queries leaves out what the mask hides, and reads what is added where it lies",
        lambda call: not _is_torchs_own(call),
    ),
    Preference(
        direct.KERNEL,
        "the gradients of large heads take a product less where all weights are kept",
        _in_process(_saves_a_product),
    ),
    Preference(
        direct.KERNEL,
        "two products of whole matrices are fastest for heads so large",
        _in_process(_multiplies_faster),
    ),
    Preference(
        direct.KERNEL,
        "a graph fuses the sums of few queries with all that is done to keys and values",
        _in_process(_suits_sums),
    ),
    Preference(
        strips.NATIVE_KERNEL,
        "the compiled library computes what the mask allows, and little else, in less time",
        _in_process(_suits_the_library),
    ),
    Preference(
        direct.KERNEL,
        "there are so few scores that computing all of them at once is fastest",
        _in_process(_suits_all_at_once),
    ),
    Preference(
        strips.KERNEL,
        "it leaves weights that are too faint to matter out of the gradients",
        _in_process(_leaves_out_faint),
    ),
    Preference(
        sdpa.KERNEL,
        "torch's own function reads a finished table of biases as it is",
        _in_process(lambda call: fused.reads_a_table(call) and not strips_kernel.products_pay_alone(call)),
    ),
    Preference(
        sdpa.KERNEL,
        "torch's own function is given what mask and bias add as one table, which is small enough to be kept",
        _in_process(
            lambda call: (
                sdpa.keeps_a_table(call)
                and not strips_kernel.products_pay_in_full(call)
                and not _hides_most(call, sdpa.KERNEL)
            )
        ),
    ),
    Preference(
        strips.KERNEL,
        "plain products of matrices take less time here than torch's own function",
        _in_process(strips_kernel.products_pay_alone),
    ),
    Preference(
        sdpa.KERNEL,
        "torch's own function supports the whole call",
        lambda call: exporting() or (_holds_little(call) and not _hides_most(call, sdpa.KERNEL) and not transformed()),
    ),
    Preference(
        sdpa.KERNEL,
        "torch's own function takes less time on a GPU than a launch for every step of every strip",
        _fits_a_gpu,
    ),
    Preference(
        direct.KERNEL,
        "computing all scores at once takes less time on a GPU than a launch for every step of every strip",
        _fits_a_gpu,
    ),
    Preference(
        direct.KERNEL,
        "so few scores take less time by operators, which a graph fuses, than a node in it takes to begin",
        _in_process(
            lambda call: tracing() and all_scores(call) <= _most_scores_in_a_graph(SCORES_IN_A_GRAPH, call.learns)
        ),
    ),
    Preference(strips.NATIVE_KERNEL, _SKIPS, _suits_the_library_in_a_graph),
    Preference(strips.KERNEL, _SKIPS, lambda call: True),
    Preference(REFERENCE, "no other kernel supports the call", lambda call: True),
)


def preference(call: Call) -> Preference:
    """The first row of the table that applies."""
    return next(row for row in PREFERENCES if row.kernel.cannot(call) is None and row.condition(call))


def choose(call: Call, name: str = "auto") -> Kernel:
    """The kernel for a call: that of the first row that applies, or the one requested by name.

    Raises:
        KernelError: the requested kernel does not support the call, or does not exist.
    """
    if name == "auto":
        return preference(call).kernel
    for kernel in KERNELS:
        if kernel.name == name:
            why = kernel.cannot(call)
            if why is None:
                return kernel
            others = ", ".join(k.name for k in KERNELS if k.cannot(call) is None)
            raise KernelError(
                f"attention: kernel {name!r} does not support this call: {why}\n  kernels that do: {others}"
            )
    raise KernelError(f"attention: no kernel named {name!r}; there are: auto, {', '.join(k.name for k in KERNELS)}")


def why_not(kernel: Kernel, call: Call, chosen: Kernel) -> str:
    """Why a kernel was not chosen."""
    cannot = kernel.cannot(call)
    if cannot is not None:
        return cannot
    numbers = kernel.quadratic_numbers(call)
    if numbers > FEW_NUMBERS:
        return f"supported, but holds {numbers:,} numbers of query_len x key_len"
    return f"supported, but {chosen.name} is preferred"


def kernel_with_lse(call: Call) -> Kernel | None:
    """The kernel that computes lse, and the same output to the bit as the chosen one; None if there is none.

    There is one in float32 and float64 on a CPU, where torch's own function runs the same operator as strips. None for
    tiny calls, where computing lse later is cheaper, for plain products, which have none, and for calls that need
    gradients.
    """
    grid, query = call.scoring.grid, call.query
    if grid.device.type != "cpu" or query.dtype not in (torch.float32, torch.float64) or all_scores(call) < FEW_NUMBERS:
        return None
    if tracing() or any(t.requires_grad for t in (query, call.key, call.value)):
        return None
    kernel = choose(call)
    if kernel is direct.KERNEL and direct.multiplies_faster(call):
        return None
    if kernel is not sdpa.KERNEL:
        return kernel if kernel in (strips.NATIVE_KERNEL, strips.KERNEL, direct.KERNEL) else None
    sizes = {t.shape[3] for t in (query, call.key, call.value)}
    plain = sdpa.quadratic_numbers(call) == 0 and call.key.shape[1] == grid.heads
    return strips.KERNEL if plain and len(sizes) == 1 and fused.FLASH else None
