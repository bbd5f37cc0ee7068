"""Which queries, keys, batch rows and heads are asked for, and how many numbers may be given at once.

What a caller passes is read here, or refused in words. Nothing here knows of weights.
"""

from regard.shapes import kind

MAX_NUMBERS_AT_ONCE = 1 << 26
"""Weights or pixels in one answer: 256 MiB in float32."""

Span = range | slice | None
"""Queries or keys that stand next to each other; None for all."""

Selection = int | slice
"""Batch rows or heads."""


def span_of(which: Span, length: int) -> range:
    """Queries or keys: a slice as Python takes it, a range as it stands, None for all."""
    if which is not None and not isinstance(which, (slice, range)):
        raise TypeError(f"Observation: rows and columns are a slice, a range or None for all, got {kind(which)}")
    chosen = range(length)[slice(None) if which is None else which] if not isinstance(which, range) else which
    if not 0 <= chosen.start <= chosen.stop <= length or chosen.step != 1:
        raise ValueError(f"Observation: rows and columns must lie in 0 to {length}, in steps of 1, got {which}")
    return chosen


def chosen_of(which: Selection, length: int, what: str) -> range:
    """Batch rows or heads: a number as one of them."""
    if isinstance(which, int):
        if not -length <= which < length:
            raise IndexError(f"Observation: {what} are 0 to {length - 1}, got {which}")
        return range(which % length, which % length + 1)
    chosen = range(length)[which]
    if not chosen or chosen.step != 1:
        raise IndexError(f"Observation: choose one or more {what} of {length}, in steps of 1, got {which}")
    return chosen


def refuse_many(count: int, what: str, instead: str) -> None:
    """More numbers than `MAX_NUMBERS_AT_ONCE`, with what to ask for instead."""
    if count > MAX_NUMBERS_AT_ONCE:
        raise ValueError(
            f"Observation: {count:,} {what} at once are more than {MAX_NUMBERS_AT_ONCE:,}; ask for {instead}"
        )
