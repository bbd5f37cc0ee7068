"""The page in a real Chromium: what it shows is what the model has, number for number."""

import csv
import io
import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import regard
from browsing import at_rest, browsing, opened, pixel_of, shows, state_of
from regard import Causal, Document, Window

pytest.importorskip("starlette", reason="the page needs the extra regard[view]")

from regard.viewer.bundle import sources
from regard.viewer.notebook import run_of
from regard.viewer.session import Session
from regard.viewer.texts import of_ids
from viewing import bundled_session, observed_session, served  # after the skip: it imports the server

STATIC = Path(regard.__file__).parent / "viewer" / "static"


@pytest.fixture(scope="module")
def browser():
    with browsing() as one:
        yield one


@pytest.fixture(scope="module")
def bundled():
    """(session, address) of the bundled model on a real file."""
    session = bundled_session()
    with served(session) as address:
        yield session, address


@pytest.fixture(scope="module")
def random():
    """(session, address, observation in float64) of one random call: grouped heads, a window, several documents."""
    documents = torch.arange(600).div(250, rounding_mode="floor")[None]
    session, exact = observed_session(600, mask=Causal() & (Window(300) | Document(documents)), softcap=20.0)
    with served(session) as address:
        yield session, address, exact


def code_of(weight):
    return 0 if weight == 0 else min(65535, max(1, round(65535 + 2048 * math.log2(weight))))


def shown_numbers(page, selector, name="value"):
    """The numbers behind what is written, of what can be seen."""
    found = page.locator(f"{selector}:visible").evaluate_all(f"all => all.map((one) => one.dataset.{name})")
    return [float(text) for text in found]


# ---- the modules by themselves


def test_each_module_is_plain_javascript_that_the_page_loads_and_the_page_stays_small():
    sizes = {}
    for entry in ("main.js", "saved.js", "widget.js"):
        todo, seen = [entry], {}
        while todo:
            name = todo.pop()
            if name not in seen:
                seen[name] = sources()[name]
                todo += re.findall(r"from '\./([\w.]+)';", seen[name])
        sizes[entry] = sum(len(text.encode()) for text in seen.values())
        print(f"{entry} and what it imports: {sizes[entry]:,} bytes as served")
    assert sizes["main.js"] <= 120_000
    assert sizes["widget.js"] <= 120_000
    assert not any(re.search(r"^\s*//", source, re.MULTILINE) for source in sources().values())
    for path in STATIC.glob("*.js"):
        source = path.read_text(encoding="utf-8")
        assert source.startswith("// "), f"{path.name} begins with a sentence that says what it is for"
        assert len(source.splitlines()) <= 500, path.name
        assert not re.search(r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval)\b", source), path.name
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source), path.name


def test_colour_maps_change_evenly_in_lightness_and_a_masked_weight_is_none_of_their_colours(browser, bundled):
    with opened(browser, bundled[1]) as page:
        maps = page.evaluate("""async () => {
            const { colourAt, colourTable } = await import('./static/color.js');
            const parts = Array.from({ length: 64 }, (_, i) => i / 63);
            const maps = {};
            for (const [name, dark] of [['weight', true], ['weight', false], ['text', true]])
                maps[`${name} ${dark}`] = parts.map((part) => colourAt(name, dark, part));
            const table = colourTable({ map: 'weight', dark: false, low: 1000, high: 60000, log: true });
            const at = (code) => [table[code] & 255, (table[code] >> 8) & 255, (table[code] >> 16) & 255];
            return { maps, hidden: at(0), low: at(1), atLow: at(1000), high: at(60000), above: at(65535) };
        }""")

    def lightness(colour):
        linear = [c / 12.92 if (c := v / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for v in colour]
        light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        return 116 * light ** (1 / 3) - 16 if light > 216 / 24389 else light * 24389 / 27

    for name, colours in maps["maps"].items():
        light = [lightness(colour) for colour in colours]
        steps = [b - a for a, b in pairwise(light)]
        assert all(step > 0 for step in steps) or all(step < 0 for step in steps), name
        assert max(map(abs, steps)) < 3.5 * abs(light[-1] - light[0]) / 63, name
        assert all(max(c) - min(c) > 2 for c in colours), f"{name}: no colour is a neutral grey"
    assert len(set(maps["hidden"])) == 1, "what the mask hides is a neutral grey"
    assert maps["low"] == maps["atLow"]
    assert maps["high"] == maps["above"]


# ---- heads and the map


def test_every_head_has_its_picture_and_a_click_opens_it(browser, bundled):
    session, address = bundled
    with opened(browser, address) as page:
        assert page.locator(".thumb").count() == 36
        meta, data = session.handle("thumbs", {"layer": 3, "size": 64})
        codes = torch.frombuffer(bytearray(data), dtype=torch.uint16).view(6, meta["rows"], meta["columns"])[2]
        drawn = page.evaluate("""() => {
            const canvas = document.querySelector('[data-head="3.2"] canvas');
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const grey = (i) => data[i] === data[i + 1] && data[i] === data[i + 2];
            return Array.from({ length: data.length / 4 }, (_, i) => grey(4 * i));
        }""")
        assert torch.equal(torch.tensor(drawn), codes.view(-1).int() == 0), "grey where the mask hides, and only there"
        page.click('[data-head="3.2"]')
        at_rest(page)
        assert page.inner_text("#map-title") == "Layer 3, head 2"
        assert "layer=3&head=2" in page.evaluate("new Promise((done) => setTimeout(() => done(location.hash), 300))")
        page.get_by_label("Kind").select_option("induction")
        at_rest(page)
        kinds = {(h["layer"], h["head"]): h["kind"] for h in session.handle("heads", {})[0]["heads"]}
        shown = page.locator(".thumb").evaluate_all("all => all.map((one) => one.dataset.head)")
        assert {tuple(map(int, name.split("."))) for name in shown} == {h for h, k in kinds.items() if k == "induction"}
        page.get_by_label("Order").select_option("entropy")
        at_rest(page)
        assert len(shown) == page.locator(".thumb").count() > 1


def test_a_pixel_of_the_map_is_the_colour_of_the_exact_weight(browser, random):
    _, address, exact = random
    weights = exact.weights()[0, 1]
    with opened(browser, f"{address}#layer=0&head=1&at=200,205,24", theme="dark") as page:
        for query, key in ((206, 206), (212, 203), (214, 200), (208, 204)):
            found = pixel_of(page, query, key)
            assert found["level"] == 0
            assert abs(found["code"] - code_of(float(weights[query, key]))) <= 1
            assert found["shown"] == found["table"]
        hidden = pixel_of(page, 206, 213)
        assert (hidden["code"], len(set(hidden["shown"]))) == (0, 1)
        page.get_by_label("Zoom to single weights").click()
        page.get_by_label("Show the whole map").click()
        at_rest(page)
        whole = pixel_of(page, 300, 290)
        cell = 2 ** whole["level"]
        rows, columns = 300 // cell * cell, 290 // cell * cell
        largest = float(weights[rows : rows + cell, columns : columns + cell].max())
        assert abs(whole["code"] - code_of(largest)) <= 1


def test_scales_show_the_weight_the_mean_and_the_weight_relative_to_an_even_share(browser, random):
    _, address, exact = random
    weights, visible = exact.weights()[0, 0], exact.visible()[0, 0]
    with opened(browser, f"{address}#layer=0&head=0") as page:
        page.get_by_label("Cells show").select_option("mean")
        at_rest(page)
        found = pixel_of(page, 400, 390)
        cell = 2 ** found["level"]
        assert cell > 1
        rows, columns = 400 // cell * cell, 390 // cell * cell
        mass = float(weights[rows : rows + cell, columns : columns + cell].sum(1).mean())
        assert abs(found["code"] - code_of(mass)) <= 1
        looks = page.evaluate(
            """async ([weight, visible]) => {
                const { shownCode } = await import('./static/look.js');
                const { codeOf } = await import('./static/offline.js');
                const entry = { pool: 'max', level: 0 };
                const code = codeOf(weight);
                const even = shownCode(code, 0, entry, { scale: 'uniform', visible: () => Math.log2(visible) });
                const mean = shownCode(code, 0, { pool: 'mean', level: 3 }, { scale: 'log' });
                return { even: 2 ** ((even - 32768) / 1024), mean: code - mean };
            }""",
            [float(weights[400, 390]), int(visible[400])],
        )
        assert looks["even"] == pytest.approx(float(weights[400, 390]) * int(visible[400]), rel=2e-3)
        assert looks["mean"] == 3 * 2048
        before = page.locator(".ends").inner_text()
        page.get_by_label("Scale").select_option("uniform")
        at_rest(page)
        page.wait_for_timeout(200)
        assert "×" in page.locator(".ends").inner_text() != before
        page.get_by_label("Hide first token").check()
        assert state_of(page)["hide"] is True


def test_a_range_of_colours_can_be_chosen_and_is_in_the_link(browser, random):
    _, address, exact = random
    weights = exact.weights()[0, 1]
    with opened(browser, f"{address}#layer=0&head=1&at=560,560,20&range=40001.5,60000") as page:
        seen = pixel_of(page, 570, 565)
        assert seen["shown"] == seen["table"]
        assert abs(seen["code"] - code_of(float(weights[570, 565]))) <= 1
        sliders = page.locator(".legend input[type=range]")
        assert sliders.evaluate_all("all => all.map((one) => one.valueAsNumber)") == [40002, 60000]
        assert page.locator(".legend .ends").inner_text().split() == ["1.8·10⁻⁴", "0.15"]
        page.get_by_label("Weight of the last colour").press("ArrowLeft")
        low, high = state_of(page)["range"]
        assert 40001 <= low < high < 60000
        assert pixel_of(page, 570, 565)["table"] != seen["table"]
        page.wait_for_timeout(300)
        assert re.search(r"range=40002,5\d{4}", page.url)
        page.get_by_label("Automatic range").check()
        assert state_of(page)["range"] is None
        assert not sliders.first.is_visible()
        page.get_by_label("Scale").select_option("uniform")
        page.get_by_label("Automatic range").uncheck()
        page.get_by_label("Weight of the first colour").press("ArrowLeft")
        low, high = state_of(page)["range"]
        assert low + high == 65536  # as far below an even share as above it


def test_each_row_of_a_batch_has_its_own_weights_and_tokens(browser):
    query, key = torch.randn(2, 3, 2, 30, 8, generator=torch.Generator().manual_seed(5))
    seen = regard.observe(query, key, mask=Causal())
    run = run_of(seen)
    texts = tuple(of_ids([100 * row + n for n in range(30)]) for row in range(3))
    run.texts = dict.fromkeys(run.layers, texts)
    with served(Session([run])) as address, opened(browser, f"{address}#batch=2&layer=0&head=1&query=20") as page:
        for row in (2, 0):
            assert page.get_by_label("Row", exact=True).input_value() == str(row)
            weights = seen.weights()[row, 1]
            for place in ((20, 3), (29, 28)):
                assert abs(pixel_of(page, *place)["code"] - code_of(float(weights[place]))) <= 1
            best = int(weights[20].argmax())
            assert page.locator(".text-panel tbody .plain").first.inner_text() == str(100 * row + best)
            assert page.locator(f".text [data-token='{best}']").inner_text().strip() == str(100 * row + best)
            page.get_by_label("Row", exact=True).select_option("0")
            at_rest(page)
        assert "batch" not in page.url


def test_the_pointer_reads_tokens_and_the_exact_weight(browser, random):
    _, address, exact = random
    with opened(browser, f"{address}#layer=0&head=1&at=200,205,24") as page:
        canvas = page.locator(".map canvas")
        place = pixel_of(page, 212, 203)
        canvas.hover(position={"x": place["x"], "y": place["y"]})
        page.locator(".readout b[data-weight]").wait_for()
        at_rest(page)
        shown = float(page.locator(".readout b").get_attribute("data-weight"))
        assert shown == pytest.approx(float(exact.weights()[0, 1, 212, 203]), rel=1e-6)
        masked = pixel_of(page, 206, 213)
        canvas.hover(position={"x": masked["x"], "y": masked["y"]})
        page.get_by_text("the mask hides it").wait_for()
        canvas.click(position={"x": place["x"], "y": place["y"]})
        at_rest(page)
        assert (state_of(page)["query"], state_of(page)["key"]) == (212, 203)


def test_the_map_can_be_moved_by_mouse_wheel_fingers_and_keys(browser, random):
    _, address, exact = random
    with opened(browser, f"{address}#layer=0&head=1", has_touch=True) as page:
        canvas = page.locator(".map canvas")
        box = canvas.bounding_box()
        middle = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        page.mouse.move(middle["x"], middle["y"])
        page.mouse.wheel(0, -960)
        at_rest(page)
        near = state_of(page)["at"]
        assert near[2] > 4
        page.mouse.down()
        page.mouse.move(middle["x"] - 60, middle["y"] - 30, steps=4)
        page.mouse.up()
        at_rest(page)
        moved = state_of(page)["at"]
        assert moved[0] - near[0] == pytest.approx(60 / near[2], rel=0.15)
        assert state_of(page)["key"] is None, "a drag chooses nothing"
        touch = page.context.new_cdp_session(page)

        def fingers(kind, *xs):
            points = [{"x": middle["x"] + x, "y": middle["y"], "id": i} for i, x in enumerate(xs)]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        fingers("touchStart", -40, 40)
        fingers("touchMove", -60, 60)
        fingers("touchMove", -80, 80)
        fingers("touchEnd")
        at_rest(page)
        assert state_of(page)["at"][2] == pytest.approx(min(64, 2 * moved[2]), rel=0.05)
        canvas.focus()
        page.keyboard.press("0")
        assert state_of(page)["at"] is None
        page.keyboard.press("Escape")
        for key in ("+", "+", "+", "+", "+", "+", "ArrowDown"):
            page.keyboard.press(key)
        first = state_of(page)
        for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "ArrowRight", "PageUp", "PageDown"):
            page.keyboard.press(key)
        at_rest(page)
        state = state_of(page)
        assert (state["query"], state["key"]) == (first["query"] + 2, first["key"])
        weight = float(exact.weights()[0, 1, state["query"], state["key"]])
        said = page.locator("[aria-live=polite]").inner_text()
        assert f"({state['query']})" in said
        shown = float(page.locator(".readout b").get_attribute("data-weight"))
        assert shown == pytest.approx(weight, rel=1e-6)
        page.keyboard.press("Shift+ArrowRight")
        assert state_of(page)["at"][0] > state["at"][0]
        page.keyboard.press("Enter")
        at_rest(page)
        assert page.evaluate("document.activeElement.dataset.tab") == "steps"


def test_what_a_row_adds_up_to_is_said_with_its_sink(browser):
    session, exact = observed_session(30, sink=torch.tensor([9.0, 9.0]))
    assert float(exact.weights()[0, 0, 20].sum()) < 0.95
    with served(session) as address, opened(browser, address) as page:
        assert "a row’s weights and the sink’s add up to 1" in page.locator(".map-panel .about").inner_text()


def test_a_token_is_found_by_its_words(browser, bundled):
    session, address = bundled
    matches = session.handle("search", {"of": "key", "text": "overdue"})[0]["matches"]
    with opened(browser, address) as page:
        field = page.get_by_label("Find a token in the text")
        field.fill("overdue")
        field.press("Enter")
        at_rest(page)
        assert state_of(page)["query"] == matches[0][0]
        page.get_by_label("Next match").click()
        at_rest(page)
        assert state_of(page)["query"] == matches[1][0]
        assert f"2 of {len(matches)}" in page.locator(".map-panel").inner_text()
        field.fill("no such words")
        field.press("Enter")
        page.get_by_text("not found").wait_for()


# ---- the text


def test_a_clicked_token_shows_whom_it_looks_at_and_who_looks_at_it(browser, bundled):
    session, address = bundled
    with opened(browser, f"{address}#layer=3&head=1") as page:
        page.locator('.text [data-token="200"]').click()
        at_rest(page)
        row = torch.frombuffer(
            bytearray(session.handle("row", {"heads": [[3, 1]], "query": 200})[1]), dtype=torch.float32
        )
        best = row.topk(8)
        listed = page.locator(".text-panel table tbody tr")
        assert listed.count() == 8
        places = [int(text.split()[-1]) for text in listed.locator("th").all_inner_texts()]
        assert places == best.indices.tolist()
        first = page.locator(f'.text [data-token="{places[0]}"]')
        assert first.evaluate("one => one.style.background") != ""
        page.get_by_role("button", name="Looked at by").click()
        page.locator('.text [data-token="100"]').click()
        at_rest(page)
        column = session.handle("column", {"heads": [[3, 1]], "key": 100})[1]
        best = torch.frombuffer(bytearray(column), dtype=torch.float32).topk(8).indices.tolist()
        assert [int(text.split()[-1]) for text in listed.locator("th").all_inner_texts()] == best
        page.locator(".text-panel").get_by_label("Heads", exact=True).select_option("all")
        at_rest(page)
        assert "the mean of 36 heads" in page.locator(".text-panel .about").inner_text()
        page.locator('.text [data-token="100"]').focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        at_rest(page)
        assert state_of(page)["key"] == 101


def test_arcs_and_columns_show_the_same_weights(browser, bundled):
    session, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&query=60&arcs=1&span=40,60&tab=columns") as page:
        assert page.locator(".arcs .side").first.locator("button").count() == 21
        inked = (
            "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data].some(Boolean)"
        )
        assert page.locator(".arcs canvas").evaluate(inked)
        page.locator(".arcs .side button").first.click()
        at_rest(page)
        assert state_of(page)["query"] == 40
        shows(page, query=60)
        cells = page.locator(".more table tbody tr")
        assert page.locator(".more thead th").count() == 37
        heads = [[layer, head] for layer in range(6) for head in range(6)]
        rows = torch.frombuffer(bytearray(session.handle("row", {"heads": heads, "query": 60})[1]), dtype=torch.float32)
        rows = rows.view(36, -1)
        for line in cells.all()[:5]:
            key = int(line.locator("th").inner_text().split()[0])
            shown = [float(text) if text else 0.0 for text in line.locator("td").all_inner_texts()]
            exact = torch.where(rows[:, key] >= 0.005, rows[:, key], 0.0)
            assert torch.allclose(torch.tensor(shown), exact, atol=0.0051)


def test_a_token_shows_as_text_whatever_it_holds(browser):
    hostile = '</script><b onclick="x()">x</b> & "quoted" \x00\u202e\ud7ff {{}}\n'
    with (
        served(bundled_session(hostile, '<img src="x" onerror="fail()">')) as address,
        opened(browser, address) as page,
    ):
        assert page.locator("b[onclick]").count() == page.locator("img").count() == 0
        text = page.locator(".text").inner_text()
        assert "<b" in text
        assert "\u202e" not in text
        assert "<202E>" in text
        assert '<img src="x"' in page.locator(".what").inner_text()


def test_a_character_of_several_tokens_is_written_once(browser):
    with served(bundled_session("x = 夜")) as address, opened(browser, address) as page:
        parts = page.locator(".text").inner_text().replace("夜", "", 1)
        assert "夜" not in parts
        assert " 2/3 3/3" in parts


# ---- one token, step by step


@pytest.mark.parametrize("width", [1280, 390])
def test_a_blank_token_is_seen_in_the_tables(browser, width):
    text = "x 1  2 3   4 5\n\n    if a ? b : c\n" * 8
    with served(bundled_session(text)) as address, opened(browser, address, width=width) as page:
        shows(page, tab="steps", query=34)
        seen = page.evaluate("""() => [...document.querySelectorAll('.regard th.word button')].map((button) => {
            const sign = button.firstElementChild ?? button;
            const [box, cell] = [sign, button.closest('th')].map((one) => one.getBoundingClientRect());
            const inside = cell.left <= box.left && box.right <= cell.right && cell.top <= box.top;
            const colour = getComputedStyle(sign).backgroundColor;
            return { text: button.textContent, inside, width: box.width, colour };
        })""")
        blank = [one for one in seen if not one["text"].strip("↵ ")]
        assert len(blank) >= 6
        assert len({one["colour"] for one in seen} - {"rgba(0, 0, 0, 0)"}) == 1
        for one in seen:
            assert one["colour"] != "rgba(0, 0, 0, 0)", one
            assert one["inside"], one
            assert one["width"] >= 6, one


def test_a_chosen_token_and_the_numbers_of_an_axis_do_not_cover_each_other(browser, random):
    with opened(browser, random[1]) as page:
        page.evaluate("""() => {
            const drawn = (window.drawn = []);
            const plain = (window.plainFillText = CanvasRenderingContext2D.prototype.fillText);
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                const [{ e, f }, { width }] = [this.getTransform(), this.measureText(text)];
                const [left, top] = [e / devicePixelRatio, f / devicePixelRatio];
                if (this.canvas.closest('.map')) drawn.push({ text: String(text), left, top, x, y, width });
                plain.call(this, text, x, y);
            };
        }""")
        try:
            for key in (200, 203, 211, 90, 0):
                page.evaluate("() => void (window.drawn.length = 0)")
                shows(page, query=599, key=key)
                drawn = page.evaluate("() => window.drawn")
                (label,) = [one for one in drawn if one["text"] == str(key) and one["x"] == 6][-1:]
                above = [one for one in drawn if one["x"] != 6 and one["y"] < label["top"] and one["text"].isdigit()]
                assert len({one["text"] for one in above}) >= 3
                for one in above:
                    centre = one["x"] if one["text"] != "0" else one["x"] + one["width"] / 2
                    assert abs(centre - label["left"]) >= 8 + one["width"] / 2, (label, one)
        finally:
            page.evaluate("() => void (CanvasRenderingContext2D.prototype.fillText = window.plainFillText)")


def test_the_table_of_steps_holds_the_numbers_of_float64(browser, random):
    _, address, exact = random
    with opened(browser, f"{address}#layer=0&head=1&query=400") as page:
        keys = [int(text.split()[0]) for text in page.locator(".more tbody th").all_inner_texts()[:16]]
        weights = exact.weights()[0, 1, 400]
        assert set(keys) == set(weights.topk(16).indices.tolist())
        shown = torch.tensor(shown_numbers(page, '.more td[data-step="softmax"]'), dtype=torch.float64)
        assert torch.allclose(shown, weights[keys], rtol=1e-6, atol=1e-12)
        raw = exact.query[0, 1, 400] @ exact.key[0, 0, keys].T
        score = torch.tensor(shown_numbers(page, '.more td[data-step="score"]'), dtype=torch.float64)
        assert torch.allclose(score, raw, rtol=1e-6)
        capped = torch.tensor(shown_numbers(page, '.more td[data-step="cap"]'), dtype=torch.float64)
        assert torch.allclose(capped, 20 * torch.tanh(raw / 4 / 20), rtol=1e-6)
        page.get_by_label("keys shown").fill("3")
        page.keyboard.press("Tab")
        at_rest(page)
        assert page.locator('.more td[data-step="softmax"]').count() == 3
        shows(page, key=599)
        shows(page, key=10)
        assert page.locator(".more tr.chosen th").first.inner_text().split()[0] == "10"


def test_the_output_is_that_of_the_model_and_the_difference_is_printed(browser, bundled):
    _, address = bundled
    with opened(browser, f"{address}#layer=4&head=2&query=77") as page:
        difference = shown_numbers(page, ".more b[data-difference]", "difference")
        assert len(difference) == 1
        assert 0 <= difference[0] < 1e-4
        partial = shown_numbers(page, '.more td[data-step="partial"]')
        assert len(partial) == 6 * 16
        assert len(shown_numbers(page, '.more td[data-step="output"]')) == 6


def test_a_number_of_the_example_can_be_changed_and_every_step_follows(browser, bundled):
    _, address = bundled
    with opened(browser, f"{address}#tab=example") as page:
        before = shown_numbers(page, '.more td[data-step="softmax"]')
        output = shown_numbers(page, '.more td[data-step="weigh"]')
        assert torch.allclose(
            torch.tensor(output).view(3, 3), regard.steps(*regard.stepwise.three_tokens())["weigh"].tensor[0, 0]
        )
        page.get_by_label("x, row 0, column 0").fill("2.5")
        page.wait_for_timeout(200)
        at_rest(page)
        layer, x = regard.stepwise.three_tokens()
        x[0, 0, 0] = 2.5
        exact = regard.steps(layer.double(), x.double())
        after = shown_numbers(page, '.more td[data-step="softmax"]')
        assert after != before
        assert torch.allclose(
            torch.tensor(after, dtype=torch.float64).view(3, 3), exact["softmax"].tensor[0, 0], atol=1e-6
        )
        page.get_by_label("Causal").check()
        at_rest(page)
        assert shown_numbers(page, '.more td[data-step="softmax"]')[1] == 0
        by_hand = page.evaluate("""async () => {
            const { threeTokens } = await import('./static/byhand.js');
            const app = document.getElementById('regard').page.app;
            const { meta } = await app.call('example', {});
            const x = meta.x.map((row) => [...row]);
            x[0][0] = 2.5;
            return threeTokens(meta, { x }).steps.find((step) => step.name === 'softmax').numbers;
        }""")
        assert torch.allclose(
            torch.tensor(by_hand, dtype=torch.float64).view(3, 3), exact["softmax"].tensor[0, 0], atol=1e-12
        )


# ---- changes, comparison


def test_a_head_that_is_off_changes_the_guesses_as_an_intervention_does(browser, bundled):
    session, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&query=300&tab=change") as page:
        page.get_by_role("button", name="Add").click()
        page.locator(".more td[data-after]").first.wait_for()
        page.get_by_label("do", exact=True).select_option("x")
        page.get_by_label("Head", exact=True).fill("3")
        page.get_by_role("button", name="Add").click()
        page.wait_for_timeout(300)
        at_rest(page)
        page.locator(".more td[data-after]").first.wait_for()
        assert state_of(page)["changes"] == [
            {"layer": 5, "head": 0, "what": "o", "value": None}, {"layer": 5, "head": 3, "what": "x", "value": 0.5},
        ]  # fmt: skip
        loaded = regard.load()
        ids = torch.tensor([session.handle("tokens", {"of": "query", "start": 0, "stop": 482})[0]["ids"]])
        with torch.inference_mode():
            was = loaded.model(ids)[0, 300].softmax(-1)
            with regard.recording.intervene(
                loaded.model, regard.Ablate("layers.5", 0), regard.Scale("layers.5", 3, 0.5)
            ):
                now = loaded.model(ids)[0, 300].softmax(-1)
        shown = sorted(shown_numbers(page, ".more td[data-before]", "before"), reverse=True)[:10]
        assert torch.allclose(torch.tensor(shown), was.topk(10).values, atol=1e-4)
        shown = sorted(shown_numbers(page, ".more td[data-after]", "after"), reverse=True)[:10]
        assert torch.allclose(torch.tensor(shown), now.topk(10).values, atol=1e-4)
        assert page.locator('[data-head="5.0"]').get_attribute("aria-label").endswith("switched off")
        page.get_by_label("Undo 5.0 off").click()
        at_rest(page)
        assert len(state_of(page)["changes"]) == 1


def test_what_a_change_does_fits_a_telephone(browser, bundled):
    _, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&query=300&tab=change&changes=5.0o", width=390) as page:
        page.locator(".more td[data-loss]").first.wait_for()
        rooms = page.evaluate("""() => [...document.querySelectorAll('.more .cols .scroll')].map(
            (one) => one.scrollWidth - one.clientWidth)""")
        assert rooms == [0, 0]


@pytest.mark.parametrize("typed", ["3.5", "-1", "482", ""])
def test_only_a_token_of_the_text_can_be_hidden(browser, bundled, typed):
    _, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&query=300&tab=change") as page:
        page.get_by_label("do", exact=True).select_option("k")
        page.get_by_label("Factor, or token").fill(typed)
        page.get_by_role("button", name="Add").click()
        page.get_by_text(f"{typed or 'Nothing'} is no token of this text").wait_for()
        assert state_of(page)["changes"] == []
        page.get_by_role("button", name="Close").click()


def test_two_heads_side_by_side_say_how_far_apart_they_are(browser, random):
    _, address, exact = random
    with opened(browser, f"{address}#layer=0&head=0&tab=compare") as page:
        page.get_by_label("Compare with").select_option("0.1")
        page.locator(".more b[data-distance]").first.wait_for()
        one, other = exact.weights()[0, 0], exact.weights()[0, 1]
        variation = page.locator('.more b[data-distance="variation"]').get_attribute("data-value")
        assert float(variation) == pytest.approx(float((one - other).abs().sum(1).mean() / 2), rel=1e-4)
        assert page.locator(".more canvas.square").count() == 2


# ---- opening, continuing, stopping


def test_a_typed_text_is_read_and_shown(browser, bundled):
    with served(bundled_session("def first():\n    pass\n", "first.py")) as address, opened(browser, address) as page:
        page.get_by_role("button", name="Open…").click()
        names = page.get_by_label("Model").locator("option").all_inner_texts()
        assert names == page.evaluate("document.getElementById('regard').page.app.info.models")
        assert names[0] == "stdlib"
        page.get_by_label("Text or code").fill("def second(a, b):\n    return a + b\n\n\ndef third(self, ")
        page.get_by_role("button", name="Read", exact=True).click()
        page.locator(".what", has_text="typed text").wait_for()
        at_rest(page)
        assert "return a + b" in page.locator(".text").inner_text().replace("↵", "")
        read = page.locator(".text .t").count()
        page.get_by_role("button", name="Continue…").click()
        page.get_by_label("Tokens", exact=True).fill("5")
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Write").click()
        page.locator(".working").wait_for(state="hidden")
        at_rest(page)
        growing, length = page.evaluate(
            "() => { const { info, layer } = document.getElementById('regard').page.app; "
            "return [info.growing, layer.query_len]; }"
        )
        assert growing is False
        assert read < page.locator(".text .t").count() == length <= read + 5
        page.get_by_label("Run", exact=True).select_option(index=0)
        at_rest(page)
        assert "first.py" in page.inner_text(".what")


def test_writing_shows_tokens_as_they_come_and_can_be_stopped(browser):
    with (
        served(bundled_session("class Desk:\n    def first(self, ", "first.py")) as address,
        opened(browser, address) as page,
    ):
        before = page.locator(".text .t").count()
        page.get_by_role("button", name="Continue…").click()
        page.get_by_label("Tokens", exact=True).fill("512")
        page.get_by_role("button", name="Write").click()
        page.locator(".text .t").nth(before).wait_for()
        assert page.locator("[role=progressbar]").is_visible()
        page.get_by_role("button", name="Stop").click()
        page.locator(".working").wait_for(state="hidden")
        at_rest(page)
        growing, length = page.evaluate(
            "() => { const { info, layer } = document.getElementById('regard').page.app; "
            "return [info.growing, layer.query_len]; }"
        )
        assert growing is False
        assert before < length < before + 512
        assert page.locator(".text .t").count() == length


# ---- links, files, sizes


def test_a_link_opens_exactly_what_was_on_screen(browser, bundled):
    _, address = bundled
    fields = {
        "layer": 4, "head": 3, "query": 120, "key": 80, "at": [60.5, 100, 18], "pool": "mean", "scale": "uniform",
        "hide": True, "text": "from", "heads": "set", "set": ["4.3", "5.0"], "arcs": True,
        "span": [70, 90], "tab": "columns", "other": ["5.1"], "sort": "score", "kind": "induction",
        "changes": [{"layer": 1, "head": 2, "what": "k", "value": 7}],
    }  # fmt: skip
    with opened(browser, address, fresh=True) as page:
        shows(page, **fields)
        page.wait_for_timeout(300)
        link = page.evaluate("location.href")
        shown = page.locator(".map canvas").evaluate("canvas => canvas.toDataURL()")
    with opened(browser, link, fresh=True) as page:
        state = state_of(page)
        assert {name: state[name] for name in fields} == fields
        page.wait_for_timeout(250)
        assert page.locator(".map canvas").evaluate("canvas => canvas.toDataURL()") == shown
        page.evaluate("location.hash = 'layer=1&head=1&query=99999&at=NaN&pool=none&tab=nowhere&changes=x'")
        at_rest(page)
        state = state_of(page)
        assert (state["layer"], state["head"], state["query"], state["pool"], state["tab"]) == (
            1,
            1,
            None,
            "max",
            "steps",
        )


def test_the_map_is_saved_as_png_svg_and_numbers(browser, bundled, tmp_path):
    session, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&at=40,100,20&query=104", accept_downloads=True) as page:
        saved = {}
        for words in ("Picture (PNG)", "Drawing (SVG)", "Numbers (CSV)"):
            page.get_by_role("button", name="Save").click()
            with page.expect_download() as waiting:
                page.get_by_role("button", name=words).click()
            saved[words] = Path(waiting.value.path()).read_bytes()
        seen = page.evaluate("document.getElementById('regard').page.app.map.seen()")
    assert saved["Picture (PNG)"].startswith(b"\x89PNG")
    drawing = saved["Drawing (SVG)"].decode()
    import xml.etree.ElementTree as ElementTree

    words = [one.text for one in ElementTree.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
    label = session.handle("tokens", {"of": "query", "start": 104, "stop": 105})[0]["labels"][0]
    assert "received" in words
    assert label.strip() in words
    lines = list(csv.DictReader(io.StringIO(saved["Numbers (CSV)"].decode())))
    (a, b), (c, d) = seen["queries"], seen["keys"]
    assert len(lines) == (b - a) * (d - c)
    exact = session.handle("sel", {"heads": [[5, 0]], "queries": [a, b], "keys": [c, d]})[1]
    weights = [float(line["weight"]) for line in lines]
    assert torch.allclose(torch.tensor(weights), torch.frombuffer(bytearray(exact), dtype=torch.float32))
    assert {int(line["query"]) for line in lines} == set(range(a, b))


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_and_everything_can_be_hit(browser, bundled, width):
    _, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&query=200&other=5.1&arcs=1", width=width) as page:
        for tab in ("steps", "columns", "change", "compare", "example"):
            shows(page, tab=tab)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, tab
            small = page.locator("button:visible, select:visible, input:visible").evaluate_all(
                "all => all.filter((one) => { const { width, height } = one.getBoundingClientRect(); "
                "return !one.closest('.arcs') && (width < 16 || height < 16); }).map((one) => one.outerHTML)"
            )
            assert small == [], tab
        for order in ("score", "entropy", "distance"):
            shows(page, sort=order)
            cut = page.locator(".thumb small").evaluate_all(
                "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
            )
            assert cut == [], order
