"""Passes of the compiled library that are alike but for their tensors: what it is told is made once.

Between the layers of a model, Python's own objects leave the processor's caches: what takes 20 us in a loop of small
calls takes 200 there. So the library reads the tensors of a call itself, as Python has them, and looks whether they lie
as those of the earlier one did. Whatever else a call may need takes the general way of `native`, which tells afterwards
what the library was told.
"""

import ctypes
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from regard.biases import Bias
from regard.dropout import Dropout
from regard.kernels.known import keep
from regard.kernels.strips.added import tensors_of
from regard.kernels.strips.binding import AT, DONE, MOST_TENSORS, SUSPECT, AgainOf, Compiled, Told
from regard.kernels.strips.grouping import StripPlan
from regard.kernels.strips.intervals import Interval
from regard.kernels.strips.order import Order, laid_like, sink_as_read, tell_dropout, tell_interval
from regard.kernels.strips.work import gradients_of, places_of_gradients
from regard.shapes import Grid

MAX_KEPT = 8
"""Ways in which the tensors of calls of one form may lie: one for each kind of layer and pass."""


class Pass:
    """What the library is told in one pass.

    Args:
        compiled: the library. words: the call. interval: of its plan. held: what must not be freed before the last of
            them.
        checked: the tensors that have to lie as in that one, by what the library calls them.
        others: what it calls further tensors, all of which it is told where they begin.
        backward: whether it computes gradients.
        like: for each of the results, whether torch lays it like the tensor that it belongs to.
        sums: numbers that threads add up elsewhere, for the gradients of query, keys and values.
        gradients: where the library is told that gradients of bias tensors go, and which of the numbers in there are
            the addresses of those that learn.
    Attributes:
        at: where in memory it is told. has_given: whether it reads bias tensors. has_exact: whether it also writes the
            output unrounded. interval: of the plan.
    """

    __slots__ = (
        "_held", "_known", "_needs_more", "at", "compiled", "gradients", "has_exact", "has_given", "interval", "like",
        "sums",
    )  # fmt: skip

    def __init__(
        self,
        compiled: Compiled,
        words: Told,
        interval: Interval | None,
        held: object,
        checked: dict[str, Tensor],
        others: Sequence[str],
        *,
        backward: bool = False,
        like: tuple[bool, ...],
        sums: tuple[int, ...] = (),
        gradients: tuple[bytes, tuple[int, ...]] | None = None,
    ) -> None:
        self.compiled, self.like, self.sums, self.gradients = compiled, like, sums, gradients
        self._held, self.interval = held, interval
        self.has_given, self.has_exact = words[AT["given"]] != 0, words[AT["exact"]] != 0
        known = self._known = AgainOf()
        ctypes.memmove(ctypes.addressof(known), words, ctypes.sizeof(words))
        known.backward, known.finishes = backward, any(sums)
        known.count, known.checked = len(checked) + len(others), len(checked)
        known.room[:] = sums or (0, 0, 0)
        for lying, name in zip(known.tensor, (*checked, *others), strict=False):
            lying.word = AT[name]
        for lying, tensor in zip(known.tensor, checked.values(), strict=False):
            self.compiled.lie(ctypes.addressof(lying), tensor)
        self.at = ctypes.addressof(known)
        others_are_told = any(words[AT[name]] for name in ("grad_lse", "row_bits"))
        self._needs_more = not all(like) or gradients is not None or others_are_told

    def needs_only(self, tables: Sequence[Tensor], bias: Bias | None) -> bool:
        """Whether `pull` computes the gradients, from these bias tensors beside the others."""
        given = tensors_of(bias, self.compiled.dtype) if bias is not None and self.has_given else []
        alike = [tensor.data_ptr() for tensor in given] == [tensor.data_ptr() for tensor in tables]
        return not self._needs_more and (alike or not given)

    def pull(
        self, saved: tuple[Tensor | None, ...], grad_output: Tensor, kept: bytes | None
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of a call like that one, of a pass that `needs_only` its tensors, with None for all that has
        none; None if they lie in another way, or something hidden may have had a part.

        Args:
            saved: output (unrounded, if it is), lse, query, key, value, sink, and the bias tensors. kept: what the
                library found out about the data of the mask, if it holds any.
        """
        return self.compiled.pull(self.at, torch.get_num_threads(), saved, grad_output, kept)

    def run(
        self, tensors: list[Tensor], sink: Tensor | None, bias: Bias | None, dropout: Dropout | None,
        interval: Interval | None, of_learned: Sequence[Tensor] = (),
    ) -> int:  # fmt: skip
        """The same pass: DONE, UNLIKE or SUSPECT.

        Args:
            tensors: those that are checked, query and key first, and the others, but for a sink.
            interval: of the plan.
            of_learned: the gradients of bias tensors, where the sums go.
        """
        at, compiled, held = self.at, self.compiled, list[object]()
        if sink is not None:
            tensors.append(sink_as_read(sink, compiled.dtype))
        if bias is not None and self.has_given:
            tensors += tensors_of(bias, compiled.dtype)
        elsewhere = interval is not self.interval
        if elsewhere or dropout is not None or self.gradients is not None:  # what is told besides tensors is another
            words = _WordsOfAgain.from_buffer_copy(self._known)
            at = ctypes.addressof(words)
            if interval is not None and elsewhere:
                tell_interval(words, interval)
            if dropout is not None:
                held += tell_dropout(words, dropout, _grid(tensors[0], tensors[1]), compiled)
            if self.gradients is not None:
                array, places = self.gradients
                addresses = (ctypes.c_int64 * (len(array) // 8)).from_buffer_copy(array)
                for place, grad in zip(places, of_learned, strict=True):
                    addresses[place] = grad.data_ptr()
                words[AT["gradient"]] = ctypes.addressof(addresses)
                held.append(addresses)
        outcome = compiled.again(at, torch.get_num_threads(), tuple(tensors))
        del held
        return outcome


_WordsOfAgain = ctypes.c_int64 * (ctypes.sizeof(AgainOf) // 8)


def forward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | None, dropout: Dropout | None,
    plan: StripPlan, wants_lse: bool, learns: bool,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """As `native.forward`; None where the general way has to be taken."""
    assert plan.told is not None
    passes: list[Pass] | None = plan.told.get((sink is None, dropout is None, wants_lse, learns))
    if passes is None or query.is_neg() or key.is_neg() or value.is_neg():
        return None
    for n, told in enumerate(passes):
        compiled = told.compiled
        lse = exact = output = torch.empty_like(query) if told.like[0] else laid_like(query, value.shape[3])
        tensors = [query, key, value, output]
        if told.has_exact:
            exact = laid_like(query, value.shape[3], compiled.dtype)
            tensors.append(exact)
        if wants_lse:
            lse = query.new_empty(query.shape[:3], dtype=compiled.dtype)
            tensors.append(lse)
        outcome = told.run(tensors, sink, bias, dropout, plan.interval)
        if outcome == DONE:
            passes[0], passes[n] = told, passes[0]
            return output, lse, exact
        if outcome == SUSPECT:  # something hidden may have had a part
            return None
    return None


def last_forward(plan: StripPlan, sink: Tensor | None, wants_lse: bool, learns: bool) -> Pass | None:
    """The last forward pass without dropout, if it needs nothing but its tensors, but for what the gradients need."""
    passes: list[Pass] = [] if plan.told is None else plan.told.get((sink is None, True, wants_lse, learns), [])
    return passes[0] if passes and passes[0].has_exact <= learns else None


def backward(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, bias: Bias | None, dropout: Dropout | None,
    plan: StripPlan, learned: Sequence[Tensor], output: Tensor, lse: Tensor, grad_output: Tensor,
    grad_lse: Tensor | None,
) -> tuple[list[Tensor | None], list[Tensor], Pass] | None:  # fmt: skip
    """The gradients of query, key, value and sink, and of those of `learned` that want one, and the pass that computed
    them; None where the general way has to be taken."""
    assert plan.told is not None
    passes: list[Pass] | None = plan.told.get(_kind(sink, learned, dropout, grad_lse))
    three = query, key, value
    if passes is None or any(map(Tensor.is_neg, (*three, output, grad_output))):
        return None
    for n, told in enumerate(passes):
        compiled = told.compiled
        grads = [
            torch.empty_like(tensor) if like else laid_like(tensor, tensor.shape[3])
            for tensor, like in zip(three, told.like, strict=True)
        ]
        rooms = [grads[0].new_empty(numbers, dtype=compiled.dtype) for numbers in told.sums if numbers]
        tensors = [*three, output, grad_output, lse, *grads, *rooms]
        if grad_lse is not None:
            tensors.append(grad_lse.to(compiled.dtype).resolve_neg().contiguous())
        grad_sink = None if sink is None else sink.new_empty(sink.shape, dtype=compiled.dtype)
        if grad_sink is not None:
            tensors.append(grad_sink)
        wanted = learned if told.gradients is not None else ()
        of_learned = [tensor.new_zeros(tensor.shape, dtype=compiled.dtype) for tensor in wanted if tensor.requires_grad]
        outcome = told.run(tensors, sink, bias, dropout, plan.interval, of_learned)
        if outcome == DONE:
            passes[0], passes[n] = told, passes[0]
            of_sink = None if sink is None or grad_sink is None else grad_sink.to(sink.dtype)
            return [*grads, of_sink], of_learned, told
        if outcome == SUSPECT:
            return None
    return None


def of_each(learned: Sequence[Tensor], grads: Iterable[Tensor]) -> Iterator[Tensor | None]:
    """The gradients of those tensors that want one, each in its own dtype, and None for the others."""
    found = iter(grads)
    return (next(found).to(tensor.dtype) if tensor.requires_grad else None for tensor in learned)


def remember_forward(
    order: Order, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, dropout: Dropout | None,
    *kind: bool,
) -> None:  # fmt: skip
    """What the library was told, for passes like this one.

    Args:
        kind: of `forward`, from wants_lse on.
    """
    if not _may_be_kept(order, (query, key, value)):
        return
    wants_lse, _ = kind
    words, held = order.of_form()
    others = ["output"] + ["exact"] * (words[AT["exact"]] != 0)
    others += ["lse"] * wants_lse + ["sink"] * (sink is not None)
    like = value.shape[3] == query.shape[3] and _is_laid(query)
    checked = {"query": query, "key": key, "value": value}
    told = Pass(order.compiled, words, order.plan.interval, held, checked, others, like=(like,))
    _remember(order, (sink is None, dropout is None, *kind), told)


def remember_backward(
    order: Order, three: tuple[Tensor, Tensor, Tensor], sink: Tensor | None, learned: Sequence[Tensor],
    dropout: Dropout | None, output: Tensor, grad_output: Tensor, lse: Tensor, grad_lse: Tensor | None,
    sums: tuple[int, ...],
) -> None:  # fmt: skip
    """The same of the gradients.

    Args:
        sums: numbers that threads add up elsewhere for each of the three.
    """
    if not _may_be_kept(order, (*three, output, grad_output)) or not lse.is_contiguous():
        return
    gradients = None
    if order.learns:
        places = places_of_gradients(order.added)
        if places is None:
            return
        gradients = bytes(gradients_of(order.added, None)), places
    words, held = order.of_form()
    checked = dict(zip(("query", "key", "value"), three, strict=True))
    checked["exact" if words[AT["exact"]] else "output"] = output
    checked |= {"grad_output": grad_output, "lse": lse}
    names = "query", "key", "value"
    others = [f"grad_{name}" if words[AT[f"grad_{name}"]] else f"sum_{name}" for name in names]
    others += [f"sum_{name}" for name, numbers in zip(names, sums, strict=True) if numbers]
    others += ["grad_lse"] * (grad_lse is not None) + ["grad_sink", "sink"] * (sink is not None)
    like = tuple(map(_is_laid, three))
    told = Pass(
        order.compiled, words, order.plan.interval, held, checked, others, backward=True, like=like, sums=sums,
        gradients=gradients,
    )  # fmt: skip
    _remember(order, _kind(sink, learned, dropout, grad_lse), told)


def _kind(sink: Tensor | None, learned: Sequence[Tensor], dropout: Dropout | None, grad_lse: Tensor | None) -> Hashable:
    """By what gradients of calls of one form are told apart."""
    which = tuple(tensor.requires_grad for tensor in learned)
    return which, sink is None, dropout is None, grad_lse is not None, torch.get_num_threads()


def _may_be_kept(order: Order, tensors: Sequence[Tensor]) -> bool:
    """Whether the library was told of all strips at once, and of tensors as they are."""
    if order.plan.told is None or not order.is_whole or order.is_suspect():
        return False
    given = () if order.scoring.bias is None else tensors_of(order.scoring.bias, order.compiled.dtype)
    as_they_are = all(tensor.stride(3) == 1 and not tensor.is_neg() for tensor in tensors)
    return as_they_are and len(given) <= MOST_TENSORS // 3


def _remember(order: Order, kind: Hashable, told: Pass) -> None:
    """The last one first, for the next call."""
    assert order.plan.told is not None
    earlier = order.plan.told.get(kind, ())
    keep(order.plan.told, kind, [told, *earlier][:MAX_KEPT], MAX_KEPT)


def _is_laid(tensor: Tensor) -> bool:
    """Whether torch lays another tensor like this one as `laid_like` does; it takes less time."""
    _, heads, length, size = tensor.shape
    whole = heads * length * size
    return tensor.stride() in ((whole, length * size, size, 1), (whole, size, heads * size, 1))


def _grid(query: Tensor, key: Tensor) -> Grid:
    batch, heads, query_len, _ = query.shape
    return Grid(batch, heads, query_len, key.shape[2], query.device)
