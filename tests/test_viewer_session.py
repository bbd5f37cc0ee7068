"""What the page can do with a model: read, go on, change heads, explain a query; and how its jobs behave."""

import contextlib
import threading

import pytest
import torch
from torch.nn.functional import cross_entropy

import regard
from regard import Ablate, Causal, HideKey, MultiHeadAttention, Scale
from regard.viewer import head as heads
from regard.viewer import jobs
from regard.viewer.jobs import Job, Jobs
from regard.viewer.params import NotFoundError
from regard.viewer.run import Run, of_observation
from regard.viewer.session import METHODS, Session
from regard.viewer.texts import of_places, of_text
from viewing import ask, bundled_reader, bundled_session, finished, floats, observed_session

TEXT = "self.quillback = quillback; self.quill"


@pytest.fixture(scope="module")
def session():
    return bundled_session(TEXT)


def ids_of(session, run=0):
    return torch.tensor([ask(session, "tokens", run=run)[0]["ids"]])


def model():
    return bundled_reader().model


def test_steps_of_a_query_are_the_recorded_steps_in_float64_and_end_with_the_models_output(session):
    meta, _ = ask(session, "steps", layer=5, head=3, query=9, count=5, keys=[1, 12])
    seen = session.runs[0].layers["layers.5"].head(3)
    query, key, value = seen.query[0, 0].double(), seen.key[0, 0].double(), seen.value[0, 0].double()
    scores = query[9] @ key[:10].T * 32**-0.5
    weights = scores.softmax(-1)
    shown = [entry["key"] for entry in meta["keys"]]
    assert shown[:5] == weights.topk(5).indices.tolist()
    assert set(shown[5:]) == {1, 12} - set(shown[:5])
    visible = [n for n, key in enumerate(shown) if key < 10]
    for name, expected in (("softmax", weights), ("scale", scores), ("exp", (scores - scores.max()).exp())):
        got = torch.tensor([meta["table"][name][n] for n in visible], dtype=torch.float64)
        torch.testing.assert_close(got, expected[[shown[n] for n in visible]], rtol=1e-12, atol=1e-15)
    assert meta["table"]["mask"][shown.index(12)] is None
    assert meta["keys"][shown.index(12)]["hidden"]
    assert meta["lse"] == pytest.approx(float(scores.logsumexp(-1)), rel=1e-12)
    assert meta["held"] + meta["rest"] == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(torch.tensor(meta["output"]).double(), weights @ value[:10], rtol=1e-6, atol=1e-6)
    assert 0 < meta["difference"] < 1e-5
    assert "while it ran" in meta["own_is"]
    partial = torch.tensor(meta["partial"], dtype=torch.float64)
    torch.testing.assert_close(partial[0], weights[shown[0]] * value[shown[0]], rtol=1e-12, atol=1e-15)


def test_steps_of_a_call_with_everything_have_a_stage_for_each():
    session, exact = observed_session(
        40, mask=Causal(), softcap=3.0, bias=torch.randn(40, 40), sink=torch.tensor([0.5, -1.0])
    )
    meta, _ = ask(session, "steps", layer=0, head=1, query=20, count=40)
    names = ["query", "key", "score", "scale", "cap", "bias", "mask", "softmax"]
    assert [step["name"] for step in meta["steps"]] == names
    assert "values were not recorded" in meta["own_is"]
    weights = exact.weights()[0, 1, 20]
    got = torch.tensor(meta["table"]["softmax"], dtype=torch.float64)
    torch.testing.assert_close(got, weights[[entry["key"] for entry in meta["keys"]]], rtol=1e-12, atol=0)
    assert meta["sink"] == pytest.approx(1 - float(weights.sum()), rel=1e-9)


def test_the_example_is_the_three_tokens_until_a_number_is_changed():
    session = Session()
    meta, _ = ask(session, "example")
    assert meta["x"][1] == [0, 2, 0, 2]
    steps = {step["name"]: step["numbers"] for step in meta["steps"]}
    assert steps["score"][0] == [2, 4, 4]
    x = [[1.0, 0.5], [0.25, 2.0], [-1.0, 3.0]]
    weights = {name: [[1.0, 2.0], [0.5, -1.0]] for name in ("query", "key", "value")}
    meta, _ = ask(session, "example", x=x, **weights, causal=True, scale=0.7)
    layer = MultiHeadAttention(2, 1, output=False, projection_bias=False, scale=0.7, mask=Causal()).double()
    with torch.no_grad():
        for name, matrix in weights.items():
            layer.get_parameter(f"{name}.weight").copy_(torch.tensor(matrix).T)
    expected = layer(torch.tensor([x], dtype=torch.float64))[0]
    numbers = torch.tensor(meta["steps"][-1]["numbers"], dtype=torch.float64)
    torch.testing.assert_close(numbers, expected, rtol=1e-12, atol=0)
    assert meta["steps"][-1]["name"] == "join"
    for wrong in ({"x": [[1, 2], [3]]}, {"x": [[1] * 9] * 2}, {"query": [["a"]]}, {"x": [[1, 2, 3]] * 3}):
        with pytest.raises(ValueError, match="example: "):
            ask(session, "example", **wrong)


def test_series_are_the_statistics_of_the_observation():
    session, exact = observed_session(300, sink=torch.tensor([0.5, -1.0]))
    meta, data = ask(session, "series", layer=0, head=1)
    assert meta["ready"]
    entropy, visible, received, viewers = floats(data, 4, 300).double()
    head = exact.head(1)
    torch.testing.assert_close(entropy, head.entropy()[0, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(received, head.received()[0, 0], rtol=1e-4, atol=1e-5)
    assert visible.tolist() == list(range(1, 301))
    assert viewers.tolist() == list(range(300, 0, -1))


def test_two_heads_are_compared_query_by_query():
    session, exact = observed_session(200)
    meta, data = ask(session, "compare", a=[0, 0], b=[0, 1])
    expected = exact.head(0).compare(exact.head(1))
    got = floats(data, 3, 200).double()
    for name, row, known in zip(meta["names"], got, expected, strict=True):
        torch.testing.assert_close(row, known[0, 0], rtol=1e-3, atol=1e-5, msg=name)
    assert meta["means"][0] == pytest.approx(float(expected.divergence.mean()), rel=1e-3)


def test_while_the_pyramid_is_made_coarse_tiles_are_previews_and_then_exact():
    length = 9000
    session, exact = observed_session(length, heads=1, head_dim=8, mask=Causal() & regard.Window(700))
    meta, _ = ask(session, "tile", layer=0, head=0, level=6, row=0, column=0)
    assert (meta["exact"], meta["sampled"]) == (False, 1)
    again, _ = ask(session, "tile", layer=0, head=0, level=5, row=1, column=1)
    assert again["exact"] or again["job"] == meta["job"]
    done, _ = finished(session, what="pyramid", layer=0, head=0)
    assert done["state"] == "done"
    assert done["done"] == done["total"] == length
    meta, data = ask(session, "tile", layer=0, head=0, level=6, row=0, column=0, pool="mean")
    assert meta["exact"]
    codes = torch.frombuffer(bytearray(data), dtype=torch.uint16).view(256, 256)[: meta["rows"]].double()
    mass = torch.where(codes > 0, ((codes - 65535) / 2048).exp2(), 0.0)
    torch.testing.assert_close(mass.sum(-1), torch.ones(meta["rows"]).double(), rtol=3e-4, atol=0)
    rows = exact.head(0).weights(queries=range(128 * 64, 129 * 64))[0, 0].float()
    _, data = ask(session, "tile", layer=0, head=0, level=6, row=0, column=0)
    row = torch.frombuffer(bytearray(data), dtype=torch.uint16).view(256, 256)[128].double()
    peaks = torch.nn.functional.pad(rows, (0, -length % 64)).unflatten(1, (-1, 64)).amax((0, 2)).double()
    assert torch.equal(row[: len(peaks)] > 0, peaks > 0)
    seen = peaks > 2.0**-31
    assert float((row[: len(peaks)][seen] - 65535 - 2048 * peaks[seen].log2()).abs().max()) < 1.5
    meta, _ = ask(session, "series", layer=0, head=0)
    assert meta["ready"]


def test_a_preview_shows_what_some_queries_see(monkeypatch):
    session, exact = observed_session(1000, heads=1, head_dim=8)
    head, weights = session.runs[0].head(0, 0), exact.weights()[0, 0]
    for most, several in ((1 << 22, 1), (80_000, 2)):
        monkeypatch.setattr(heads, "MAX_PREVIEW_WEIGHTS", most)
        codes = head._sampled(8, range(1000), range(1000), "max").to(torch.int32)
        assert codes.shape == (125, 125)
        for row in (0, 7, 60, 124):
            query = min(999, row // several * several * 8 + several * 4)
            cells = weights[query].view(125, 8).amax(-1)
            assert torch.equal(codes[row] > 0, cells > 0)
            seen = cells > 2.0**-31
            assert float((codes[row][seen] - 65535 - 2048 * cells[seen].log2()).abs().max()) < 1.5


def test_thumbnails_are_exact_where_that_is_cheap_and_say_so_where_they_are_not():
    small, exact = observed_session(130, heads=3, kv_heads=1)
    meta, data = ask(small, "thumbs", layer=0, size=32)
    assert (meta["heads"], meta["exact"], meta["rows"]) == ([0, 1, 2], True, 26)
    codes = torch.frombuffer(bytearray(data), dtype=torch.uint16).view(3, 26, 26)
    largest = float(((codes[2].double() - 65535) / 2048).exp2().max())
    assert largest == pytest.approx(float(exact.weights()[0, 2].max()), 1e-3)
    large, _ = observed_session(3000, heads=1, head_dim=4)
    meta, _ = ask(large, "thumbs", layer=0)
    assert (meta["exact"], meta["sampled"]) == (False, 1)


def test_a_text_is_read_in_windows_and_its_tokens_are_its_characters(session):
    text = "def f(x):\n    return 'für 漢字 \u202e\x1b[2J' # </script><b>x\n" * 80
    meta, _ = finished(session, what="read", text=text, source="mine")
    assert meta["state"] == "done", meta["error"]
    run = meta["result"]["run"]
    info, _ = ask(session, "info", run=run)
    assert info["models"] == ["stdlib"]  # a model that translates does not read one text
    assert (info["source"], info["start"], info["opening"], info["context"]) == ("mine", 0, True, 1024)
    assert info["stop"] == 1023 < info["total"]
    first, _ = ask(session, "tokens", run=run)
    more, _ = finished(session, what="read", run=run, start=info["stop"])
    second, _ = ask(session, "tokens", run=more["result"]["run"])
    assert text.startswith("".join(first["texts"]))
    assert "".join(second["texts"]) in text
    assert len("".join(first["texts"]) + "".join(second["texts"])) <= len(text)
    assert not any(set(label) & set("\n\x1b\u202e") for label in first["labels"])
    heads, _ = ask(session, "heads", run=run)
    assert heads["complete"] or finished(session, what="summary", run=run)[0]["state"] == "done"


def test_a_model_goes_on_with_the_text_and_its_attention_is_that_of_reading_it_all(session):
    meta, _ = finished(session, what="generate", run=0, count=6, temperature=0)
    assert meta["state"] == "done", meta["error"]
    run = meta["result"]["run"]
    ids = ids_of(session, run)
    assert ids[:, : ids_of(session).shape[1]].equal(ids_of(session))
    expected = list(regard.generate(model(), ids_of(session)[0], 6, temperature=0))
    assert ids[0, -6:].tolist() == expected
    with torch.inference_mode(), regard.record(model()) as recording:
        model()(ids)
    _, data = ask(session, "row", run=run, heads=[[5, 0]], query=ids.shape[1] - 1)
    weights = recording["layers.5"].head(0).weights()[0, 0, -1]
    torch.testing.assert_close(floats(data, -1), weights, rtol=1e-4, atol=1e-6)
    assert not ask(session, "info", run=run)[0]["growing"]
    assert "".join(ask(session, "tokens", run=run)[0]["texts"]).endswith(meta["note"])


def test_changed_heads_change_what_is_expected_next_and_the_loss(session):
    ids = ids_of(session)
    query = ids.shape[1] - 4
    changes = [
        {"kind": "ablate", "layer": 5, "head": 0},
        {"kind": "scale", "layer": 5, "head": 3, "factor": -0.5},
        {"kind": "hide", "layer": 0, "head": 1, "key": 2},
    ]
    meta, data = finished(session, what="intervene", query=query, changes=changes)
    with torch.inference_mode():
        before = model()(ids)[0]
        with regard.intervene(model(), Ablate(5, 0), Scale(5, 3, -0.5), HideKey(0, 1, 2)):
            after = model()(ids)[0]
    losses = [cross_entropy(logits[:-1], ids[0, 1:], reduction="none") for logits in (before, after)]
    torch.testing.assert_close(floats(data, 2, -1), torch.stack(losses), rtol=1e-4, atol=1e-5)
    for side, logits, loss in zip(("before", "after"), (before, after), losses, strict=True):
        got, chances = meta["result"][side], logits[query].softmax(-1)
        assert [guess["id"] for guess in got["guesses"]] == chances.topk(10).indices.tolist()
        assert got["guesses"][0]["probability"] == pytest.approx(float(chances.max()), rel=1e-4)
        assert got["actual"]["probability"] == pytest.approx(float(chances[ids[0, query + 1]]), rel=1e-3)
        assert got["loss"] == pytest.approx(float(loss.mean()), rel=1e-4)
        assert got["rest"] == pytest.approx(float(loss[query + 1 :].mean()), rel=1e-4)
    assert float((losses[0] - losses[1]).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("tile", {"layer": 0, "head": 0, "level": 9, "row": 0, "column": 0}, "level must be a whole number from 0 to"),
        ("tile", {"layer": 9, "head": 0, "level": 0, "row": 0, "column": 0}, "layer must be 0 to 5, got 9"),
        ("tile", {"layer": 0, "head": 77, "level": 0, "row": 0, "column": 0}, "no head 77"),
        ("tile", {"layer": True, "head": 0}, "layer must be a whole number"),
        ("cell", {"layer": 0, "head": 0, "query": 0.5, "key": 0}, "query must be a whole number"),
        ("cell", {"layer": 0, "head": 0, "queries": [3, 3], "keys": [0, 1]}, "queries must be a pair"),
        ("sel", {"queries": [0, 10**9], "keys": [0, 1]}, "queries must be a pair"),
        ("row", {"query": 3, "heads": [[0]]}, "heads must be a list of pairs"),
        ("search", {"text": "x" * 2000}, "text must be at most 1,000 bytes, got 2,000"),
        ("start", {"what": "read", "text": "a\ud800"}, "a text that UTF-8 can hold"),
        ("start", {"what": "read", "text": "x", "model": "../../etc/passwd"}, "model must be one of"),
        ("start", {"what": "walk"}, "what must be one of"),
        ("start", {"what": "intervene", "query": 0, "changes": [{"kind": "ablate", "layer": 0, "head": 9}]}, "head"),
        ("picture", {}, "no image"),
    ],
)  # fmt: skip
def test_a_wrong_question_is_one_sentence(session, method, params, message):
    with pytest.raises(ValueError, match=message) as caught:
        ask(session, method, **params)
    assert "\n" not in str(caught.value)


def test_nothing_that_a_page_sends_is_more_than_an_error():
    session, _ = observed_session(5, head_dim=2)
    nonsense = (None, -1, 10**30, float("nan"), "x", [], {}, [1, 2], [[]], True)
    names = ("run", "layer", "head", "batch", "level", "query", "key", "heads", "text", "job", "x", "keys", "a", "what")
    for method in METHODS:
        for name in names:
            for value in nonsense:
                with contextlib.suppress(ValueError, NotFoundError):
                    ask(session, method, **{"layer": 0, "head": 0, "query": 1, "key": 1, name: value})


def test_a_text_without_its_model_cannot_be_changed():
    session, _ = observed_session(10)
    info, _ = ask(session, "info")
    assert info["can"] == {"read": False, "generate": False, "intervene": False, "export": True}
    for what in ("generate", "intervene", "read"):
        with pytest.raises(ValueError, match="model"):
            ask(session, "start", what=what, text="a", query=0, changes=[{}])


def test_a_job_can_be_stopped_fails_in_words_and_is_forgotten_by_nobody_who_asks(monkeypatch):
    works, begun = Jobs(), threading.Event()

    def endless(job: Job):
        while True:
            begun.set()
            job.progress(job.done + 1)

    job = works.start("endless", endless, key="k")
    assert works.start("endless", endless, key="k") is job
    assert begun.wait(10)
    job.stop()
    while job.seen(job.tick)["state"] == "running":
        pass
    assert job.state == "stopped"

    def fails(job: Job):
        raise ValueError("no such luck")

    failed = works.start("fails", fails)
    while failed.seen(failed.tick)["state"] == "running":
        pass
    assert (failed.state, failed.error) == ("failed", "no such luck")
    monkeypatch.setattr(jobs, "MAX_SECONDS_UNASKED", 0.0)
    forgotten = works.start("endless", endless)
    assert works.close(10)
    assert forgotten.state == "stopped"
    monkeypatch.undo()
    running = [works.start("endless", endless) for _ in range(jobs.MAX_RUNNING_JOBS)]
    with pytest.raises(RuntimeError, match="jobs are running already"):
        works.start("one more", endless)
    assert works.close(10)
    assert {job.state for job in running} == {"stopped"}
    with pytest.raises(NotFoundError):
        works.find(10**6)


def test_what_heads_do_is_worked_out_when_nobody_waits_for_anything_else():
    session, _ = observed_session(4000, heads=1, head_dim=4)
    wanted = threading.Event()

    def urgent(job: Job):
        while not wanted.is_set():
            job.progress(0)
        return {}, b""

    first = session.jobs.start("urgent", urgent)
    heads, _ = ask(session, "heads")
    assert not heads["complete"]
    summary = session.jobs.find(heads["job"])
    assert summary.seen(None)["state"] == summary.seen(summary.tick)["state"] == "running"
    assert summary.done == 0
    wanted.set()
    while summary.seen(summary.tick)["state"] == "running":
        pass
    assert (first.state, summary.state, summary.done) == ("done", "done", 1)
    assert ask(session, "heads")[0]["complete"]


def test_only_the_first_and_the_last_texts_are_kept():
    session = Session()
    seen = regard.observe(*torch.randn(2, 1, 1, 4, 4))
    numbers = [session.add(Run("m", "s", of_observation(seen))) for _ in range(12)]
    assert numbers == list(range(12))
    assert list(session.runs) == [0, *range(5, 12)]
    with pytest.raises(NotFoundError, match="no run 2 any more"):
        ask(session, "info", run=2)


def test_words_are_found_whatever_their_case_and_labels_show_what_cannot_be_seen():
    text = "Ab\nabAB\u202e"
    tokens = of_text(text, [1, 2, 3, 4], [(0, 1), (1, 3), (3, 7), (7, 8)])
    assert "".join(tokens.texts) == text
    assert tokens.labels == ["A", "b↵", "abAB", "<202E>"]
    assert tokens.search("AB") == [(0, 1), (2, 2), (2, 2)]
    assert tokens.search("") == []
    image = of_places(5, (2, 2))
    assert image.labels == ["token 0", "row 0, column 0", "row 0, column 1", "row 1, column 0", "row 1, column 1"]
    shared = of_text("é", [7, 8], [(0, 1), (0, 1)])
    assert (shared.texts, shared.labels) == (["é", ""], ["é 1/2", "é 2/2"])
