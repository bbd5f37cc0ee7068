"""The page for everybody: every panel under axe in both themes, two texts, pictures, and what lies on disk."""

import base64
import importlib.resources
import json

import pytest
import torch

from browsing import at_rest, browsing, opened, pixel_of, shows, state_of
from regard import Causal, Window, observe
from regard.recording.texts import Recorded

pytest.importorskip("starlette", reason="the page needs the extra regard[view]")

from regard.viewer.run import Run
from regard.viewer.session import Session
from regard.viewer.texts import of_text
from viewing import bundled_session, floats, observed_session, served

SERIOUS = ("serious", "critical")
PROGRAM = "def total(prices):\n    return sum(prices)\n\n\ndef mean(prices):\n    return total(prices)\n"
TABS = ("steps", "example", "columns", "change", "compare")


@pytest.fixture(scope="module")
def browser():
    with browsing() as one:
        yield one


@pytest.fixture(scope="module")
def bundled():
    session = bundled_session(
        "def total(prices):\n    return sum(prices)\n\n\ndef mean(prices):\n    return total(prices)\n"
    )
    with served(session) as address:
        yield session, address


def words(text):
    """A text whose tokens are its words."""
    spans, start = [], 0
    for word in text.split(" "):
        spans.append((start, min(len(text), start + len(word) + 1)))
        start += len(word) + 1
    return of_text(text, range(len(spans)), spans)


def recorded(query_len, key_len, *, heads=2, seed=0, scoring=None, **more):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, n, 8, generator=generator) for n in (query_len, key_len, key_len))
    seen = observe(query, key, **(scoring or {}))
    return Recorded(seen.query, seen.key, seen.scoring, seen.lse, value=value, **more)


def cross_session(source="the cat sat on the mat because it was tired"):
    german, english = words("die Katze sass auf der Matte"), words(source)
    queries, keys = len(german), len(english)
    layers = {
        "decoder.self": recorded(queries, queries, scoring={"mask": Causal()}),
        "decoder.cross": recorded(queries, keys, seed=1, cross=True),
        "encoder.self": recorded(keys, keys, seed=2),
    }
    texts = {**dict.fromkeys(("decoder.self", "decoder.cross"), (german,)), "encoder.self": [english]}
    return Session([Run("translator", "a sentence", layers, texts=texts)])


def picture_session():
    rows, columns = 4, 5
    picture = torch.zeros(40, 50, 4, dtype=torch.uint8)
    picture[..., 0] = torch.arange(50, dtype=torch.uint8) * 5
    picture[..., 3] = 255
    layers = {"vision.0": recorded(21, 21, patches=(rows, columns))}
    return Session([Run("vision", "a picture", layers, picture=picture)])


def findings(page, within="html"):
    """What axe has against a part of the page, of weight."""
    axe = importlib.resources.files("axe_playwright_python") / "axe.min.js"
    if not page.evaluate("typeof window.axe !== 'undefined'"):
        page.evaluate(axe.read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"], "preload": False}
    found = page.evaluate("([within, options]) => axe.run(within, options)", [within, options])["violations"]
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_has_nothing_serious_against_any_panel(browser, bundled, theme):
    pytest.importorskip("axe_playwright_python", reason="the page is checked by axe, of axe-playwright-python")
    _, address = bundled
    with opened(browser, f"{address}#layer=5&head=0&query=12&key=5&arcs=1&other=5.1&changes=5.0o", theme=theme) as page:
        assert page.locator("#regard").get_attribute("data-theme") == theme
        found = []
        for tab in TABS:
            shows(page, tab=tab)
            found += findings(page, within="html" if tab == "steps" else ".more")
        for name in ("Open…", "Continue…"):
            page.get_by_role("button", name=name).click()
            found += findings(page, within="dialog[open]")
            page.keyboard.press("Escape")
        page.get_by_role("button", name="Save").click()
        found += findings(page, within=".menu")
        assert found == []


def test_axe_finds_what_is_wrong(browser, bundled):
    pytest.importorskip("axe_playwright_python", reason="the page is checked by axe, of axe-playwright-python")
    with opened(browser, bundled[1], fresh=True) as page:
        page.evaluate("document.querySelector('.top .what').style.color = '#bbb'")
        page.evaluate("document.querySelector('.map canvas').removeAttribute('aria-label')")
        found = findings(page, within=".top") + findings(page, within=".map")
        assert {one.split(":")[0] for one in found} >= {"color-contrast"}


def test_the_theme_can_be_chosen_and_is_remembered(browser, bundled):
    with opened(browser, bundled[1], fresh=True) as page:
        page.get_by_label("Theme").select_option("dark")
        dark = page.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor")
        page.reload()
        at_rest(page)
        assert page.locator("#regard").get_attribute("data-theme") == "dark"
        assert page.evaluate("getComputedStyle(document.querySelector('.panel')).backgroundColor") == dark


def test_everything_is_reached_by_keyboard_alone(browser, bundled):
    with opened(browser, bundled[1], fresh=True) as page:
        stops = []
        for _ in range(60):
            page.keyboard.press("Tab")
            stops.append(
                page.evaluate("""() => {
                    const one = document.activeElement;
                    const room = one.closest('section') ?? one.closest('header');
                    return [one.tagName, one.className, room?.className ?? '', getComputedStyle(one).outlineStyle];
                }""")
            )
            if stops[-1][0] == "BODY":
                break
        reached = {stop[2].split()[-1] for stop in stops if stop[2]}
        assert {"top", "heads-panel", "map-panel", "text-panel", "more"} <= reached
        assert sum(stop[1].startswith("thumb") for stop in stops) == 1, "the pictures of heads are one stop"
        assert sum(stop[1].startswith("t ") or stop[1] == "t" for stop in stops) == 1, "so is the text"
        assert {stop[3] for stop in stops if stop[0] != "BODY"} == {"solid"}, "the focus can be seen"
        page.locator(".thumb[tabindex='0']").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        at_rest(page)
        assert (state_of(page)["layer"], state_of(page)["head"]) == (1, 1)


# ---- two texts, pictures, long texts


def test_cross_attention_is_two_texts(browser):
    session = cross_session()
    with served(session) as address, opened(browser, f"{address}#layer=1&head=0") as page:
        assert page.locator(".text").count() == 2
        page.locator(".text").first.get_by_text("Katze").click()
        at_rest(page)
        weights = floats(session.handle("row", {"heads": [[1, 0]], "query": 1})[1], 10)
        first = page.locator(".text-panel tbody tr").first
        labels = session.handle("tokens", {"layer": 1, "of": "key", "start": 0, "stop": 10})[0]["labels"]
        assert first.locator("button").inner_text().strip() == labels[int(weights.argmax())].strip()
        page.locator(".text").last.get_by_text("mat", exact=False).first.click()
        at_rest(page)
        assert state_of(page)["query"] == 1
        assert state_of(page)["key"] is not None
        assert pixel_of(page, 1, 9)["code"] > 0
        assert "cross-attention" in page.locator(".map-panel .tag").first.inner_text()
        page.locator('[data-head="0.1"]').click()
        at_rest(page)
        assert page.locator(".text").count() == 1


def test_two_texts_of_as_many_tokens_are_not_taken_for_each_other(browser):
    with served(cross_session("the cat sat on the mat")) as address, opened(browser, f"{address}#layer=1") as page:
        german, english = page.locator(".text").all_inner_texts()
        assert "Katze" in german
        assert "cat" in english
        for layer, text in ((0, german), (2, english), (0, german)):
            page.locator(f'[data-head="{layer}.0"]').click()
            at_rest(page)
            assert page.locator(".text").all_inner_texts() == [text]
        page.get_by_role("tab", name="Two heads").click()
        at_rest(page)
        others = page.get_by_label("Compare with").locator("option").all()
        assert [one.get_attribute("value") for one in others] == ["", "0.1"]


def test_patches_are_shown_on_their_picture(browser):
    session = picture_session()
    with served(session) as address, opened(browser, address) as page:
        canvas = page.locator(".pictures canvas")
        box = canvas.bounding_box()
        canvas.click(position={"x": box["width"] * 0.5, "y": box["height"] * 0.6})
        at_rest(page)
        assert state_of(page)["query"] == 1 + 2 * 5 + 2
        weights = floats(session.handle("row", {"heads": [[0, 0]], "query": 13})[1], 21)[1:]
        shades = canvas.evaluate("""canvas => Array.from({ length: 20 }, (_, i) => {
            const [x, y] = [((i % 5) + 0.5) * canvas.width / 5, (Math.floor(i / 5) + 0.5) * canvas.height / 4];
            return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3).reduce((a, b) => a + b);
        })""")
        assert int(torch.tensor(shades).argmax()) == int(weights.argmax())
        canvas.focus()
        page.keyboard.press("ArrowLeft")
        at_rest(page)
        assert state_of(page)["query"] == 12


def test_a_long_text_is_written_in_parts_and_its_map_stays_exact(browser):
    session, exact = observed_session(5000, mask=Causal() & Window(700))
    with served(session) as address, opened(browser, f"{address}#layer=0&head=0&query=4321&at=4300,4310,20") as page:
        assert page.locator(".text .t").count() == 800
        assert "of 5,000" in page.locator(".text-panel").inner_text()
        assert page.locator('.text [data-token="4321"].chosen').count() == 1
        weights = exact.weights(queries=slice(4321, 4322))[0, 0, 0]
        found = pixel_of(page, 4321, 4315)
        assert found["code"] == pytest.approx(65535 + 2048 * float(weights[4315].log2()), abs=1)
        assert found["shown"] == found["table"]
        page.get_by_role("button", name="Earlier").click()
        at_rest(page)
        assert page.locator('.text [data-token="4321"]').count() == 0
        page.get_by_label("Show the whole map").click()
        at_rest(page)
        whole = pixel_of(page, 2500, 2400)
        assert whole["level"] >= 3
        assert pixel_of(page, 100, 4000)["code"] == 0


def test_what_a_server_says_when_it_is_gone_is_one_sentence(browser):
    session = bundled_session("a = 1\n")
    with served(session) as address:
        context = opened(browser, address, wrong_answers=True)
        page = context.__enter__()
    page.locator('[data-head="2.2"]').click()
    page.get_by_text("The server does not answer any more").first.wait_for()
    context.__exit__(None, None, None)


# ---- a notebook


def test_the_joined_module_speaks_by_messages_alone(browser, bundled):
    """The widget's module in an empty page, with a model that answers as a notebook's does."""
    from regard.viewer.bundle import joined, sources

    session, _ = bundled
    module = joined(sources(), "widget.js", exports=True)
    context = browser.new_context()
    page = context.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: request.url.startswith("http") and errors.append(request.url))

    def answer(text):
        asked = json.loads(text)
        if "cancel" in asked:
            return None
        try:
            meta, data = session.handle(asked["method"], asked["params"])
        except ValueError as error:
            return {"id": asked["id"], "error": str(error)}
        return {"id": asked["id"], "meta": meta, "bytes": base64.b64encode(data).decode()}

    page.expose_function("answer", answer)
    page.set_content("<div id='cell'></div>")
    page.evaluate(
        """async (source) => {
            const file = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
            const { default: widget } = await import(file);
            const listeners = [];
            const model = {
                on: (name, call) => listeners.push(call),
                off: (name, call) => listeners.splice(listeners.indexOf(call), 1),
                send: async (message) => {
                    const said = await window.answer(JSON.stringify(message));
                    if (!said) return;
                    const bytes = Uint8Array.from(atob(said.bytes ?? ''), (sign) => sign.charCodeAt(0));
                    const whole = new Uint8Array(8 + bytes.length); // the view is of a part, as a notebook's is
                    whole.set(bytes, 8);
                    const view = new DataView(whole.buffer, 8);
                    const { id, meta, error } = said;
                    for (const listen of [...listeners]) listen({ id, meta, error }, [view]);
                },
            };
            window.listeners = listeners;
            window.end = widget.render({ model, el: document.getElementById('cell') });
        }""",
        module,
    )
    page.locator(".regard[data-idle=true]").wait_for(timeout=20000)
    page.locator(".thumb").nth(35).wait_for()
    page.locator('.text [data-token="12"]').click()
    page.locator(".text-panel tbody tr").first.wait_for()
    page.evaluate("window.end()")
    assert page.evaluate("[document.getElementById('cell').children.length, window.listeners.length]") == [0, 0]
    context.close()
    assert errors == []
