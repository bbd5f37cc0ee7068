"""The page of `regard look`.

It has the text with the weights of one token, what the model expects after it, a map of all heads, and what every head
attends to, drawn for the width and the colours that there are. Where nothing can be coloured, the weights of a line of
text stand under it, in tenths.
"""

from typing import NamedTuple

from rich.text import Text

from regard.display.letters import fitted, joined, units
from regard.display.palette import MIN_DRAWN_WEIGHT, Colour
from regard.display.paper import Paper, quoted
from regard.display.reading import OPENING, Expected, Look, Place
from regard.recording import HeadSummary

ROWS = 12
"""Most heads whose keys are listed, unless all are asked for."""


MIN_SHOWN_PROBABILITY = 0.005
"""A guess of a smaller probability would read 0.00, and is left out where there is a larger one."""


class Kind(NamedTuple):
    """How a kind of head is shown: what to call it where there is little room, its colour, what it does."""

    short: str
    colour: Colour
    words: str


KINDS: dict[str, Kind] = {
    "previous token": Kind("prev", (95, 175, 255), "looks at the token just before"),
    "first token": Kind("1st", (150, 150, 150), "rests on the first token"),
    "same token": Kind("same", (255, 175, 95), "looks at the same token, here or earlier"),
    "induction": Kind("ind", (255, 95, 135), "looks at what followed this token the last time"),
    "local": Kind("near", (95, 215, 175), "looks at the last few tokens"),
    "even": Kind("even", (170, 170, 95), "spreads over all it can see"),
    "mixed": Kind("mix", (175, 175, 175), "none of these most of the time"),
}


def print_look(paper: Paper, view: Look, *, every: bool = False) -> None:
    """The whole page.

    Args:
        every: list the keys of every head, and not of those alone whose weights are largest.
    """
    print_title(paper, view)
    if view.windows:
        _print_windows(paper, view)
    query = f"token {view.query} "
    piece = (quoted(view.label(view.query)), "bold reverse")
    paper.say(
        ("The text", "bold"), ", shaded by the weights of ", query, piece, f" in layer {view.layer}, head {view.head}"
    )
    paper.quiet(f"({view.chosen})")
    paper.lines(text_lines(paper, view))
    _print_strongest(paper, view)
    paper.gap()
    paper.say(("What the model expects", "bold"), " after ", query, piece)
    _print_expected(paper, view)
    paper.gap()
    paper.say(("Every head", "bold"), " on this text: layers down, heads across")
    paper.lines(head_map(paper, view))
    paper.gap()
    paper.say(
        ("What ", "bold"),
        (query, "bold"),
        piece,
        (" attends to", "bold"),
        ": by head, the keys with the largest weights",
    )
    _print_attends(paper, view, every)
    paper.gap()
    paper.quiet(
        f"Another token: --query N, 0 to {view.count - 1}, or its text (--tokens lists them). Another head: --layer L "
        f"--head H. Without a head: --without {Place(view.layer, view.head)}. As numbers: --json"
    )
    paper.quiet(f"Step by step: regard explain ... --query {view.query} --layer {view.layer} --head {view.head}")
    if paper.could_colour:
        paper.quiet("More colours: --theme dark or --theme light, as your terminal is; it does not say which")


def print_title(paper: Paper, view: Look) -> None:
    """What was read, by which model, and how much of it."""
    total = len(view.script.ids)
    part = f"{total:,} token{'' if total == 1 else 's'}"
    if view.count - 1 < total:
        part = f"tokens {view.start} to {view.stop - 1} of {total:,}, as many as the model's context holds"
        if view.stop == total:
            part = f"tokens {view.start} to {view.stop - 1} of {total:,}"
    paper.say(("regard", "bold"), f"  {view.source}: {part}; model {view.model}", hang=8)
    if view.stop < total:
        paper.say((f"        the next: --start {view.stop}", paper.palette.quiet))
    paper.gap()


def print_tokens(paper: Paper, view: Look) -> None:
    """Every token of the window with its number, for --query."""
    print_title(paper, view)
    numbers = len(str(view.count - 1))
    room = paper.width - paper.indent
    longest = min(room - numbers - 1, max(3, *(len(quoted(view.label(n))) for n in range(view.count)), 12))
    columns = max(1, (room + 2) // (numbers + 1 + longest + 2))
    rows = -(-view.count // columns)
    for row in range(rows):
        line = Text(" " * paper.indent)
        for number in range(row, view.count, rows):
            line.append(f"{number:>{numbers}} ", paper.palette.quiet)
            line.append(fitted(quoted(view.label(number)), longest) + "  ")
        line.rstrip()
        paper.lines([line])


class _Cell(NamedTuple):
    """One place of the text as it is drawn: its letters, cells, style, and what stands under it."""

    shown: str
    width: int
    style: str
    mark: str


def text_lines(paper: Paper, view: Look) -> list[Text]:
    """The text, every character in the colour of its token's weight; or, without colours, with the weights below it.

    A character of several tokens shows the largest of their weights.
    """
    room = paper.width - paper.indent
    lines: list[Text] = []
    line: list[_Cell] = []

    def end(cells: list[_Cell]) -> None:
        margin = " " * paper.indent
        lines.append(Text(margin).append_text(Text.assemble(*((c.shown, c.style) for c in cells))))
        marks = "".join(c.mark * c.width for c in cells).rstrip()
        if marks and not paper.palette.coloured:
            lines.append(Text(margin + marks, "bold"))

    for cell, is_end in _cells(paper, view):
        column = sum(c.width for c in line)
        if cell.shown == "⇥":  # to the next of the stops, four apart
            width = min(4 - column % 4, max(1, room - column))
            cell = cell._replace(shown="⇥" + " " * (width - 1), width=width)
        if column + cell.width > room and line:
            at = _break(line, room)
            end(line[:at])
            line = line[at:]
        line.append(cell)
        if is_end:
            end(line)
            line = []
    if line:
        end(line)
    return lines


def _cells(paper: Paper, view: Look) -> "list[tuple[_Cell, bool]]":
    """The window's characters, and whether a line ends with each."""
    weights = view.weights(view.layer)[view.head].tolist()
    found = [(_Cell(OPENING, 1, *_look_of(paper, view, [0], weights)), False)]
    start, stop = (view.span(1)[0], view.span(view.count - 1)[1]) if view.count > 1 else (0, 0)
    tokens: list[list[int]] = [[] for _ in range(stop - start)]
    for number in range(1, view.count):
        first, last = view.span(number)
        for place in range(first, last):
            tokens[place - start].append(number)
    text = view.script.text[start:stop]
    for unit in units(text):
        of = sorted({number for place in range(unit.start, unit.stop) for number in tokens[place]})
        style, mark = _look_of(paper, view, of, weights)
        found.append((_Cell(unit.shown, unit.width, style, mark), text[unit.start] == "\n"))
    return found


def _look_of(paper: Paper, view: Look, tokens: list[int], weights: list[float]) -> tuple[str, str]:
    """How a character of these tokens looks, and the mark under it."""
    if view.query in tokens:
        return "bold reverse", "^"
    weight = max((weights[number] for number in tokens), default=0.0)
    if tokens and min(tokens) > view.query:
        return paper.palette.quiet, " "
    mark = str(min(9, int(weight * 10))) if weight >= 0.1 else "." if weight >= 0.01 else " "
    return paper.palette.fill(weight), mark


def _break(line: list[_Cell], room: int) -> int:
    """Where to break a full line: after its last space, unless that leaves much of it empty."""
    taken = 0
    for at, cell in reversed(list(enumerate(line))):
        if cell.shown == " ":
            return at + 1
        taken += cell.width
        if taken > room // 2:
            break
    return len(line)


def _print_strongest(paper: Paper, view: Look) -> None:
    weights = view.weights(view.layer)[view.head].tolist()
    strongest = sorted(range(len(weights)), key=lambda j: -weights[j])[:4]
    parts = [
        Text.assemble(f"{weights[j]:.2f} ", quoted(view.label(j)), (f" ({j})", paper.palette.quiet))
        for j in strongest
        if weights[j] > MIN_DRAWN_WEIGHT
    ]
    lines = joined(parts or [Text("no weight above 0.00")], paper.width, indent=paper.indent + 2)
    lines[0] = Text.assemble(" " * paper.indent, ("→ ", "bold"), lines[0][paper.indent + 2 :])
    paper.lines(lines)
    if not paper.palette.coloured:
        paper.quiet("Under the text: weights in tenths, 9 for 0.9 and more, . for 0.01 to 0.1, ^ the token that looks")
    paper.quiet(f"In brackets: a token's number. {OPENING} is token 0, which stands before every text: its beginning")
    shown = [view.query, *strongest]
    if (part := next((n for n in shown if n and view.script.part(view.start + n - 1)[1] > 1), None)) is not None:
        number, count = view.script.part(view.start + part - 1)
        paper.quiet(f"{quoted(view.label(part))} is token {number} of the {count} that make up one character")


def _print_expected(paper: Paper, view: Look) -> None:
    """The model's guesses for the token after the query, with all heads and without some."""
    both = [view.expected] if view.without is None else [view.expected, view.without]
    names = [_name(one) for one in both]
    room = max(map(len, names)) if view.without is not None else 0
    beside = room + 2 if view.without is not None and paper.width >= 60 else 0
    for one, name in zip(both, names, strict=True):
        if view.without is not None and not beside:
            paper.say((name, paper.palette.quiet))
        likely = [g for g in one.guesses if g.probability >= MIN_SHOWN_PROBABILITY] or one.guesses[:1]
        guesses = [Text.assemble(f"{g.probability:.2f} ", quoted(g.text)) for g in likely]
        lines = joined(guesses, paper.width, indent=paper.indent + beside)
        if beside:
            lines[0] = Text.assemble(
                " " * paper.indent, (fitted(name, room), paper.palette.quiet), "  ", lines[0][paper.indent + beside :]
            )
        paper.lines(lines)
    actual = view.expected.actual
    if actual is not None:
        ways = [
            f"{one.actual.probability:.2f}{'' if view.without is None else ' ' + name} (guess {one.actual.rank:,})"
            for one, name in zip(both, names, strict=True)
            if one.actual is not None
        ]
        paper.say(f"the text goes on with {quoted(actual.text)}: {', '.join(ways)}", indent=paper.indent, hang=2)
    if view.without is not None:
        losses = [f"{one.loss:.2f} {name}" for one, name in zip(both, names, strict=True) if one.loss is not None]
        if losses:
            said = f"loss on the whole text, in nats per token: {', '.join(losses)}"
            paper.say(said, indent=paper.indent, hang=2)


def _name(expected: Expected) -> str:
    return f"without {', '.join(map(str, expected.without))}" if expected.without else "with all heads"


def _print_windows(paper: Paper, view: Look) -> None:
    """A long text at a glance: its windows, what each begins with, how well the model foretells it."""
    size = view.windows[0].tokens
    total = len(view.script.windows(size))
    some = f"{len(view.windows)} of its {total:,} windows" if len(view.windows) < total else f"its {total} windows"
    paper.say(
        ("The whole text", "bold"), f": {some} of {size:,} tokens, with the loss in nats per token; --start N shows one"
    )
    numbers = max(len("--start"), len(str(view.windows[-1].start)))
    lines = max(len("lines"), max(len(f"{w.first_line}-{w.last_line}") for w in view.windows))
    taken = paper.indent + 2 + numbers + 2 + lines + 2 + 4 + 2
    heading = f"{'--start':>{numbers}}  {'lines':>{lines}}  loss  begins with"
    paper.lines(
        [Text(" " * (paper.indent + 2) + fitted(heading, paper.width - paper.indent - 2).rstrip(), paper.palette.quiet)]
    )
    for window in view.windows:
        here = window.start <= view.start < window.start + window.tokens
        span = f"{window.first_line}-{window.last_line}"
        begins = fitted(window.begins, max(4, paper.width - taken)).rstrip()
        paper.lines(
            [
                Text.assemble(
                    " " * paper.indent, "→ " if here else "  ",
                    f"{window.start:>{numbers}}  {span:>{lines}}  {window.loss:4.2f}  {begins}",
                    style="bold" if here else "",
                )
            ]
        )  # fmt: skip
    paper.gap()


def head_map(paper: Paper, view: Look) -> list[Text]:
    """Layers down, heads across: kind and its share; how far back and how spread, where there is room for it.

    As full as the width allows; heads that do not fit side by side come in several maps.
    """
    layers = len(view.recording)
    heads = len(view.of_layer(0))
    room = paper.width - paper.indent
    forms = (("layer", 14, _full), ("layer", 10, _short), ("", 4, _small))
    fits = (form for form in forms if len(form[0]) + heads * (form[1] + 2) <= room)
    name, cell, draw = next(fits, forms[-1])
    label = max(len(name), len(str(layers - 1)))
    maps = -(-heads // max(1, (room - label) // (cell + 2)))
    across = -(-heads // maps)
    lines: list[Text] = []
    for first in range(0, heads, across):
        chosen = range(first, min(heads, first + across))
        head = Text(" " * paper.indent + f"{name:>{label}}", paper.palette.quiet)
        for number in chosen:
            head.append("  " + fitted(f"head {number}" if name else f"h{number}", cell))
        head.rstrip()
        lines += [Text(), head] if lines else [head]
        for layer in range(layers):
            cells = [draw(paper, view.of_layer(layer)[number]) for number in chosen]
            for row in range(len(cells[0])):
                line = Text(" " * paper.indent).append(f"{'' if row else layer:>{label}}", "bold")
                for drawn in cells:
                    line.append("  ").append_text(drawn[row])
                line.rstrip()
                lines.append(line)
    if name:
        words = (
            "kind of head and how much of its weight fits that; below, mean distance in tokens and spread (0: all on "
            "one key, 1: even)"
        )
    else:
        words = "kind; below, how much of its weight fits that (a wider terminal also shows distance and spread)"
    lines += paper.flow(Text(words, paper.palette.quiet), indent=paper.indent)
    names = {kind: kind if cell >= 14 else KINDS[kind].short for kind in KINDS}
    wide = max(len(names[s.kind]) for s in view.heads)
    for kind in KINDS:
        if any(s.kind == kind for s in view.heads):
            words = KINDS[kind].words if cell >= 14 else f"{kind}: {KINDS[kind].words}"
            line = Text.assemble(
                (f"{names[kind]:<{wide}}", paper.palette.ink(KINDS[kind].colour)), "  ", (words, paper.palette.quiet)
            )
            lines += paper.flow(line, indent=paper.indent, hang=wide + 2)
    return lines


def _full(paper: Paper, s: HeadSummary) -> list[Text]:
    ink = paper.palette.ink(KINDS[s.kind].colour)
    return [
        Text(f"{s.kind.split()[0]:<9} {s.score:.2f}", ink),
        Text(f"{s.distance:>4.0f} back {s.spread:.2f}", paper.palette.quiet),
    ]


def _short(paper: Paper, s: HeadSummary) -> list[Text]:
    return [
        Text(f"{KINDS[s.kind].short:<5} {s.score:.2f}", paper.palette.ink(KINDS[s.kind].colour)),
        Text(f"{s.distance:>5.0f} {s.spread:.2f}", paper.palette.quiet),
    ]


def _small(paper: Paper, s: HeadSummary) -> list[Text]:
    ink = paper.palette.ink(KINDS[s.kind].colour)
    return [Text(f"{KINDS[s.kind].short:<4}", ink), Text(f"{s.score:.2f}", ink)]


def _print_attends(paper: Paper, view: Look, every: bool) -> None:
    """For the chosen query, the strongest keys of the heads that have strong ones."""
    found = []
    for layer in range(len(view.recording)):
        for s, weights in zip(view.of_layer(layer), view.weights(layer), strict=True):
            found.append((Place(layer, s.head), s, weights, float(weights.max())))
    ranked = sorted(found, key=lambda row: (row[0] != (view.layer, view.head), -row[3]))
    rows = sorted(ranked if every else ranked[:ROWS], key=lambda row: row[0])

    place = max(len(str(row[0])) for row in found) + 2
    wide = paper.width >= 100
    kind = 14 if wide else 4
    number = len(str(view.count - 1))
    key = 4 + 1 + number + 1  # weight and number before a token
    room = paper.width - paper.indent - place - 2 - kind
    across = min(view.count, 8, max(1, room // (2 + key + 10)))
    token = min(24, max(4, room // across - 2 - key))
    for where, s, weights, _ in rows:
        shown = where == (view.layer, view.head)
        line = Text(" " * paper.indent + f"{'→ ' if shown else ''}{where}".rjust(place))
        line.append("  ").append(
            f"{s.kind if wide else KINDS[s.kind].short:<{kind}}", paper.palette.ink(KINDS[s.kind].colour)
        )
        largest = weights.topk(across)
        for weight, j in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
            if weight < MIN_DRAWN_WEIGHT:
                continue
            line.append("  ").append(f"{weight:.2f}", paper.palette.fill(weight))
            line.append(f" {j:>{number}} ", paper.palette.quiet).append(fitted(quoted(view.label(j)), token))
        line.rstrip()
        if shown:
            line.stylize("bold")
        paper.lines([line])
    rest = ranked[len(rows) :]
    if rest:
        most = max(row[3] for row in rest)
        paper.quiet(f"and {len(rest)} heads with no weight above {most:.2f}: --all")
