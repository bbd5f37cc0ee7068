"""What `regard look` and `regard explain` draw, at every width, for every text, with and without colours."""

import io
import itertools
import re
import unicodedata
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from regard import Ablate, Decoder, ModelConfig, intervene
from regard.display.data import look_as_data, tokens_as_data
from regard.display.explained import explain_token, print_explained, print_three_tokens
from regard.display.ground import THEMES
from regard.display.letters import cells, fitted, units, visible
from regard.display.page import head_map, print_look, print_tokens, text_lines
from regard.display.palette import Palette
from regard.display.paper import Paper
from regard.display.reading import Place, look, read_windows
from regard.display.script import Script, find_token
from regard.training.checkpoint import load
from regard.training.text import Tokenizer, train_tokenizer

ROOT = Path(__file__).parent.parent
DESK = (ROOT / "examples" / "library_desk.py").read_text(encoding="utf-8")
SCRIPTS = {
    "German": "Für Käthe, größer als Ångström",
    "Chinese": "注意力就是一切，漢字",
    "Arabic": "الانتباه هو كل شيء",
    "Hebrew": "שלום עולם",
    "Hindi": "ध्यान ही सब कुछ है",
    "Thai": "ความสนใจ",
    "emoji": "a 👩‍💻 b 👍🏽 c 🇩🇪 d ❤️",
    "accents": "e\u0301a\u0308\u0323 \u0301",
    "controls": "a\x1b[31mred\x1b]0;title\x07 b\x00\x7f\x9b2J\x08\r",
    "directions": "a\u202e b\u2066c\u200f",
    "tabs": "\tif x:\n\t\treturn\ty\n",
    "lines": "one\n\n\ntwo\u2028three\x0bfour\x85five",
    "blank": " \n \n",
    "one": "a",
}


@pytest.fixture(scope="module")
def bundled():
    return load("stdlib")


def seen(loaded, text, **options):
    return look(loaded.model, Script(loaded.tokenizer, text), name="stdlib", source="a text", **options)


def paper(width: int, palette: Palette | None = None) -> Paper:
    colours = {"force_terminal": palette is not None, "color_system": "truecolor" if palette else None}
    console = Console(file=io.StringIO(), width=width, highlight=False, _environ={}, **colours)
    return Paper(console, palette or Palette())


def printed(on: Paper) -> str:
    return on.console.file.getvalue()


WIDTHS = (32, 40, 60, 80, 120, 200)
DARK = Palette(THEMES["dark"], "truecolor")


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(bundled, width):
    view = seen(bundled, DESK[:900], query=100, layer=5, head=3, without=[Place(5, 0), Place(5, 3)])
    on = paper(width)
    print_look(on, view)
    for line in printed(on).splitlines():
        assert cell_len(line) <= width, line
    text = printed(on)
    shares = re.findall(r"(?<![\d.])[01]\.\d\d(?!\d)", "\n".join(line.plain for line in head_map(on, view)))
    assert sorted(shares)[-1] > "0.9"
    scores = [f"{s.score:.2f}" for s in view.heads]
    assert all(shares.count(score) >= scores.count(score) for score in scores)
    for s in view.heads:
        assert str(s.head) in text
    if width >= 40:
        assert "5.3" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_names_every_head_once_and_keeps_layers_in_order(bundled, width):
    view = seen(bundled, "def f(x): return x")
    lines = [line.plain for line in head_map(paper(width), view)]
    named = [int(n) for line in lines for n in re.findall(r"\b(?:head |h)(\d)\b", line)]
    assert named == list(range(6))
    maps = sum("h0" in line or "head 0" in line or re.search(r"\bh\d", line) is not None for line in lines)
    layers = [int(found[1]) for line in lines if (found := re.match(r" *(\d)  [a-z1]", line))]
    assert layers == list(range(6)) * max(1, maps)


@pytest.mark.parametrize("heads", [12, 16, 32])
def test_models_with_many_heads_fit_as_well(heads):
    tokenizer = Tokenizer(train_tokenizer([DESK], 300))
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=64, dim=2 * heads, layers=2, heads=heads)
    torch.manual_seed(0)
    view = look(Decoder(config), Script(tokenizer, DESK[:80]), name="m", source="t")
    for width in (40, 80, 120):
        on = paper(width)
        print_look(on, view)
        assert max(map(cell_len, printed(on).splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_the_steps_fit_too(bundled, width):
    view = seen(bundled, "def f(x): return x", query=5)
    on = paper(width)
    print_explained(on, view, explain_token(bundled.model, view))
    print_three_tokens(on)
    assert max(map(cell_len, printed(on).splitlines())) <= width
    assert "keys it may see hold" in " ".join(printed(on).split())


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS.keys())
@pytest.mark.parametrize("width", [32, 40, 80])
def test_any_text_keeps_to_its_lines_and_nothing_of_it_is_obeyed(bundled, text, width):
    view = seen(bundled, text)
    on = paper(width)
    print_look(on, view)
    print_tokens(on, view)
    print_explained(on, view, explain_token(bundled.model, view))
    out = printed(on)
    assert not [c for c in out if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") and c not in "\n\u200d\u200c"]
    for line in out.split("\n"):
        assert cells(line) <= width, line


@pytest.mark.parametrize("name", ["German", "Chinese", "Arabic", "Hebrew", "Hindi", "Thai"])
def test_text_is_shown_as_it_was_written(bundled, name):
    on = paper(80)
    print_look(on, seen(bundled, SCRIPTS[name]))
    assert SCRIPTS[name] in printed(on)
    assert "\\x" not in printed(on).split("What the model expects")[0]


def test_a_character_of_several_tokens_is_shaded_by_the_largest_of_their_weights_and_its_tokens_say_which_part(bundled):
    text = "x = 漢字"
    view = seen(bundled, text, query=0, layer=0, head=0)
    tokens = [n for n in range(1, view.count) if "漢" in view.label(n)]
    assert [view.label(n) for n in tokens] == [f"漢 {part}/{len(tokens)}" for part in range(1, len(tokens) + 1)]
    assert len(tokens) > 1
    last = view.count - 1
    for layer, head in itertools.product(range(6), range(6)):
        view = seen(bundled, text, query=last, layer=layer, head=head)
        weights = view.weights(layer)[head]
        [line] = text_lines(paper(80, DARK), view)
        place = line.plain.index("漢")
        style = next((span.style for span in line.spans if span.start <= place < span.end), "")
        assert style == DARK.fill(float(weights[tokens].max()))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.integers(0, 30))
def test_fitted_text_has_the_width_that_was_asked_for_and_no_controls(text, width):
    shown = fitted(text, width)
    assert cells(shown) == width
    assert not [c for c in shown if unicodedata.category(c) in ("Cc", "Zl", "Zp")]
    assert visible(visible(text)) == visible(text)
    places = [(unit.start, unit.stop) for unit in units(text)]
    assert [n for start, stop in places for n in range(start, stop)] == list(range(len(text)))


def test_without_colours_the_weights_stand_under_the_text(bundled):
    view = seen(bundled, "self.quillback = quillback; self.quill", query=14, layer=5, head=3)
    text, marks = (line.plain for line in text_lines(paper(80), view))
    weights = view.weights(5)[3].tolist()
    for number in range(1, view.count):
        start, stop = view.span(number)
        under = marks[3 + start : 3 + stop].ljust(stop - start)
        weight = weights[number]
        mark = (
            "^" if number == 14 else str(min(9, int(10 * weight))) if weight >= 0.1 else "." if weight >= 0.01 else " "
        )
        assert under == mark * (stop - start), text
    assert "5" in marks


def test_with_colours_nothing_stands_under_it_and_a_larger_weight_has_a_farther_step(bundled):
    view = seen(bundled, "self.quillback = quillback; self.quill", query=14, layer=5, head=3)
    [line] = text_lines(paper(80, DARK), view)
    weights = view.weights(5)[3].tolist()
    styles = {}
    for number in range(1, 14):
        place = 3 + view.span(number)[0]
        style = next((span.style for span in line.spans if span.start <= place < span.end), "")
        styles[number] = DARK.fills.index(style) if style else -1
    order = sorted(styles, key=lambda n: weights[n])
    assert [styles[n] for n in order] == sorted(styles.values())
    assert max(styles.values()) > 8


def test_the_token_that_is_chosen_has_letters(bundled):
    for text in (DESK, DESK[:600], "self.quillback = quillback; self.quill"):
        view = seen(bundled, text)
        assert any(map(str.isalpha, view.label(view.query))), view.label(view.query)


def test_a_token_is_found_by_its_text(bundled):
    script = Script(bundled.tokenizer, "the cat sat on the mat because the cat was tired, 20 times")
    count = len(script.ids) + 1

    def found(words):
        return script.label(find_token(script, 0, count, words) - 1)

    assert found("because") == found(" because") == found("'because'") == " because"
    assert found("mat") == "at"  # the last of the tokens of a word, which has read all of it
    assert found("tired") == "red"
    assert found("sat on the m") == " m"
    assert find_token(script, 0, count, "mat") == 9
    for words, said in {
        "cat": r"2 tokens end 'cat'; say which by its number\n +3 .*c\[at\] sat on.*\n +13 .*",
        "at": "4 tokens end 'at'",
        "dog": "the text has no 'dog'; --tokens lists them",
        "BECAUSE": "near it: 'because'",
        "": "the text has no ''; --tokens lists them",
    }.items():
        with pytest.raises(ValueError, match=said):
            find_token(script, 0, count, words)


def test_a_token_of_another_window_is_named_with_its_window(bundled):
    script = Script(bundled.tokenizer, "one two three four five six seven eight nine ten eleven twelve")
    with pytest.raises(ValueError, match=r"not in this window of the text; --start \d+ shows one"):
        find_token(script, 0, 4, "twelve")


@pytest.mark.parametrize(("text", "told"), [("Käse, Käse", "of the 2 that make up one character"), ("a cheese", "")])
def test_what_a_label_says_of_numbers_and_parts_is_explained_where_it_stands(bundled, text, told):
    paper = Paper(Console(file=io.StringIO(), width=200, highlight=False), Palette())
    script = Script(bundled.tokenizer, text)
    view = look(bundled.model, script, name="stdlib", source="a text", query=next(
        n + 1 for n in range(len(script.ids)) if (script.part(n)[1] > 1) == bool(told)
    ))  # fmt: skip
    print_look(paper, view)
    printed = paper.console.file.getvalue()
    assert "In brackets: a token's number." in printed
    assert (f"'{view.label(view.query)}' is token 1 {told}" in printed) is bool(told)
    assert ("make up one character" in printed) is bool(told)


def test_the_guesses_are_the_models_own_and_those_without_a_head_are_its_own_without_it(bundled):
    text = "self.quillback = quillback; self.quill"
    gone = [Place(5, 0), Place(5, 3)]
    view = seen(bundled, text, query=14, without=gone)
    tokens = torch.tensor([[bundled.tokenizer.end_id, *bundled.tokenizer.encode(text)]])
    for expected, changes in ((view.expected, []), (view.without, [Ablate("layers.5", 0), Ablate("layers.5", 3)])):
        with torch.inference_mode(), intervene(bundled.model, *changes):
            logits = bundled.model(tokens)[0]
        probabilities = logits[14].softmax(-1)
        assert expected.guesses[0].probability == pytest.approx(float(probabilities.max()), abs=1e-5)
        assert expected.guesses[0].token == int(probabilities.argmax())
        assert expected.loss == pytest.approx(
            float(torch.nn.functional.cross_entropy(logits[:-1], tokens[0, 1:])), abs=1e-4
        )
        assert expected.actual is None  # the text ends there
    assert view.expected.guesses[0].text == "back"
    assert view.expected.guesses[0].probability > 0.9 > 0.2 > view.without.guesses[0].probability
    earlier = seen(bundled, text, query=4).expected.actual
    assert (earlier.text, earlier.token) == ("back", int(tokens[0, 5]))
    data = look_as_data(view)
    assert data["expected"]["guesses"][0]["text"] == "back"
    assert data["without"]["without"] == [[5, 0], [5, 3]]


def test_the_example_of_the_help_copies_a_name_and_its_control_does_not(bundled):
    """The claim of `regard look --help` and the README: two heads copy the name; with another name there is no copy."""
    copy = seen(bundled, "self.quillback = quillback; self.quill", without=[Place(5, 0), Place(5, 3)])
    assert (copy.query, copy.label(copy.query)) == (14, "ill")
    [actual] = [guess for guess in copy.expected.guesses if guess.text == "back"]
    assert actual.probability > 0.9
    assert max(guess.probability for guess in copy.without.guesses) < 0.1
    control = seen(bundled, "self.sturgeon = sturgeon; self.quill", query=len(copy.tokens[0]) - 1)
    assert all(guess.text != "back" for guess in control.expected.guesses)


def test_a_long_text_is_read_in_windows_and_each_has_its_own_loss():
    tokenizer = Tokenizer(train_tokenizer([DESK], 300))
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=33, dim=12, layers=1, heads=2)
    torch.manual_seed(0)
    model = Decoder(config)
    script = Script(tokenizer, DESK[:700])
    steps = []
    windows = read_windows(model, script, lambda done, total: steps.append((done, total)))
    assert [w.start for w in windows] == list(range(0, len(script.ids), 32))
    assert steps == [(n, len(windows)) for n in range(len(windows) + 1)]
    assert sum(w.tokens for w in windows) == len(script.ids)
    for window in windows:
        ids = torch.tensor([[tokenizer.end_id, *script.ids[window.start : window.start + 32]]])
        with torch.no_grad():
            logits = model(ids)[0, :-1]
        assert window.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])), abs=1e-5)
        assert window.first_line <= window.last_line
    assert windows[0].begins == DESK.split("\n")[0]
    view = look(model, script, name="m", source="t", start=64, windows=windows)
    on = paper(80)
    print_look(on, view)
    assert f"its {len(windows)} windows of 32 tokens" in printed(on)
    assert re.search(r"→ +64 ", printed(on))
    long = Script(tokenizer, DESK * 2)
    some = read_windows(model, long)
    assert len(some) == 24
    assert some[-1].start == long.windows(32)[-1]


def test_the_numbers_of_all_tokens_are_listed(bundled):
    view = seen(bundled, SCRIPTS["German"])
    for width in (32, 80):
        on = paper(width)
        print_tokens(on, view)
        assert [int(n) for n in sorted(re.findall(r"(?:^ *|  +)(\d+) '", printed(on), re.MULTILINE), key=int)] == list(
            range(view.count)
        )
    data = tokens_as_data(view)
    assert data[1]["text"] == SCRIPTS["German"][data[1]["start"] : data[1]["stop"]]
    covered = {place for token in data for place in range(token["start"], token["stop"])}
    assert covered == set(range(len(SCRIPTS["German"])))
