"""The command line as a user meets it: what it prints, and what it says to bad input."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import regard
from cases import told
from regard import Decoder, Mask, ModelConfig, attention, bench, steps
from regard.cli import main
from regard.cli.mask_expression import read_mask
from regard.rules import RULE_KINDS
from regard.training.checkpoint import load, save_model
from regard.training.text import Tokenizer, train_tokenizer

TEXT = "the cat sat on the mat because the cat was tired, and the mat was warm\n"
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model whose heads differ: random weights, large enough to make attention uneven."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(train_tokenizer([TEXT * 20], vocab_size=290))
    tokenizer.save(folder / "tokenizer.json")
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=48, dim=24, layers=2, heads=3, kv_heads=1, hidden_dim=40
    )
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    save_model(folder, decoder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run, and where `regard look` writes its page."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


class Run:
    """What a command printed, and how it ended."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        before = sys.argv
        sys.argv = ["regard", *map(str, arguments)]
        try:
            with pytest.raises(SystemExit) as stop:
                main()
        finally:
            sys.argv = before
        self.code = stop.value.code
        self.out, self.err = capsys.readouterr()


def test_look_shows_the_tokens_the_map_and_what_a_token_attends_to_as_plain_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, "look", TEXT, "--model", model, "--query", 9)
    assert run.code == 0, run.err
    assert "\x1b" not in run.out
    assert TEXT.strip() in run.out
    loaded = load(model)
    pieces = loaded.tokenizer.pieces([loaded.tokenizer.end_id, *loaded.tokenizer.encode(TEXT)])
    assert f"What token 9 '{pieces[9]}' attends to" in run.out
    for place in ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2"):
        assert f" {place} " in run.out
    assert all(f"head {head}" in run.out for head in range(3))


def test_look_as_json_gives_the_weights_that_attention_used(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "look", TEXT, "--model", model, "--query", 7, "--json")
    data = json.loads(run.out)
    loaded = load(model)
    tokens = torch.tensor([[token["id"] for token in data["tokens"]]])
    assert tokens[0, 1:].tolist() == loaded.tokenizer.encode(TEXT)
    given: list[Any] = []
    first, second = (block.attention for block in loaded.model.layers)
    with torch.no_grad(), told(first, given), told(second, given):
        loaded.model(tokens)
    for entry in data["attends"]:
        heads, scoring = given[entry["layer"]]
        eye = torch.eye(tokens.shape[1]).expand(1, heads.value.shape[1], -1, -1)
        weights = attention(heads.query, heads.key, eye.contiguous(), **scoring)[0, entry["head"], 7]  # weights @ 1
        for key in entry["keys"]:
            assert key["weight"] == pytest.approx(float(weights[key["key"]]), abs=1e-6)
        assert entry["keys"][0]["weight"] == pytest.approx(float(weights.max()), abs=1e-6)


def test_look_chooses_the_query_and_head_that_are_not_given(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = json.loads(Run(capsys, "look", TEXT, "--model", model, "--json").out)
    fixed = json.loads(Run(capsys, "look", TEXT, "--model", model, "--json", "--layer", 1, "--head", 2).out)
    assert 0 <= free["query"] < len(free["tokens"])
    assert (fixed["layer"], fixed["head"]) == (1, 2)


def test_a_text_longer_than_the_context_is_shown_in_parts_and_says_so(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 10)
    first = Run(capsys, "look", path, "--model", model)
    assert "as many as the model's context holds" in first.out
    assert "the next: --start 47" in first.out
    ids = load(model).tokenizer.encode(TEXT * 10)
    second = json.loads(Run(capsys, "look", path, "--model", model, "--start", 47, "--json").out)
    assert [token["id"] for token in second["tokens"]][1:] == ids[47 : 47 + 47]


def test_look_takes_heads_away_lists_tokens_and_finds_a_token_by_its_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = ("--without", "0.1,1.2", "--without", "1.2")
    run = Run(capsys, "look", "the warm cat", "--model", model, "--query", "warm", *gone)
    assert run.code == 0, run.err
    assert "with all heads" in run.out
    assert "without 0.1, 1.2" in run.out
    data = json.loads(Run(capsys, "look", "the warm cat", "--model", model, "--query", "warm", *gone, "--json").out)
    assert data["without"]["without"] == [[0, 1], [1, 2]]
    assert data["without"]["loss"] != data["expected"]["loss"]
    assert data["tokens"][data["query"]]["stop"] == len("the warm")
    listed = Run(capsys, "look", "the warm cat", "--model", model, "--tokens")
    tokens = json.loads(Run(capsys, "look", "the warm cat", "--model", model, "--tokens", "--json").out)["tokens"]
    assert all(f"{token['number']} '" in listed.out for token in tokens)
    assert "".join(token["text"] for token in tokens) == "the warm cat"


def test_a_long_text_gets_an_overview_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "long.txt"
    path.write_text(TEXT * 10)
    assert "The whole text" in Run(capsys, "look", path, "--model", model).out
    assert "The whole text" not in Run(capsys, "look", path, "--model", model, "--start", 47).out
    data = json.loads(Run(capsys, "look", path, "--model", model, "--json").out)
    assert sum(window["tokens"] for window in data["windows"]) == data["total_tokens"]


@pytest.mark.parametrize(("width", "columns"), [(40, "40"), (100, "100"), (80, None), (80, "0")])
def test_a_page_that_is_piped_is_as_wide_as_columns_says_or_80(
    width: int, columns: str | None, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    out = Run(capsys, "look", TEXT * 2, "--model", model, "--query", 9).out
    assert width * 0.8 < max(map(len, out.splitlines())) <= width


def test_a_terminal_gets_colours_for_its_theme_and_none_where_none_are_wanted(model: Path) -> None:
    unknown = ("NO_COLOR", "COLORFGBG", "REGARD_THEME", "FORCE_COLOR")
    known = {name: value for name, value in os.environ.items() if name not in unknown}
    known |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    terminals = [{"REGARD_THEME": "dark"}, {"REGARD_THEME": "light"}, {}]
    terminals += [{"NO_COLOR": "1", "REGARD_THEME": "dark"}, {"TERM": "dumb", "REGARD_THEME": "dark"}]
    command = ["look", TEXT, "--model", str(model), "--query", "9", "--no-page"]
    done = subprocess.run(
        [sys.executable, "-c", AT_TERMINALS, json.dumps(terminals), *command],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, env=known, timeout=120,
    )  # fmt: skip
    dark, light, nobody_says, no_color, dumb = json.loads(done.stdout)
    assert "\x1b[38;2;255;255;255;48;2;" in dark
    assert "\x1b[38;2;0;0;0;48;2;255" in light
    for plain in (no_color, dumb, nobody_says):
        assert "48;2;" not in plain
        assert "weights in tenths" in plain
    assert "--theme dark or --theme light" in nobody_says


AT_TERMINALS = """
import json, os, pty, sys
import regard.display.reading, regard.models  # what takes long to import, once for all; forks need one thread
from regard.cli import main
told = []
for environment in json.loads(sys.argv.pop(1)):
    process, terminal = pty.fork()
    if not process:
        os.environ.update(environment)
        main()
    told.append(b"")
    try:
        while some := os.read(terminal, 1 << 16):
            told[-1] += some
    except OSError:  # its end, for Linux
        pass
    assert os.waitpid(process, 0)[1] == 0, told[-1]
print(json.dumps([one.decode() for one in told]))
"""
"""A command at one terminal after the other, each with something in its environment; what they showed."""


def test_a_stream_that_cannot_hold_a_sign_gets_an_escape_and_no_error(model: Path) -> None:
    command = [sys.executable, "-m", "regard", "look", "für\n漢", "--model", str(model)]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert b"f\\xfcr\\u21b5" in done.stdout


@pytest.mark.parametrize("option", [[], ["--json"], ["--tokens"]])
def test_a_reader_that_goes_early_leaves_quietly(model: Path, option: list[str]) -> None:
    command = [sys.executable, "-m", "regard", "look", TEXT * 9, "--model", str(model), *option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_prompt_is_piped_in_by_its_name_and_without(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--model", model, "--count", 3, "--seed", 1, "--json")
    wanted = Run(capsys, "generate", "the cat", *options).out
    for arguments, typed in ((("-",), "the cat\n"), ((), "the cat\n"), (("the cat",), "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
        assert Run(capsys, "generate", *arguments, *options).out == wanted
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert json.loads(Run(capsys, "generate", *options).out)["prompt"] == ""


def test_vectors_are_made_of_lines_that_are_piped_in(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Run(capsys, "embed", "the cat", "the mat", "--model", model).out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat\n\n  the mat\n")))
    assert Run(capsys, "embed", "-", "--model", model).out == wanted


def test_translations_stand_beside_the_lines_that_are_piped_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "\ufeff3. März 2026\r\n\r\n2026年3月3日\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert Run(capsys, "translate").out == "2026-03-03\n\n2026-03-03\n"


def test_standard_input_is_read(model: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from regard.cli import main; main()",
        "look",
        "-",
        "--model",
        str(model),
        "--json",
    ]
    done = subprocess.run(command, input=TEXT.encode(), capture_output=True, check=True)
    assert json.loads(done.stdout)["source"] == "standard input"


def test_explain_shows_every_number_of_the_three_token_example(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "explain", "--example", "three-tokens")
    assert run.code == 0, run.err
    rows = {" ".join(line.split()) for line in run.out.splitlines()}
    shown = "\n".join(rows)
    for row in (
        "1 0 1 0", "0 2 0 2", "1 1 1 1",  # x
        "1 0 2", "2 2 2", "2 1 3",  # queries
        "0 1 1", "4 4 0", "2 3 1",  # keys
        "1 2 3", "2 8 0", "2 6 3",  # values
        "2 4 4", "4 16 12", "4 12 10",  # scores
        "0.063379 0.46831 0.46831", "6.0337e-06 0.98201 0.017986", "0.00029539 0.88054 0.11917",  # weights
        "1.9366 6.6831 1.5951", "2 7.964 0.053976", "1.9997 7.7599 0.35839",  # output
        "0 0.5 0.5", "0 1 0", "0 0.9 0.1",  # weights in tenths
        "2 7 1.5", "2 8 0", "2 7.8 0.3",  # what they give
    ):  # fmt: skip
        assert row in shown, row
    data = json.loads(Run(capsys, "explain", "--example", "three-tokens", "--json").out)
    assert data["rounded"]["output"][0] == pytest.approx([2, 7, 1.5])


def test_explain_ends_in_the_layers_own_output(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "explain", TEXT, "--model", model, "--layer", 1, "--head", 2, "--query", 5, "--json")
    data = json.loads(run.out)
    names = [step["name"] for step in data["steps"]]
    assert names[-5:] == ["mask", "softmax", "weigh", "join", "project output"]
    weights = next(step["numbers"] for step in data["steps"] if step["name"] == "softmax")
    assert sum(weights[0]) == pytest.approx(1, abs=1e-6)
    assert weights[0][6:] == [0.0] * len(weights[0][6:])  # causal
    loaded = load(model)
    tokens = torch.tensor([[loaded.tokenizer.end_id, *loaded.tokenizer.encode(TEXT)]])
    outputs = []
    loaded.model.layers[1].attention.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        loaded.model(tokens)
    assert data["steps"][-1]["numbers"][0] == pytest.approx(outputs[0][0, 5].tolist(), abs=1e-5)
    text = Run(capsys, "explain", TEXT, "--model", model, "--layer", 1, "--head", 2, "--query", 5).out
    assert "keys it may see hold" in text


def test_generation_is_reproducible_from_a_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", "the cat", "--model", model, "--count", 30, "--seed")
    first, again, other = (Run(capsys, *arguments, seed).out for seed in (1, 1, 2))
    assert first == again != other
    assert first.startswith("the cat")


def test_several_prompts_are_written_side_by_side_as_each_would_be_alone(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--model", model, "--count", 30, "--seed", 3, "--min-p", 0.02, "--repetition-penalty", 1.1)
    prompts = ("the cat", "a", "the dog sat on the mat")
    alone = [Run(capsys, "generate", prompt, *settings).out for prompt in prompts]
    assert Run(capsys, "generate", *prompts, *settings).out == "".join(alone)
    told = [json.loads(line) for line in Run(capsys, "generate", *prompts, *settings, "--json").out.splitlines()]
    assert [row["prompt"] + row["text"] + "\n" for row in told] == alone
    stop = told[2]["text"][5:8]
    ended = json.loads(Run(capsys, "generate", prompts[2], *settings, "--stop", stop, "--json").out)
    assert ended["text"] == told[2]["text"].split(stop)[0]
    assert ended["tokens"] < told[2]["tokens"]
    assert Run(capsys, "generate", *settings, "--stop", "").code == 2


def test_train_writes_a_model_that_look_can_show_and_refuses_to_begin_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"{number}: {TEXT}" * 5)
    sizes = ("--steps", 3, "--dim", 16, "--layers", 1, "--heads", 2, "--context-length", 32, "--vocab-size", 280)
    arguments = ("train", tmp_path / "run", "--data", texts, *sizes, "--precision", "no")
    run = Run(capsys, *arguments)
    assert run.code == 0, run.err
    card = (tmp_path / "run" / "card.md").read_text()
    for word in ("regard train", "seed", "bits per byte", "xz -9e", "## Held-out files", "digest"):
        assert word in card
    assert Run(capsys, "look", TEXT, "--model", tmp_path / "run").code == 0
    again = Run(capsys, *arguments)
    assert again.code == 2
    assert "--resume" in again.err
    other = Run(capsys, *arguments, "--resume", "--learning-rate", 0.001)
    assert other.code == 2
    assert "begun with learning_rate 0.003, which cannot become 0.001" in " ".join(other.err.split())


def test_training_goes_on_from_a_model_with_its_vocabulary_and_sizes_and_its_card(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}: {TEXT}" * 5)
    first, then = tmp_path / "first", tmp_path / "then"
    shutil.copytree(model, first)
    (first / "card.md").write_text("# Model card\n\n| made | by hand |\n")
    sizes = ("--context-length", 24, "--steps", 1, "--learning-rate", 1e-9, "--precision", "no")
    arguments = ("train", then, "--from", first, "--data", tmp_path / "texts")
    run = Run(capsys, *arguments, *sizes)
    assert run.code == 0, run.err
    assert (then / "tokenizer.json").read_text() == (first / "tokenizer.json").read_text()
    old, new = load(first).model, load(then).model
    assert new.config == replace(old.config, context_length=24)
    for name, weight in new.state_dict().items():
        assert torch.allclose(weight, old.state_dict()[name], rtol=1e-2, atol=1e-3), name
    card = (then / "card.md").read_text()
    assert "## The model that training began with\n\n| made | by hand |" in card
    wrong = Run(capsys, "train", tmp_path / "other", "--from", first, "--data", tmp_path / "texts", "--layers", 7)
    assert wrong.code == 2
    assert f"decides it, {old.config.layers}; got 7" in " ".join(wrong.err.split())
    assert not (tmp_path / "other").exists()


def test_learned_positions_cannot_be_made_longer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer(train_tokenizer([TEXT], 280))
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, context_length=16, dim=12, layers=1, heads=3, positions="learned"
    )
    (tmp_path / "first").mkdir()
    tokenizer.save(tmp_path / "first" / "tokenizer.json")
    save_model(tmp_path / "first", Decoder(config))
    (tmp_path / "text.txt").write_text(TEXT * 50)
    run = Run(capsys, "train", tmp_path / "then", "--from", tmp_path / "first", "--data", tmp_path / "text.txt",
              "--context-length", 32)  # fmt: skip
    assert run.code == 2
    assert "learned vectors for 16 positions only" in " ".join(run.err.split())


BAD = {
    "no such file": (["look", "no/such/file.txt"], "no/such/file.txt: there is no such file"),
    "a folder": (["look", "{tmp}"], "got a folder"),
    "an empty file": (["look", "{tmp}/empty.txt"], "the file is empty"),
    "a binary file": (["look", "{tmp}/binary.bin"], "this looks like a binary file"),
    "not UTF-8": (["look", "{tmp}/latin.txt"], "expected UTF-8"),
    "an enormous file": (["look", "{tmp}/enormous.txt"], "expected at most 16,777,216 bytes"),
    "an empty text": (["look", " "], "text: empty"),
    "no text at all": (["look", ""], "text: empty"),
    "an unknown model": (["look", "hello", "--model", "gpt17"], "no model 'gpt17'"),
    "a damaged model": (["look", "hello", "--model", "{tmp}/damaged"], "not a whole safetensors file"),
    "a foreign model": (["look", "hello", "--model", "{tmp}/foreign"], "not a regard model"),
    "a query out of range": (["look", "hello", "--query", "99"], "--query must be 0 to"),
    "a layer out of range": (["look", "hello", "--layer", "2"], "--layer must be 0 to 1, got 2"),
    "a head out of range": (["explain", "hello", "--head", "-1"], "--head must be 0 to 2, got -1"),
    "a start out of range": (["look", "hello", "--start", "400"], "--start must be 0 to"),
    "a query that is no token": (["look", "hello", "--query", "xyz"], "--query: the text has no 'xyz'"),
    "a query that is several": (["look", "a cat, a dog", "--query", "a"], "tokens end 'a'; say which by its number"),
    "a head to take away, half said": (
        ["look", "hello", "--without", "5"],
        "expected a head as LAYER.HEAD, such as 5.0",
    ),
    "a head to take away, not there": (["look", "hello", "--without", "1.1,2.0"], "must be a head from 0.0 to 1.2"),
    "an unknown theme": (["look", "hello", "--theme", "beige"], "beige"),
    "not a number": (["look", "hello", "--layer", "two"], "--layer"),
    "no command": (["gaze", "hello"], "gaze"),
    "explain without a text": (["explain"], "give a text or --example three-tokens"),
    "an unknown example": (["explain", "--example", "four-tokens"], "three-tokens"),
    "nothing to resume": (["train", "{tmp}/nowhere", "--resume"], "without --resume a new run begins"),
    "no texts to train on": (["train", "{tmp}/run", "--data", "{tmp}/damaged", "--pattern", "*.md"], "*.md"),
    "a probability above one": (["generate", "the", "--top-p", "1.5"], "Invalid value for '--top-p'"),
    "a share below nothing": (["generate", "the", "--min-p", "-1"], "Invalid value for '--min-p'"),
    "a seed beyond 64 bits": (["generate", "the", "--seed", "1" + 24 * "0"], "--seed: expected a whole number of 64"),
    "nothing to end before": (["generate", "the", "--stop", ""], "--stop: empty"),
    "a file to go on with": (["generate", "{tmp}/latin.txt"], "is a file; to read what is in it: regard generate - <"),
    "a file to translate": (["translate", "{tmp}/latin.txt"], "is a file; to read what is in it: regard translate - <"),
    "a file for a vector": (["embed", "{tmp}/latin.txt"], "is a file; to read what is in it: regard embed - <"),
    "neighbours of nothing": (["embed", "a", "--nearest", " "], "--nearest: empty"),
    "a vector of a translator": (["embed", "a", "--model", "dates"], "dates is of the kind encoder-decoder"),
    "no mask": (["plan", "--mask", "Casual()"], "mask: 'Casual' is no mask; did you mean Causal?"),
    "a mask for another batch": (["plan", "--mask", "Padding([3, 4])"], "Padding: lengths is for batch=2"),
    "an unknown kernel": (["plan", "--kernel", "magic"], "no kernel named 'magic'"),
    "heads that do not divide": (["plan", "--heads", "12", "--kv-heads", "5"], "kv_heads"),
    "a call too large for any machine": (["plan", "--length", "1000000000000"], "more than this machine can address"),
    "no row of that name": (["bench", "--rows", "sideways"], "no row is named like 'sideways'"),
    "a folder for numbers": (["bench", "--output", "{tmp}"], "is a folder; give a file"),
    "no such device": (["bench", "--device", "gpu"], "device must be cpu or cuda, got 'gpu'"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_message_and_exit_code_2(
    arguments: list[str], words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "binary.bin").write_bytes(b"ELF\0\1\2")
    (tmp_path / "latin.txt").write_bytes("señor".encode("latin-1"))
    with (tmp_path / "enormous.txt").open("wb") as file:
        file.truncate(17 * 2**20)
    for name in ("damaged", "foreign"):
        (tmp_path / name).mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x10\0\0")
    save_file({"weight": torch.zeros(3)}, tmp_path / "foreign" / "model.safetensors")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    if arguments[0] in ("look", "explain", "generate") and "--model" not in arguments and len(arguments) > 1:
        arguments += ["--model", str(model)]
    run = Run(capsys, *arguments)
    assert run.code == 2
    assert run.out == ""
    assert "Traceback" not in run.err
    assert words in " ".join(run.err.split())
    assert len(run.err.splitlines()) <= 24


ESCAPE, SHOWN = "\x1b[31mred", ("␛[31mred", r"\x1b[31mred")


@pytest.mark.parametrize(
    "arguments",
    [
        ["look", f"{ESCAPE}.txt"],
        ["look", "a cat", "--query", ESCAPE],
        ["look", "a cat", f"--{ESCAPE}"],
        ["look", "a cat", ESCAPE],
        ["generate", "a", "--model", ESCAPE],
        ["train", "{tmp}/run", "--data", f"{{tmp}}/{ESCAPE}"],
        ["train", f"{{tmp}}/{ESCAPE}", "--resume"],
        ["bench", "--rows", ESCAPE],
        ["plan", "--mask", f"{ESCAPE}()"],
        [ESCAPE],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_message_shows_what_a_terminal_would_obey_and_does_not_send_it(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert run.code == 2
    assert "\x1b" not in run.err
    assert any(shown in run.err for shown in SHOWN), run.err


def test_what_training_tells_of_names_is_shown_and_not_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number}: {TEXT}" * 9)
    sizes = ("--steps", 1, "--dim", 8, "--layers", 1, "--heads", 2, "--context-length", 8, "--vocab-size", 257)
    run = Run(capsys, "train", tmp_path / ESCAPE, "--data", tmp_path / "texts", *sizes, "--precision", "no")
    assert run.code == 0, run.err
    assert f"written: {tmp_path / ESCAPE}".replace("\x1b", "␛") in run.err
    assert "\x1b" not in run.err


@pytest.mark.parametrize("width", [40, 60, 120])
def test_what_a_command_tells_is_broken_between_words_too(width: int) -> None:
    from rich.console import Console

    from regard.cli import console

    paper = io.StringIO()
    said = (
        "held out: 3.725 bits per byte (xz -9e: 1.220 file by file)\n\n  query [batch=1, heads=12, query_len=1024] " * 3
    )
    console.tell(Console(file=paper, force_terminal=True, width=width, color_system=None), said)
    lines = paper.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(paper.getvalue().split()) == " ".join(said.split())
    piped = io.StringIO()
    console.tell(Console(file=piped, width=width), said)
    assert piped.getvalue().splitlines() == said.splitlines()


@pytest.mark.parametrize("width", [40, 60, 120])
def test_lines_that_are_wider_than_the_terminal_are_broken_between_words(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from regard.cli import console

    paper = io.StringIO()
    terminal = Console(file=paper, force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "open_console", lambda: terminal)
    said = "kernel  strips: the first\n        not dense: it can, but it would hold 67,108,864 numbers of a square\n"
    console.print_plain(said, hang=8)
    lines = paper.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(paper.getvalue().split()) == " ".join(said.split())
    assert all(line.startswith(("kernel", "  ")) for line in lines)


def test_plan_prints_what_regard_plan_says_of_the_same_call(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--batch", 2, "--heads", 6, "--kv-heads", 3, "--length", 2003, "--query-len", 1009, "--head-dim", 16)
    run = Run(capsys, "plan", *sizes, "--value-dim", 24, "--mask", "Causal() & (Window(101) | Prefix(4))")
    assert run.code == 0, run.err
    query, key, value = torch.empty(2, 6, 1009, 16), torch.empty(2, 3, 2003, 16), torch.empty(2, 3, 2003, 24)
    mask = regard.Causal() & (regard.Window(101) | regard.Prefix(4))
    assert run.out == f"{regard.plan(query, key, value, mask=mask)}\n"
    data = json.loads(Run(capsys, "plan", *sizes, "--mask", "Causal()", "--tile-size", 7, "--lse", "--json").out)
    expected = regard.plan(query, key, key, mask=regard.Causal(), lse=True, tile_size=7)
    assert data["flops_needed"] == expected.flops_needed
    assert data["tiles"] == {tile.value: count for tile, count in expected.tiles.items()}
    assert "lse" in data["others"]["sdpa"]


def test_plan_takes_kernel_precision_softcap_dropout_and_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ("plan", "--length", 64, "--heads", 2, "--head-dim", 8)
    assert "kernel  reference: requested by name" in Run(capsys, *plain, "--kernel", "reference").out
    wide, half = (json.loads(Run(capsys, *plain, "--json", "--dtype", d).out) for d in ("float64", "float16"))
    assert wide["bytes_moved"] == 4 * half["bytes_moved"] == 4 * 64 * 2 * 8 * 8
    for option in ("--softcap", "--dropout"):
        data = json.loads(Run(capsys, *plain, "--json", option, 0.5).out)
        assert option.strip("-") in data["others"]["sdpa"]
    assert Run(capsys, *plain, "--backward").code == 0


def test_plan_needs_no_memory_for_a_text_of_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "plan", "--length", 1 << 20, "--heads", 1, "--mask", "Causal() & Window(4096)")
    assert "query_len=1048576" in run.out
    assert "nothing quadratic" in run.out


@pytest.mark.parametrize(
    "text",
    [
        "Causal() & Window(256)",
        "Band(None, 3) | ~(Strided(8) & Chunk(512))",
        "Causal(offset=-2) & Band(-1, None, offset=[3, 4])",
        "Prefix([2, 3]) | Padding([4, 5])",
        "Document([[0, 0, 1], [0, 1, 1]]) & Document([0, 1], [0, 1, 1])",
    ],
)
def test_a_mask_is_read_as_it_prints_itself(text: str) -> None:
    assert repr(read_mask(text)) == repr(eval(text, {**vars(regard), "Document": _document}))
    if "Document" not in text:
        assert repr(read_mask(text)) == text


def _document(*ids: list[int]) -> regard.Document:
    return regard.Document(*map(torch.tensor, ids))


def test_documents_are_read_by_their_lengths_and_lists_may_be_repeated() -> None:
    read = read_mask(" Document.from_lengths([3, 2] * 2) ")
    assert read.draw(10, 10) == regard.Document.from_lengths([3, 2, 3, 2]).draw(10, 10)


def test_a_class_in_a_file_of_masks_can_be_written_down_without_further_ado():
    class EveryKey(Mask):
        """All keys at a multiple of step."""

        __module__ = "regard.masks.positional"

        def __init__(self, step):
            self.step = step

        def rule(self, batch, head, query, key):
            return key % self.step == 0

    try:
        assert read_mask("Causal() & EveryKey(3)").draw(4, 4) == "# . . .\n# . . .\n# . . .\n# . . #"
        with pytest.raises(ValueError, match="did you mean EveryKey"):
            read_mask("EveryKeys(3)")
    finally:
        del RULE_KINDS[EveryKey.kind]


NO_MASKS = {
    "Casual()": "'Casual' is no mask; did you mean Causal?",
    "Causal": "got 'Causal'; write Causal(...)",
    "Causal() and Window(3)": "expected masks joined by & | ~, got 'Causal() and Window(3)'; write & for and",
    "Causal() or Window(3)": "write | for or",
    "not Causal()": "write ~ for not",
    "Causal() + Window(3)": "expected masks joined by & | ~",
    "3": "expected masks joined by & | ~, got '3'",
    "Window()": "missing 1 required positional argument: 'w'",
    "Window(0)": "Window: w must be a whole number, 1 or more, got 0",
    "Window(True)": "expected numbers and lists of numbers, got 'True'",
    "Window(2.5)": "got '2.5'",
    "Window(2**9)": "got '2 ** 9'",
    "Window(*[3])": "got '*[3]'",
    "Window(**{'w': 3})": "got",
    "Window(width=3)": "unexpected keyword argument 'width'",
    "Window(3": "cannot be read, at character 7: '(' was never closed",
    "": "cannot be read",
    "Causal()\0": "null",
    "Where(print)": "Where cannot be written down",
    "Dense([[1]])": "Dense cannot be written down",
    "Document([0, [1]])": "Document([0, [1]])",
    "Document.from_lengths([9] * 99999999)": "more than 1,048,576 numbers",
    "Document.from_lengths([[9] * 9999] * 9999)": "more than 1,048,576 numbers",
    "__import__('os').system('false')": "is no mask",
    "Causal().__class__": "expected masks joined",
    "(lambda: Causal())()": "is no mask",
    "Window(open('x'))": "got \"open('x')\"",
    "~" * 20000 + "Causal()": "too deeply nested",
}


@pytest.mark.parametrize(("text", "words"), NO_MASKS.items(), ids=[text[:24] for text in NO_MASKS])
def test_what_is_no_mask_is_one_clear_message_and_is_never_run(text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        read_mask(text)
    assert words in str(error.value)
    assert len(str(error.value)) < 300


def test_bench_prints_the_rows_that_were_asked_for_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    measure = bench.measure

    def without_compiling(task: bench.Task, dtype: torch.dtype, **options: object) -> dict[str, object]:
        asked.append((task.label, dtype, options["repeats"]))
        return measure(task, dtype, repeats=1, memory=False)

    monkeypatch.setattr("regard.bench.report.measure", without_compiling)
    monkeypatch.setattr(
        "regard.bench.peer.FUNCTIONS", [peer for peer in bench.FUNCTIONS if peer.name != "FlexAttention"]
    )
    path = tmp_path / "numbers.json"
    run = Run(capsys, "bench", "--quick", "--rows", "causal, N=64", "--output", path)
    assert run.code == 0, run.err
    assert asked == [("causal, N=64", torch.float32, 5), ("causal, N=64", torch.bfloat16, 5)]
    assert "causal, N=64, float32: regard takes its kernel" in run.out
    assert "is_causal" in run.out
    kept = json.loads(path.read_text())
    assert [row["dtype"] for row in kept["rows"]] == ["float32", "bfloat16"]
    assert kept["shrink"] == bench.QUICK_SHRINK
    printed = json.loads(Run(capsys, "bench", "--rows", "causal, N=512,*float32", "--repeats", 3, "--json").out)
    assert asked[-1] == ("causal, N=512", torch.float32, 3)
    assert [row["length"] for row in printed["rows"]] == [512]


def test_rows_go_to_standard_output_while_a_terminal_shows_how_far_it_is(tmp_path: Path) -> None:
    """As in `regard bench > rows.txt`: only standard error is a terminal."""
    program = (
        "import pty, subprocess, sys\n"
        "master, slave = pty.openpty()\n"
        "with open(sys.argv[1], 'w') as out:\n"
        "    child = subprocess.Popen([sys.executable, '-m', 'regard', *sys.argv[2:]], stdout=out, stderr=slave)\n"
        "    sys.exit(child.wait())\n"
    )
    rows = tmp_path / "rows.txt"
    arguments = ["bench", "--quick", "--rows", "causal, N=64, float32", "--repeats", "1"]
    known = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"}
    done = subprocess.run([sys.executable, "-c", program, rows, *arguments], env=known, timeout=120, check=True)
    assert done.returncode == 0
    first, *peers = rows.read_text().splitlines()
    assert first.startswith("causal, N=64, float32: regard takes its kernel")
    assert peers[0].split()[0] == "regard"


def failing(which: int, error: BaseException) -> Callable[..., dict[str, Any]]:
    """In place of `bench.measure`: a row of some numbers, but for one that fails."""
    numbers = {"regard": {"ms": 1.0, "spread": [0.9, 1.1]}}
    count = 0

    def measure(task: bench.Task, dtype: torch.dtype, **rest: object) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count == which:
            raise error
        named = {"task": task.name, "length": task.length, "dtype": bench.name_of(dtype), "kernel": "sdpa"}
        return named | {"peers": numbers, "not_measured": {}, "memory_not_measured": {}, "others": 0.0}

    return measure


def test_bench_prints_its_rows_as_json_when_one_of_them_fails_and_when_it_is_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.bench.report.measure", failing(2, RuntimeError("no room\nat all")))
    run = Run(capsys, "bench", "--quick", "--rows", "causal, N=*float32", "--json")
    data = json.loads(run.out)
    assert run.code == 2
    assert run.err.endswith(f"1 of {data['planned']} rows failed: RuntimeError: no room\n")
    assert data["failed"] == [{"row": "causal, N=128, float32", "why": "RuntimeError: no room"}]
    assert len(data["rows"]) == data["planned"] - 1
    monkeypatch.setattr("regard.bench.report.measure", failing(2, KeyboardInterrupt()))
    run = Run(capsys, "bench", "--quick", "--rows", "causal, N=*float32", "--json")
    assert run.code == 130
    assert [row["length"] for row in json.loads(run.out)["rows"]] == [64]


def test_bench_tells_which_row_of_how_many_and_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(task: bench.Task, dtype: torch.dtype, *, watch: Callable[[str], None], **rest: object) -> dict[str, Any]:
        watch("regard: the first call")
        watch("regard: 1 of 5")
        return failing(0, KeyboardInterrupt())(task, dtype)

    monkeypatch.setattr("regard.bench.report.measure", slowly)
    run = Run(capsys, "bench", "--quick", "--rows", "window*float32", "--json")
    count = json.loads(run.out)["planned"]
    told = [line for line in run.err.splitlines() if line.startswith("row ")]
    assert told[0].startswith(f"row 1 of {count}: window 256, N=")
    assert told[1].startswith(f"row 2 of {count}, under a minute left: window 256, N=")
    assert len(told) == count


def test_a_quick_bench_has_every_kind_of_row_once() -> None:
    few = bench.chosen(None, bench.QUICK_SHRINK, few=True)
    assert {task.name for task, _ in few} == {task.name for task, _ in bench.chosen(None, bench.QUICK_SHRINK)}
    assert {dtype for _, dtype in few} == {torch.float32}
    assert not any(task.sweep for task, _ in few)


COMMANDS = ["look", "explain", "generate", "translate", "train", "embed", "classify", "plan", "bench"]


@pytest.mark.parametrize("width", [40, 80, 110])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_help_fills_its_lines_at_any_width(
    command: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    out = Run(capsys, command, "--help").out
    usage, *words = "\n".join(line.strip() for line in out.split("Examples")[0].strip().splitlines()).split("\n\n")
    assert usage.startswith(f"Usage: regard {command} [OPTIONS]")
    assert len(words) >= 2
    for paragraph in words:
        for line, after in pairwise(paragraph.strip().splitlines()):
            assert len(line) + 1 + len(after.split()[0]) > width - 2, line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_words_of_a_help_have_half_of_a_line_at_least(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = Run(capsys, command, "--help").out.splitlines()
    for line in lines:
        if (found := re.match(r"│ {12,}(?=[^ │])", line)) is not None:  # where words go on that began beside an option
            assert found.end() <= 46, line


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]], ids=" ".join)
def test_a_help_loads_nothing_that_is_slow(arguments: list[str]) -> None:
    program = "import sys; from regard.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    slow = {"torch", "safetensors", "tokenizers", "accelerate"}
    if "train" not in arguments:  # where typer itself asks what is installed, to check the types of options
        slow.add("importlib.metadata")
    assert not slow & set(done.stderr.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, command, "--help")
    assert run.code == 0
    assert "Examples" in run.out
    assert f"regard {command}" in run.out
    examples = run.out.split("Examples")[1].split("╭")[0].split("\n")
    for line in filter(str.strip, examples):  # none goes on in the next line, from where it could not be copied
        assert re.match(r"   (?=\S).*\bregard ", line), line


def test_the_steps_of_the_bundled_example_are_the_layers_own() -> None:
    from regard.stepwise import three_tokens

    layer, x = three_tokens()
    torch.testing.assert_close(steps(layer, x).output, layer(x))
