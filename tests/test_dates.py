"""The model in the package that reads dates: what it was made from, how exact it is, and the commands that use it."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from regard import EncoderDecoder, load
from regard.cli.app import run
from regard.training.checkpoint import PRETRAINED
from regard.training.table import Table
from regard.training.translating import exactness, split, translate_texts

ROOT = Path(__file__).parent.parent
FOLDER = PRETRAINED / "dates"

WRITTEN = {
    "3. März 2026": "2026-03-03", "March 3rd, 2026": "2026-03-03", "3 mars 2026": "2026-03-03",
    "2026年3月3日": "2026-03-03", "Dienstag, 3. März 2026": "2026-03-03", "3 de marzo de 2026": "2026-03-03",
    "3 marca 2026": "2026-03-03", "3 марта 2026 г.": "2026-03-03", "3. maaliskuuta 2026": "2026-03-03",
    "٣ مارس ٢٠٢٦": "2026-03-03", "2026년 3월 3일": "2026-03-03", "3 Mart 2026 Salı": "2026-03-03",
    "13/04/2026": "2026-04-13", "4/13/2026": "2026-04-13", "2026-04-13": "2026-04-13", "13.4.2026": "2026-04-13",
    "july 4th 1976": "1976-07-04", "4 juillet 1976": "1976-07-04", "24 dicembre 2031": "2031-12-24",
    "31 ธันวาคม 1999": "1999-12-31", "ngày 2 tháng 9 năm 1945": "1945-09-02", "29 Φεβρουαρίου 2024": "2024-02-29",
}  # fmt: skip
"""Dates that nobody drew at random."""


@pytest.fixture(scope="module")
def dates():
    return load("dates")


@pytest.fixture(scope="module")
def made():
    """examples/dates.py as a module."""
    pytest.importorskip("babel")
    spec = importlib.util.spec_from_file_location("dates", ROOT / "examples" / "dates.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["dates"] = module  # where its dataclasses look for their names
    spec.loader.exec_module(module)
    return module


def regard_says(capsys, monkeypatch, *arguments, typed=None):
    """What the command line prints on both streams, and its exit code."""
    monkeypatch.setattr(sys, "argv", ["regard", *arguments])
    if typed is not None:
        import io

        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    with pytest.raises(SystemExit) as ended:
        run()
    printed = capsys.readouterr()
    return printed.out, printed.err, ended.value.code


# --- the model --------------------------------------------------------------------------------------------------------


def test_it_is_an_encoder_decoder_of_a_few_hundred_kilobytes_and_its_card_tells_how_it_was_made(dates):
    assert isinstance(dates.model, EncoderDecoder)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 800_000
    card = (FOLDER / "card.md").read_text(encoding="utf-8")
    for word in ("regard train", "--task translate", '"seed": 0', "minutes", "held-out pairs translated exactly"):
        assert word in card


def test_the_figures_that_were_committed_are_those_of_the_task():
    measured = json.loads((ROOT / "benchmarks" / "results" / "dates.json").read_text())["groups"]
    assert measured["held-out dates"]["exact"] >= 0.99
    assert measured["held-out dates"]["texts"] > 10_000


def test_it_reads_dates_of_many_languages_and_formats(dates):
    found = translate_texts(dates.model, dates.tokenizer, list(WRITTEN))
    assert {text: best.text for text, (best,) in zip(WRITTEN, found, strict=True)} == WRITTEN


def test_it_is_exact_on_held_out_dates_drawn_anew(dates, made):
    known = [form for form in made.formats(made.SEEN) if form.named]
    drawn = [row for row, _ in made.draw(known, 9_000, random.Random(7), typed_share=0.0)]
    table = Table(("source", "target"), [(row.source, row.target) for row in drawn], 0)
    held_out = split(table)[1][:400]
    assert exactness(dates.model, dates.tokenizer, held_out).exact >= 0.98 * len(held_out) > 300


# --- its data ---------------------------------------------------------------------------------------------------------


def test_a_text_that_can_mean_two_dates_is_known_to(made):
    american, british = made.formats(["en_US"], ["M/d/y"]), made.formats(["en_GB"], ["dd/MM/y", "d/M/y"])
    both = made.Readings([*american, *british], ["printed"])
    assert sorted(map(str, both.dates("3/4/2026"))) == ["2026-03-04", "2026-04-03"]
    assert sorted(map(str, both.dates("13/4/2026"))) == ["2026-04-13"]
    assert both.dates("13/13/2026") == set()
    polish, croatian = made.formats(["pl"], ["d MMMM y"]), made.formats(["hr"], ["d. MMMM y."])
    named = made.Readings([*polish, *croatian], ["printed"])
    assert sorted(map(str, named.dates("3 listopada 2026"))) == ["2026-11-03"]
    assert sorted(map(str, named.dates("3. listopada 2026."))) == ["2026-10-03"]
    typed = made.Readings([*polish, *croatian], ["printed", "no stops"])
    assert len(typed.dates("3 listopada 2026")) == 2


def test_every_drawn_text_is_read_by_its_own_format_as_its_date(made):
    for locale in ("ar_EG", "vi", "ja"):
        known = [form for form in made.formats([locale]) if "E" not in form.parts]
        readings = made.Readings(known, list(made.TYPED))
        for row, day in made.draw(known, 40, random.Random(1), typed_share=0.5):
            assert day in readings.dates(row.source), row


def test_no_language_and_no_format_is_both_seen_and_unseen(made):
    assert not {name.split("_")[0] for name in made.SEEN} & {name.split("_")[0] for name in made.UNSEEN}
    assert not {form.pattern for form in made.formats(made.SEEN)} & set(made.NEW_FORMATS)


# --- the commands -----------------------------------------------------------------------------------------------------


def test_texts_are_translated_in_order_from_arguments_and_from_standard_input(capsys, monkeypatch):
    out, err, code = regard_says(capsys, monkeypatch, "translate", "3. März 2026", " March 4th, 2026 ")
    assert (out, err, code) == ("2026-03-03\n2026-03-04\n", "", 0)
    out, _, code = regard_says(
        capsys, monkeypatch, "translate", "5 mai 1999", "-", typed="3. März 2026\n\n  4 mars 2026\r\n"
    )
    assert (out, code) == ("1999-05-05\n2026-03-03\n\n2026-03-04\n", 0)
    out, _, _ = regard_says(capsys, monkeypatch, "translate", typed="3. März 2026")
    assert out == "2026-03-03\n"


def test_all_beams_are_shown_with_their_probabilities_and_as_json(capsys, monkeypatch):
    out, _, _ = regard_says(capsys, monkeypatch, "translate", "3. März 2026", "--beams", "3", "--all")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [len(row) for row in rows] == [3, 3, 3]
    assert rows[0][1:] == ["2026-03-03", "3. März 2026"]
    assert float(rows[0][0]) > 0.9 > float(rows[1][0])
    out, _, _ = regard_says(capsys, monkeypatch, "translate", "3. März 2026", "x", "--beams", "2", "--json")
    first, second = map(json.loads, out.splitlines())
    assert first["source"] == "3. März 2026"
    assert [set(one) for one in first["translations"]] == [{"text", "probability", "score", "ended"}] * 2
    assert second["source"] == "x"


def test_look_shows_what_each_character_looked_at(capsys, monkeypatch):
    out, _, code = regard_says(
        capsys, monkeypatch, "look", "3. März 2026", "--model", "dates", "--query", "3", "--no-page"
    )
    assert code == 0
    assert "Written: '2026-03-03'" in out
    assert out.count("▸3. März 2026") == 11
    assert "Every head when '6' (3) was chosen:" in out
    out, _, _ = regard_says(
        capsys, monkeypatch, "look", "3. März 2026", "--model", "dates", "--json", "--without", "1.0"
    )
    data = json.loads(out)
    assert data["written"] == "2026-03-03"
    assert data["written_tokens"] == [*"2026-03-03", "end"]
    assert data["source_tokens"] == [*"▸3. März 2026"]
    assert len(data["heads"]) == 8
    for head in data["heads"]:
        assert [len(row) for row in head["weights"]] == [13] * 11
        assert [sum(row) for row in head["weights"]] == pytest.approx([1.0] * 11, abs=1e-4)
    # the last digit of the year is copied from there
    mean = [sum(head["weights"][3][12] for head in data["heads"] if head["layer"] == 1) / 4]
    assert mean[0] > 0.5
    assert data["without"]["heads"] == [[1, 0]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["translate", ""], "text: empty; give one in quotes"),
        (["translate", "a", "--model", "stdlib"], "--model: expected a model of the kind encoder-decoder"),
        (["translate", "a" * 200], "tokens are more than the 128 that the model can read"),
        (["translate", "a", "--beams", "0"], "--beams"),
        (["translate", "a", "--count", "1000"], "count must be at most context_length=128"),
        (["translate", "a", "--model", "no-such"], "no model 'no-such'"),
        (["generate", "a", "--model", "dates"], "dates is of the kind encoder-decoder: regard translate"),
        (["explain", "a", "--model", "dates"], "dates is of the kind encoder-decoder: regard translate"),
        (["look", "a", "--model", "dates", "--start", "1"], "--start is for language models"),
        (["look", "3 mai 2026", "--model", "dates", "--query", "99"], "--query"),
        (["look", "3 mai 2026", "--model", "dates", "--query", "x"], "no 'x' was written"),
        (["look", "3 mai 2026", "--model", "dates", "--without", "9.0"], "--without must be a head from 0.0 to 1.3"),
        (["look", "3 mai 2026", "--model", "dates", "--layer", "2"], "--layer must be 0 to 1, got 2"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(arguments, says, capsys, monkeypatch):
    out, err, code = regard_says(capsys, monkeypatch, *arguments)
    assert (out, code) == ("", 2)
    assert says in " ".join(err.split())
    assert "Traceback" not in err


def test_standard_input_without_a_text_is_refused(capsys, monkeypatch):
    out, err, code = regard_says(capsys, monkeypatch, "translate", typed="")
    assert (out, code) == ("", 2)
    assert "standard input: empty" in err
