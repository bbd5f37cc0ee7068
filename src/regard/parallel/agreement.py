"""The gate of a call over many ranks: all of them make the same call, or all of them raise an error that says why not.

Every rank checks its own arguments first, and tells the others the outcome, a fingerprint of what must be equal and the
sizes of what may differ. So a rank with wrong arguments is an error on every rank, and nobody waits for it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from regard.graphs import uncompiled
from regard.parallel.channel import APART, Channel, ParallelError
from regard.parallel.fingerprint import fingerprint


class Agreed(NamedTuple):
    """What the ranks know of each other.

    Attributes:
        number: the number of this call in the group. own: what each rank tells of itself.
    """

    number: int
    own: list[list[int]]


@uncompiled(APART)
def agree(
    channel: Channel, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, bytes], Sequence[int]]], told: int
) -> Agreed:
    """Checks the arguments of this rank and agrees with the others.

    Args:
        check: raises what is wrong on this rank; else gives what must be equal on all ranks by name, as values that
            errors can show and as fingerprints, and numbers of its own.
        told: how many numbers of its own a rank tells.
    Raises:
        ParallelError: another rank refused the call, or calls differ; on this rank, its own error.
    """
    number, failure = channel.count(), None
    shown: Mapping[str, Any] = {}
    prints: Mapping[str, bytes] = {}
    own: Sequence[int] = [0] * told
    try:
        shown, prints, own = check()
    except Exception as error:
        failure = error
    compared = [(name, value) for name, value in shown.items() if name not in prints]
    digest = fingerprint(channel.function, compared, list(prints.items()))
    halves = (int.from_bytes(digest[at : at + 7], "big") for at in (0, 7))
    found = channel.gather([number, int(failure is not None), *halves, *own])
    if any(refused for _, refused, *_ in found):
        _refuse(channel, failure)
    if any(row[:4] != found[0][:4] for row in found):
        _disagree(channel, number, shown, prints)
    return Agreed(number, [row[4:] for row in found])


def _refuse(channel: Channel, failure: Exception | None) -> NoReturn:
    said = channel.tell("" if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    rank, first = next((rank, text) for rank, text in enumerate(said) if text)
    raise ParallelError(f"{channel.function}: rank {rank} refused the call\n  {first}")


def _disagree(channel: Channel, number: int, shown: Mapping[str, Any], prints: Mapping[str, bytes]) -> NoReturn:
    mine = {"function": channel.function, "calls before": number, **shown}
    lines = [_line(name, value) for name, value in mine.items() if name not in prints]
    lines += [_line(name, shown.get(name, ""), value.hex()) for name, value in prints.items()]
    rows = [dict(_split(line) for line in text.split("\n")) for text in channel.tell("\n".join(lines))]
    names = list(dict.fromkeys(name for row in rows for name in row))
    different = [name for name in names if len({_compared(row.get(name)) for row in rows}) > 1]
    said = [f"  rank {rank}  " + ", ".join(f"{name}={_shown(row.get(name))}" for name in different)
            for rank, row in enumerate(rows)]  # fmt: skip
    raise ParallelError(
        f"{channel.function}: the ranks must agree on {', '.join(different)}\n" + "\n".join(said)
        + "\n  hint: mask, bias and sink are those of the whole sequence, the same on every rank"
    )  # fmt: skip


def _compared(found: tuple[str, str] | None) -> str | None:
    """What must be equal: the contents where they were told, else what is shown."""
    return None if found is None else found[1] or found[0]


def _line(name: str, value: Any, digest: str = "") -> str:
    return f"{name}\t{' '.join(str(value).split())}\t{digest}"


def _split(line: str) -> tuple[str, tuple[str, str]]:
    name, value, digest = line.split("\t")
    return name, (value, digest)


def _shown(found: tuple[str, str] | None) -> str:
    if found is None:
        return "nothing"
    value, digest = found
    return f"{value} (contents {digest[:6]})" if digest else value
