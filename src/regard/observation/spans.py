"""Selections of queries, keys, batch indices and heads, validated, and the limit on how many numbers are returned."""

from regard.shapes import kind

MAX_NUMBERS_AT_ONCE = 1 << 26
"""Weights or pixels in one answer: 256 MiB in float32."""

Span = range | slice | None
"""Consecutive queries or keys; None for all."""

Selection = int | slice
"""Batch indices or heads."""


def span_of(which: Span, length: int) -> range:
    """A selection of queries or keys as a range."""
    if which is not None and not isinstance(which, (slice, range)):
        raise TypeError(f"Observation: queries and keys must be a slice, a range or None for all, got {kind(which)}")
    chosen = range(length)[slice(None) if which is None else which] if not isinstance(which, range) else which
    if not 0 <= chosen.start <= chosen.stop <= length or chosen.step != 1:
        raise ValueError(f"Observation: queries and keys must lie in 0 to {length}, in steps of 1, got {which}")
    return chosen


def chosen_of(which: Selection, length: int, what: str) -> range:
    """A selection of batch indices or heads as a range."""
    if isinstance(which, int):
        if not -length <= which < length:
            raise IndexError(f"Observation: {what} are 0 to {length - 1}, got {which}")
        return range(which % length, which % length + 1)
    chosen = range(length)[which]
    if not chosen or chosen.step != 1:
        raise IndexError(f"Observation: choose one or more {what} of {length}, in steps of 1, got {which}")
    return chosen


def refuse_many(count: int, what: str, instead: str) -> None:
    """Raises an error with advice if there are more numbers than `MAX_NUMBERS_AT_ONCE`."""
    if count > MAX_NUMBERS_AT_ONCE:
        raise ValueError(
            f"Observation: {count:,} {what} at once are more than {MAX_NUMBERS_AT_ONCE:,}; ask for {instead}"
        )
