"""A saved page works from disk, without a network and without Python, and shows what the served one does."""

import pytest
import torch

from browsing import at_rest, browsing, opened, pixel_of, shows, state_of, tile_of
from regard import Causal, Window, observe
from regard.recording.texts import Recorded

pytest.importorskip("starlette", reason="the page needs the extra regard[view]")

from regard.viewer.run import Run
from regard.viewer.session import Session
from viewing import bundled_session, finished, floats, observed_session

PROGRAM = "def total(prices):\n    return sum(prices)\n\n\ndef mean(prices):\n    return total(prices)\n"

ROUNDED = 40
"""Codes that rounding query and key may move a weight: 2 per cent and less."""


@pytest.fixture(scope="module")
def browser():
    with browsing() as one:
        yield one


def saved(session, folder, **params):
    meta, data = finished(session, what="export", **params)
    assert meta["state"] == "done", meta["error"]
    path = folder / meta["result"]["name"]
    path.write_bytes(data)
    return path.as_uri()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(session, address) of all heads of the bundled model on a short program."""
    session = bundled_session(PROGRAM)
    return session, saved(session, tmp_path_factory.mktemp("page"), heads=None)


def codes_of(session, **place):
    _, data = session.handle("tile", place)
    return torch.frombuffer(bytearray(data), dtype=torch.uint16).int()


def test_a_saved_page_shows_the_same_tiles_offline(browser, whole):
    session, address = whole
    with opened(browser, f"{address}#layer=5&head=0&query=20&key=3", offline=True) as page:
        assert page.locator(".thumb").count() == 36
        for layer, head, pool in ((5, 0, "max"), (3, 2, "mean")):
            place = {"layer": layer, "head": head, "level": 0, "row": 0, "column": 0, "pool": pool}
            mine, theirs = torch.tensor(tile_of(page, **place)), codes_of(session, **place)
            assert torch.equal(mine == 0, theirs == 0), "what the mask hides is hidden"
            common = theirs > 65535 - 2048 * 16
            assert int((mine - theirs).abs()[common].max()) <= ROUNDED
        found = pixel_of(page, 20, 3)
        assert found["shown"] == found["table"]


def test_every_panel_of_a_saved_page_works_offline(browser, whole):
    session, address = whole
    with opened(browser, f"{address}#layer=5&head=0&query=20&key=3", offline=True) as page:
        exact = session.handle("steps", {"layer": 5, "head": 0, "query": 20, "keys": [3]})[0]
        shown = page.locator('.more td[data-step="softmax"]').evaluate_all(
            "all => all.map((one) => Number(one.dataset.value))"
        )
        assert torch.allclose(torch.tensor(shown), torch.tensor(exact["table"]["softmax"]), atol=2e-3)
        page.locator(".readout b[data-weight]").wait_for()
        weight = float(page.locator(".readout b").get_attribute("data-weight"))
        cell = session.handle("cell", {"layer": 5, "head": 0, "query": 20, "key": 3})[0]
        assert weight == pytest.approx(cell["weight"], rel=0.02)
        shows(page, tab="compare", other=["5.1"])
        page.locator(".more b[data-distance]").first.wait_for()
        distance = page.locator('.more b[data-distance="variation"]').get_attribute("data-value")
        meta, _ = session.handle("compare", {"a": [5, 0], "b": [5, 1]})
        assert float(distance) == pytest.approx(meta["means"][1], rel=0.02)
        shows(page, tab="columns")
        assert page.locator(".more thead th:visible").count() == 37
        shows(page, tab="change")
        page.get_by_text("This needs a model that foretells").wait_for()
        shows(page, tab="example")
        page.get_by_label("x, row 0, column 0").fill("3")
        page.wait_for_timeout(200)
        at_rest(page)
        assert page.locator('.more td[data-step="project query"]').first.inner_text() != "1.000"
        shows(page, heads="all", text="from", key=4, query=None, arcs=True, tab="steps")
        column = floats(session.handle("column", {"heads": None, "key": 4})[1], 36, -1).mean(0)
        place = page.locator(".text-panel tbody tr th").first.inner_text().split()[-1]
        assert int(place) == int(column.argmax())
        assert not page.get_by_role("button", name="Open…").is_visible()
        field = page.get_by_label("Find a token in the text")
        field.fill("prices")
        field.press("Enter")
        at_rest(page)
        matches = session.handle("search", {"of": "key", "text": "prices"})[0]["matches"]
        assert state_of(page)["query"] == matches[0][0]


def test_one_long_head_is_a_small_file_with_an_exact_map(browser, tmp_path):
    session, exact = observed_session(2048, head_dim=64, heads=2, mask=Causal() & Window(900), softcap=30.0)
    address = saved(session, tmp_path, heads=[[0, 1]])
    (path,) = tmp_path.iterdir()
    print(f"a page of one head of 2,048 tokens: {path.stat().st_size / 2**20:.2f} MiB")
    assert path.stat().st_size <= 1.5e6
    with opened(browser, f"{address}#query=1500&key=1300&at=1290,1490,20", offline=True) as page:
        assert (state_of(page)["layer"], state_of(page)["head"]) == (0, 1)
        assert page.locator(".thumb").count() == 1
        weights = exact.weights(queries=slice(1500, 1501))[0, 1, 0]
        for key in (1300, 1295, 1302):
            found = pixel_of(page, 1500, key)
            assert found["code"] == pytest.approx(65535 + 2048 * float(weights[key].log2()), abs=ROUNDED)
        page.get_by_label("Show the whole map").click()
        at_rest(page)
        assert pixel_of(page, 500, 1500)["code"] == 0
        found = pixel_of(page, 1500, 1300)
        cell = 2 ** found["level"]
        block = exact.weights(
            queries=slice(1500 // cell * cell, (1500 // cell + 1) * cell),
            keys=slice(1300 // cell * cell, (1300 // cell + 1) * cell),
        )[0, 1]
        assert found["code"] == pytest.approx(65535 + 2048 * float(block.max().log2()), abs=300)


def test_a_saved_page_has_the_picture_that_was_read(browser, tmp_path):
    picture = torch.zeros(20, 30, 4, dtype=torch.uint8)
    picture[..., 1] = picture[..., 3] = 255  # green
    seen = observe(*torch.randn(2, 1, 1, 6, 4, generator=torch.Generator().manual_seed(3)))
    layer = Recorded(seen.query, seen.key, seen.scoring, patches=(2, 3))
    session = Session([Run("vision", "a picture", {"vision": layer}, picture=picture)])
    with opened(browser, saved(session, tmp_path), offline=True) as page:
        drawn = page.locator(".pictures canvas").evaluate(
            "canvas => [...canvas.getContext('2d').getImageData(2, 2, 1, 1).data]"
        )
        assert drawn[1] > drawn[2] + 20


def test_what_a_saved_page_cannot_tell_of_a_head_is_not_told_of_another(browser, tmp_path):
    bias = torch.zeros(2, 40, 40)
    bias[1] = torch.randn(40, 40, generator=torch.Generator().manual_seed(1))
    session, _ = observed_session(40, bias=bias)
    with opened(browser, saved(session, tmp_path), offline=True) as page:
        shows(page, layer=0, head=0, query=20, key=3, arcs=True)
        panels = [page.locator(".text-panel tbody tr"), page.locator(".steps li"), page.locator(".readout b")]
        panels[-1].wait_for()
        shows(page, head=1)
        page.get_by_text("no single weight can be read").wait_for()
        at_rest(page)
        assert [panel.count() for panel in panels] == [0, 0, 0]
        assert page.locator(".text [style*=background]").count() == 0
        page.get_by_role("button", name="Close").click()
