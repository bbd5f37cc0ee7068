"""A text and its tokens: where each stands, what it looks like alone, and which one is meant by some words."""

from regard.display.letters import visible
from regard.training.text import Tokenizer


class Script:
    """A text and its tokens.

    Attributes:
        text, ids: the whole of it. spans: the characters that each token touches, from the first to after the last.
    """

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.ids = tokenizer.encode(text)
        self.spans = tokenizer.spans(text)

    def windows(self, size: int) -> range:
        """Where the windows of so many tokens begin."""
        return range(0, len(self.ids), size)

    def line(self, token: int) -> int:
        """The line that a token begins in, from 1."""
        return self.text.count("\n", 0, self.spans[token][0]) + 1

    def written(self, token: int) -> str:
        """The characters that a token touches, as they are."""
        start, stop = self.spans[token]
        return self.text[start:stop]

    def label(self, token: int) -> str:
        """A token in one line: its text; of a character of several tokens, which part of it."""
        number, count = self.part(token)
        return visible(self.written(token)) + (f" {number}/{count}" if count > 1 else "")

    def part(self, token: int) -> tuple[int, int]:
        """Which token of a character this is, from 1, and of how many."""
        start, stop = self.spans[token]
        first = last = token
        while first > 0 and self.spans[first - 1][1] > start:
            first -= 1
        while last + 1 < len(self.spans) and self.spans[last + 1][0] < stop:
            last += 1
        return token - first + 1, last - first + 1


def find_token(script: Script, start: int, count: int, wanted: str) -> int:
    """The one token of a window that a text means: the token itself, or the last of those that the words end with.

    Raises:
        ValueError: there is none, or more than one; the message lists them.
    """
    text = wanted[1:-1] if len(wanted) > 2 and wanted[0] == wanted[-1] and wanted[0] in "'\"" else wanted
    shown = range(start, start + count - 1)  # the numbers in the whole text
    found = _tokens_of(script, text, shown)
    if len(found) == 1:
        return found[0] - start + 1
    if found:
        lines = [f"  {place - start + 1:>5}  {_around(script, place)}" for place in found[:12]]
        more = [f"  and {len(found) - 12} more"] if len(found) > 12 else []
        raise ValueError(
            "\n".join([f"--query: {len(found)} tokens end {text!r}; say which by its number", *lines, *more])
        )
    elsewhere = _tokens_of(script, text, range(len(script.ids)))
    if elsewhere:
        window = elsewhere[0] // (count - 1) * (count - 1)
        raise ValueError(f"--query: {text!r} is not in this window of the text; --start {window} shows one that has it")
    labels = {script.label(place).strip() for place in shown}
    near = sorted(label for label in labels if text and text.lower() in label.lower())[:8]
    hint = f"near it: {', '.join(map(repr, near))}" if near else "--tokens lists them all with their numbers"
    raise ValueError(f"--query: the text has no {text!r}; {hint}")


def _tokens_of(script: Script, text: str, places: range) -> list[int]:
    """Tokens that are this text, with or without the space around them; else those that it ends with."""
    if not text or not places:
        return []
    word = text.strip() or text
    exact = [place for place in places if word in (script.written(place), script.written(place).strip())]
    if exact:
        return exact
    ends, found = {}, script.text.find(text)
    for place in places:
        ends[script.spans[place][1]] = place  # of the tokens that end there, the last
    while found >= 0:
        end = found + len(text)
        while end < len(script.text) and end not in ends and end < script.spans[places[-1]][1]:
            end += 1  # the token goes on after the words
        if end in ends and ends[end] not in exact:
            exact.append(ends[end])
        found = script.text.find(text, found + 1)
    return exact


def _around(script: Script, place: int, reach: int = 24) -> str:
    """A token with what stands around it."""
    start, stop = script.spans[place]
    before, after = script.text[max(0, start - reach) : start], script.text[stop : stop + reach]
    return f"{visible(before)}[{visible(script.text[start:stop])}]{visible(after)}"
