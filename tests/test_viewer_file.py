"""The page as one file and in a notebook: everything in it, nothing fetched, and the weights that follow from it."""

import base64
import html
import json
import re
import threading
import zlib

import pytest
import torch

import regard
from regard import Alibi, Causal, Dense, Prefix, Strided, Window
from regard.viewer import export as exporting
from regard.viewer import notebook
from regard.viewer.bundle import STATIC, joined, sources
from regard.viewer.export import export, save_page
from regard.viewer.session import Session
from viewing import EXAMPLE, bundled_session, finished, observed_session

HOSTILE = "</script><b>x <!-- \u2028 &amp; \x1b[2J </style>"


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


class File:
    """A file's numbers, unpacked as the page does it."""

    def __init__(self, page):
        self.data = data_of(page)

    def blob(self, number, dtype):
        return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(self.data["blobs"][number]))), dtype=dtype)

    def matrix(self, tensor):
        high, low = (self.blob(tensor[name], torch.uint8).to(torch.int32) for name in ("high", "low"))
        whole = ((high << 8 | low) << 16 >> 16).view(tensor["rows"], tensor["columns"]).double()
        return whole * self.blob(tensor["scale"], torch.float32).double()[:, None]

    def weights(self, head):
        """weight(i, j) = exp(score(i, j) - lse[i]) inside the spans."""
        query, key = self.matrix(head["q"]), self.matrix(head["k"])
        scores = head["scale"] * query @ key.T
        if head["softcap"]:
            scores = head["softcap"] * (scores / head["softcap"]).tanh()
        if head["bias"]:
            row = self.blob(head["bias"]["toeplitz"], torch.float32).double()
            scores = scores + torch.stack([row[len(query) - 1 - i :][: len(key)] for i in range(len(query))])
        spans = self.data["spans"][head["spans"]]
        start, first, stop = (self.blob(spans[name], torch.int32).tolist() for name in ("start", "first", "stop"))
        seen = torch.zeros(scores.shape, dtype=torch.bool)
        for query_number in range(len(query)):
            for n in range(start[query_number], start[query_number + 1]):
                seen[query_number, first[n] : stop[n]] = True
        lse = self.blob(head["lse"], torch.float32).double()
        return torch.where(seen, (scores - lse[:, None]).exp(), 0.0)


OF_DISTANCE = torch.randn(2, 299, generator=torch.Generator().manual_seed(1)).unfold(1, 150, 1).flip(1)
"""A bias [heads, 150, 150] that only a look at its numbers shows to be one of distances."""

CALLS = {
    "causal": {},
    "streaming": {"mask": Causal() & (Window(40) | Prefix(3))},
    "everything": {"mask": None, "key_len": 70},
    "softcap and sink": {"softcap": 3.0, "sink": torch.tensor([1.0, -2.0])},
    "alibi": {"bias": Alibi(2) + Alibi(slopes=torch.tensor([0.5, 0.1]))},
    "grouped": {"heads": 4, "kv_heads": 2},
    "every third": {"mask": Causal() & Strided(3)},
    "at random": {"mask": Dense(torch.rand(150, 150, generator=torch.Generator().manual_seed(1)) > 0.5)},
    "a table of distances": {"bias": OF_DISTANCE},
}


@pytest.mark.parametrize("scoring", CALLS.values(), ids=CALLS)
def test_the_weights_that_follow_from_a_file_are_those_of_the_call(scoring):
    session, exact = observed_session(150, **scoring)
    file = File(export(session.runs[0]))
    weights = exact.weights()[0]
    assert [head["head"] for head in file.data["heads"]] == list(range(len(weights)))
    for head, expected in zip(file.data["heads"], weights, strict=True):
        got = file.weights(head)
        assert torch.equal(got > 0, expected > 0)
        torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-7)
        if "sink" not in scoring:  # lse is that of the rounded numbers
            torch.testing.assert_close(got.sum(-1), torch.ones(len(got)).double(), rtol=2e-5, atol=0)
        entropy = file.blob(head["entropy"], torch.float32)
        torch.testing.assert_close(entropy.double(), exact.head(head["head"]).entropy()[0, 0], rtol=1e-3, atol=1e-4)
    assert "rounded to 16 bits" in file.data["answers"]["info"]["rounded"]


@pytest.mark.parametrize(
    "scoring",
    [
        {"bias": torch.randn(200, 200, generator=torch.Generator().manual_seed(1))},
        {"mask": Dense(torch.rand(200, 200, generator=torch.Generator().manual_seed(1)) > 0.5)},
    ],
    ids=["a table", "at random"],
)
def test_what_a_browser_cannot_compute_is_finished_cells(scoring, monkeypatch):
    monkeypatch.setattr(exporting, "MAX_SPANS", 200)
    session, exact = observed_session(200, **scoring)
    file = File(export(session.runs[0]))
    for head, weights in zip(file.data["heads"], exact.weights()[0], strict=True):
        assert (head["q"], head["spans"], head["codes"]["level"]) == (None, None, 0)
        codes = file.blob(head["codes"]["max"], torch.uint8).view(200, 200).double()
        assert torch.equal(codes > 0, weights > 0)
        seen = weights > 2.0**-31
        error = (codes[seen] * 256 + 128 - 65535) / 2048 - weights[seen].log2()
        assert float(error.abs().max()) <= (128 + 1) / 2048
        visible = file.blob(head["visible"], torch.float32)
        assert torch.equal(visible.double(), exact.visible()[0, 0].double())


def test_a_file_holds_everything_and_fetches_nothing():
    session = bundled_session("the cat sat on the mat " + HOSTILE)
    page = export(session.runs[0])
    (policy,) = re.findall(r'http-equiv="content-security-policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert not re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=\"(?!data:)", page)
    assert len(re.findall("</script>", page)) == 2
    assert "<b>x" not in page
    file = data_of(page)
    tokens = next(one for one in file["answers"]["tokens"] if one["of"] == "query")
    assert HOSTILE in "".join(tokens["texts"])
    assert not any("\x1b" in text for text in tokens["labels"])
    assert not any(file["answers"]["info"]["can"].values())
    assert len(file["heads"]) == 36
    assert {step["name"] for step in file["answers"]["steps"][5]} >= {"score", "mask", "softmax", "weigh"}


def test_one_long_head_and_a_whole_recording_stay_small():
    session, _ = observed_session(2048, heads=1, head_dim=64)
    seen = session.runs[0].layers["attention"]
    seen.value = torch.randn(seen.key.shape)
    one = len(export(session.runs[0]).encode())
    run = bundled_session(EXAMPLE.read_text() * 3).runs[0]
    assert run.length == 1024
    whole = len(export(run).encode())
    code = len(joined(sources(), "saved.js"))
    print(
        f"one head of 2,048 tokens with values: {one:,} bytes; 36 heads of 1,024: {whole:,}; of these, code: {code:,}"
    )
    assert one <= 1_500_000
    assert whole <= 6_000_000


def test_heads_can_be_chosen_and_too_much_is_refused(monkeypatch):
    session, _ = observed_session(100, heads=4, kv_heads=2)
    meta, page = finished(session, what="export", heads=[[0, 1], [0, 3]])
    assert meta["state"] == "done", meta["error"]
    assert meta["result"]["bytes"] == len(page)
    file = data_of(page.decode())
    assert [head["head"] for head in file["heads"]] == file["answers"]["info"]["layers"][0]["heads"] == [1, 3]
    assert [head["head"] for head in file["answers"]["heads"]["heads"]] == [1, 3]
    monkeypatch.setattr(exporting, "COARSE_NUMBERS", 1000)
    with pytest.raises(ValueError, match=r"query and key have 9,600 numbers, and one file takes at most 1,000"):
        export(session.runs[0])


def test_another_file_is_not_replaced(tmp_path):
    path = tmp_path / "notes.html"
    path.write_text("my notes")
    with pytest.raises(ValueError, match=r"notes\.html: there is a file of that name which is no page of regard"):
        save_page(path, "x")
    assert path.read_text() == "my notes"
    seen = regard.observe(*torch.randn(2, 1, 1, 4, 4))
    for _ in range(2):
        regard.viewer.write(seen, tmp_path / "page.html")
    assert data_of((tmp_path / "page.html").read_text())["format"] == "regard.page.1"


def test_the_modules_can_be_joined_and_import_nothing_from_elsewhere():
    for entry in ("main.js", "saved.js", "widget.js"):
        code = joined(sources(), entry, exports=entry == "widget.js")
        assert "import(" not in code
        assert not re.search(r"https?://", code.replace("http://www.w3.org/", ""))
    assert re.search(r"export default module_widget;\n$", code)
    assert {path.suffix for path in STATIC.iterdir()} <= {".js", ".css", ".html"}


# --- in a notebook ---


class Answered:
    """What a notebook is sent."""

    def __init__(self):
        self.messages, self.came = [], threading.Condition()

    def send(self, message, buffers):
        with self.came:
            self.messages.append((message, buffers))
            self.came.notify_all()

    def wait(self, count):
        with self.came:
            assert self.came.wait_for(lambda: len(self.messages) >= count, 20)
            return self.messages


def test_messages_get_the_answers_of_the_session_and_one_taken_back_gets_none():
    session, _ = observed_session(50)
    answered, release = Answered(), threading.Event()
    handle = session.handle
    session.handle = lambda method, params: (release.wait(20), handle(method, params))[1]
    answers = notebook._Answers(session, answered.send)
    params = {"layer": 0, "head": 0, "level": 0, "row": 0, "column": 0}
    answers.take({"id": 1, "method": "tile", "params": params})
    answers.take({"id": 2, "method": "tile", "params": params})
    answers.take({"cancel": 2})
    answers.take({"id": 3, "method": "tile", "params": {"layer": 9}})
    answers.take({"id": 4, "method": "nothing"})
    answers.take("nonsense")
    release.set()
    messages = answered.wait(3)
    assert [message["id"] for message, _ in messages] == [1, 3, 4]
    assert (messages[0][0]["meta"], messages[0][1][0]) == handle("tile", params)
    assert messages[1][0]["error"] == "tile: head must be a whole number from 0 on, got None"
    assert "no method 'nothing'" in messages[2][0]["error"]


def test_a_recording_is_viewed_live_with_anywidget_and_in_a_frame_without(monkeypatch):
    anywidget = pytest.importorskip("anywidget", reason="the extra notebook is not installed")
    model = regard.Decoder(regard.ModelConfig.preset("gpt2", layers=1, dim=8, heads=2, vocab_size=30))
    with torch.inference_mode(), regard.record(model) as recording:
        model(torch.tensor([[3, 4, 5]]))
    page = recording.view(tokens=["<b>", "cat\n", "sat"])
    assert isinstance(page, anywidget.AnyWidget)
    assert "export default module_widget" in page._esm
    monkeypatch.setattr(notebook, "find_spec", lambda name: None)
    shown = recording.view(tokens=["<b>", "cat\n", "sat"])._repr_html_()
    assert shown.startswith('<iframe sandbox="allow-scripts')
    (inside,) = re.findall(r'srcdoc="([^"]*)"', shown)
    tokens = data_of(html.unescape(inside))["answers"]["tokens"][0]
    assert (tokens["texts"], tokens["labels"]) == (["<b>", "cat\n", "sat"], ["<b>", "cat↵", "sat"])


def test_each_row_of_a_batch_has_its_tokens_and_its_file():
    model = regard.Decoder(regard.ModelConfig.preset("gpt2", layers=1, dim=8, heads=2, vocab_size=30))
    with torch.inference_mode(), regard.record(model) as recording:
        model(torch.tensor([[3, 4, 5], [7, 8, 9]]))
    run = notebook.run_of(recording)
    session = Session([run])
    for batch, ids in enumerate(([3, 4, 5], [7, 8, 9])):
        assert session.handle("tokens", {"batch": batch})[0]["ids"] == ids
        meta, page = finished(session, what="export", batch=batch)
        assert meta["state"] == "done", meta["error"]
        file = File(page.decode())
        assert file.data["answers"]["tokens"][0]["ids"] == ids
        assert file.data["answers"]["info"]["batch"] == 1
        for head in file.data["heads"]:
            expected = recording[0].head(head["head"])[batch].weights()[0, 0].double()
            torch.testing.assert_close(file.weights(head), expected, rtol=2e-3, atol=1e-6)
    assert session.handle("search", {"batch": 1, "text": "8"})[0]["matches"] == [[1, 1]]
    with pytest.raises(ValueError, match="batch must be"):
        session.handle("start", {"what": "export", "batch": 2})


def test_each_layer_has_the_tokens_that_it_read():
    torch.manual_seed(0)
    model = regard.EncoderDecoder(regard.ModelConfig(vocab_size=30, context_length=8, dim=8, layers=1, heads=2))
    with torch.inference_mode(), regard.record(model) as recording:
        model(torch.tensor([[3, 4, 5]]), torch.tensor([[7, 8, 9]]))
    session = Session([notebook.run_of(recording)])
    layers = session.handle("info", {})[0]["layers"]
    read = {
        layer["name"]: [session.handle("tokens", {"layer": n, "of": of})[0]["ids"] for of in ("query", "key")]
        for n, layer in enumerate(layers)
    }
    source, target = [3, 4, 5], [7, 8, 9]
    assert [*read.values()] == [[source, source], [target, target], [target, source]]
    assert [layer["texts"] for layer in layers] == [[0, 0], [1, 1], [1, 0]]


def test_what_is_viewed_can_be_an_observation_and_an_image_has_its_picture():
    seen = regard.observe(*torch.randn(2, 1, 2, 5, 4), mask=Causal())
    run = notebook.run_of(seen)
    assert run.names == ["attention"]
    image = torch.rand(3, 4, 6)
    run = notebook.run_of(seen, image=image)
    file = File(export(run))
    assert torch.equal(file.blob(file.data["picture"], torch.uint8).view(4, 6, 4), run.picture)
    meta, data = Session([run]).handle("picture", {})
    assert meta == {"width": 6, "height": 4}
    pixels = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(4, 6, 4)
    assert torch.equal(pixels[..., :3], (image * 255).round().to(torch.uint8).permute(1, 2, 0))
    with pytest.raises(ValueError, match=r"image must be \[height, width, 3\]"):
        notebook.run_of(seen, image=torch.rand(4, 4))
    with pytest.raises(ValueError, match="there is nothing to show"):
        regard.recording.Recording().view()
