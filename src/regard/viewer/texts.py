"""Tokens as the page shows them: the characters that each stands for, and a label in one line.

Whatever a text contains is shown as text: what would break a line, move a cursor or turn the direction of writing is
shown as a sign that stands for it.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from regard.display.signs import sign


@dataclass(frozen=True)
class Tokens:
    """The tokens of one sequence.

    Attributes:
        texts: the characters that each adds to the text; of a character of several tokens the first has it.
        labels: each in one line.
        ids: their numbers; None where there are none, as of the patches of an image.
    """

    texts: Sequence[str]
    labels: Sequence[str]
    ids: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(map(len, self.texts))]

    @cached_property
    def _folded(self) -> str:
        return "".join(map(_folded, self.texts))

    def search(self, words: str) -> list[tuple[int, int]]:
        """Where words stand, whatever their case: the first and the last token of each place."""
        wanted, found = _folded(words), []
        at = self._folded.find(wanted) if wanted else -1
        while at >= 0:
            last = bisect_right(self._starts, at + len(wanted) - 1) - 1
            found.append((bisect_right(self._starts, at) - 1, last))
            at = self._folded.find(wanted, at + len(wanted))
        return found


def of_text(text: str, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Tokens:
    """The tokens of a text, each of which touches the characters of its span; what none touches goes to the next."""
    texts, labels, end = [], [], 0
    for number, (start, stop) in enumerate(spans):
        texts.append(text[end : max(end, stop)])
        part = _part(spans, number)
        labels.append(label(text[start:stop]) + part)
        end = max(end, stop)
    if texts:
        texts[-1] += text[end:]
    return Tokens(texts, labels, ids)


def of_ids(ids: Sequence[int], written: Callable[[int], str] | None = None) -> Tokens:
    """Tokens that are known by number alone; `written` says what one of them is, where a tokenizer knows."""
    texts = [f"{number} " if written is None else written(number) for number in ids]
    return Tokens(texts, [label(text.strip() or text) if written is None else label(text) for text in texts], ids)


def of_places(count: int, patches: tuple[int, int] | None = None) -> Tokens:
    """What has no token: places of a sequence, or of an image, whose patches are the last of them."""
    if patches is None:
        labels = [str(place) for place in range(count)]
    else:
        rows, columns = patches
        special = count - rows * columns
        labels = [f"token {n}" for n in range(special)]
        labels += [f"row {n // columns}, column {n % columns}" for n in range(rows * columns)]
    return Tokens([f"{text} " for text in labels], labels)


def label(text: str) -> str:
    """A text in one line."""
    return "".join(map(sign, text))


def _part(spans: Sequence[tuple[int, int]], number: int) -> str:
    """Which part of a character a token is, where several share it."""
    start, stop = spans[number]
    first = last = number
    while first > 0 and spans[first - 1][1] > start:
        first -= 1
    while last + 1 < len(spans) and spans[last + 1][0] < stop:
        last += 1
    return "" if first == last else f" {number - first + 1}/{last - first + 1}"


def _folded(text: str) -> str:
    """In lower case, character by character, so that places stay."""
    return "".join(low if len(low := character.lower()) == 1 else character for character in text)
