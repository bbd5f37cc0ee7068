"""`regard look` and its page: served at a terminal until Ctrl-C, else written as one file."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch

import regard
from regard.cli import opening
from test_cli import TEXT, Run, model  # noqa: F401
from test_viewer_file import data_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_terminal_the_view_is_printed_and_the_page_written(model, folder, capsys):  # noqa: F811
    for _ in range(2):  # an older page is replaced
        run = Run(capsys, "look", TEXT, "--model", model, "--query", 9, "--layer", 1, "--head", 2)
        assert run.code == 0, run.err
        assert "What token 9" in run.out
        assert run.out.endswith("\nThe page: regard-look.html\nOpen it in a browser.\n")
    data = data_of((folder / "regard-look.html").read_text())
    assert data["answers"]["info"]["chosen"] == {"layer": 1, "head": 2, "query": 9}
    assert "".join(data["answers"]["tokens"][0]["texts"]) == TEXT
    assert len(data["answers"]["heads"]["heads"]) == 6


def test_the_page_goes_where_it_is_told_or_nowhere(model, folder, capsys):  # noqa: F811
    Run(capsys, "look", TEXT, "--model", model, "--page", "deep/er.html")
    assert data_of((folder / "deep" / "er.html").read_text())["heads"]
    for options in (["--no-page"], ["--json"], ["--tokens"]):
        run = Run(capsys, "look", TEXT, "--model", model, *options)
        assert run.code == 0
        assert "page" not in run.out
    assert [path.name for path in folder.iterdir()] == ["deep"]
    assert Run(capsys, "look", TEXT, "--model", model, "--page", "x.html", "--json").code == 2
    (folder / "regard-look.html").write_text("mine")
    run = Run(capsys, "look", TEXT, "--model", model)
    assert run.code == 2
    assert "regard-look.html: there is a file of that name which is no page of regard" in run.err


def test_a_recording_is_looked_at_by_its_file(model, folder, capsys):  # noqa: F811
    loaded = regard.load(model)
    with torch.inference_mode(), regard.record(loaded.model) as recording:
        loaded.model(torch.tensor([[0, 5, 6, 7]]))
    recording.save("seen.safetensors")
    run = Run(capsys, "look", "seen.safetensors", "--layer", 1, "--query", 2)
    assert run.code == 0, run.err
    assert "seen.safetensors, read by Decoder: 4 tokens" in run.out
    assert "layers.1     2" in run.out
    data = data_of((folder / "regard-look.html").read_text())
    assert (data["answers"]["info"]["chosen"]["layer"], data["answers"]["info"]["chosen"]["query"]) == (1, 2)
    assert data["answers"]["tokens"][0]["labels"] == ["0", "5", "6", "7"]
    numbers = json.loads(Run(capsys, "look", "seen.safetensors", "--json").out)
    assert len(numbers["heads"]) == 6
    for wrong in (["--layer", 9], ["--head", 9], ["--query", 4], ["--without", "0.0"]):
        assert Run(capsys, "look", "seen.safetensors", *wrong).code == 2
    Path("broken.safetensors").write_text("no")
    assert "not a recording" in Run(capsys, "look", "broken.safetensors").err


def test_a_model_of_transformers_reads_the_text_too(folder, capsys):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    loaded = regard.load()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=loaded.tokenizer.model, eos_token="<|end|>")
    tokenizer.save_pretrained(folder / "llama")
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=loaded.tokenizer.vocab_size, max_position_embeddings=64,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "llama")
    run = Run(capsys, "look", TEXT, "--model", "llama", "--page", "llama.html")
    assert run.code == 0, run.err
    assert "your text, read by llama" in run.out
    info = data_of((folder / "llama.html").read_text())["answers"]["info"]
    assert [layer["group"] for layer in info["layers"]] == [2, 2]
    assert info["total"] == len(loaded.tokenizer.encode(TEXT))


SERVED = re.compile(r"The page: (http://127\.0\.0\.1:\d+/[\w-]+/)")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_at_a_terminal_the_page_is_served_until_it_is_interrupted(model):  # noqa: F811
    pytest.importorskip("starlette")
    terminal, side = os.openpty()
    command = [sys.executable, "-m", "regard", "look", TEXT, "--model", str(model), "--theme", "dark"]
    shown = ""
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True) as process:
        try:
            os.close(side)
            until = time.monotonic() + 60
            while not (found := SERVED.search(shown)) and time.monotonic() < until:
                shown += os.read(terminal, 4096).decode()
            assert found, shown
            asked = Request(found[1] + "api/info", b"{}", {"content-type": "application/json"})
            with urlopen(asked, timeout=30) as answer:
                assert b'"generate":true' in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(terminal)
    assert "Traceback" not in shown
    assert not Path(opening.PAGE).exists()


def test_a_translation_is_two_texts_on_the_page(folder, capsys):
    run = Run(capsys, "look", "9. Juni 1987", "--model", "dates", "--layer", 1, "--head", 2, "--query", 4)
    assert run.code == 0, run.err
    assert run.out.endswith("\nThe page: regard-look.html\nOpen it in a browser.\n")
    answers = data_of((folder / "regard-look.html").read_text())["answers"]
    info = answers["info"]
    cross = [number for number, layer in enumerate(info["layers"]) if layer["cross"]]
    assert info["chosen"] == {"layer": cross[1], "head": 2, "query": 4}
    texts = {
        (of, layer): "".join(axis["texts"])
        for axis in answers["tokens"]
        for of in (axis["of"],)
        for layer in axis["layers"]
    }
    assert {texts["key", layer] for layer in cross} == {"9. Juni 1987"} == {texts["query", 0]}
    assert {texts["query", layer] for layer in cross} == {"1987-06-09"} == {texts["key", cross[0] - 1]}


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_the_page_of_a_long_recording_does_not_wait_for_its_heads_to_be_described(folder, monkeypatch, capsys):
    pytest.importorskip("starlette")
    layer = regard.MultiHeadAttention(8, 4, mask=regard.Causal())
    with torch.inference_mode(), regard.record(layer) as recording:
        layer(torch.randn(1, 1500, 8))
    recording.save("long.safetensors")
    served = []
    monkeypatch.setattr(opening, "is_served", lambda path: path is None)
    monkeypatch.setattr(opening, "open_page", lambda run, path: served.append((run.summary, path)))
    run = Run(capsys, "look", "long.safetensors")
    assert run.code == 0, run.err
    assert run.out.endswith("1,500 tokens\n\nWhat each head does is worked out while the page is open.\n")
    assert served == [(None, None)]
    assert "layer      head  kind" in Run(capsys, "look", "long.safetensors", "--no-page").out
