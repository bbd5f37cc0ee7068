"""A real Chromium for tests of the page. Whatever it finds wrong by itself fails the test: a message in the console, an
error of a script, a request that leaves this machine."""

import os
import shutil
from contextlib import contextmanager
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import pytest

from viewing import WHEN_ENDED

CHROMIUM = os.environ.get("REGARD_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
SIZES = {1280: 900, 390: 800}
"""Widths of a window in pixels, and their heights."""

PATIENCE = 60
"""Seconds to wait for a page: other tests, of several processes, may keep all cores busy."""


@contextmanager
def browsing():
    """A browser; skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright")
    if CHROMIUM is None:
        pytest.skip("the page's tests need a Chromium: install it, or set REGARD_CHROMIUM to one")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser, address, *, width=1280, theme="light", wrong_answers=False, fresh=False, **more):
    """A page at an address, when it has come to rest.

    A page that is open at the same address, and as wide and as dark, goes to what the fragment says.

    Args:
        wrong_answers: whether the server may refuse something (Chromium writes that into its console).
        fresh: whether the page has to be opened anew.
    """
    base, _, fragment = address.partition("#")
    key = (base, width, theme, tuple(more.items()))
    fresh = fresh or wrong_answers
    known = PAGES.setdefault(browser, {})
    if fresh or key not in known:
        page, faults = new_page(browser, width, theme, wrong_answers, more)
        page.goto(address)
        if not fresh:
            known[key] = page, faults
    else:
        page, faults = known[key]
        page.evaluate(
            """(fragment) => {
                history.replaceState(null, '', `#${fragment}`);
                window.dispatchEvent(new HashChangeEvent('hashchange'));
            }""",
            fragment,
        )
    try:
        at_rest(page)
        yield page
        if not wrong_answers:
            shown = page.locator(".fault .bad:visible").all_inner_texts()
            assert shown == [], shown
    except BaseException:
        known.pop(key, None)
        raise
    finally:
        if fresh:
            page.context.close()
    assert faults == [], faults


PAGES = WeakKeyDictionary()
"""Of each browser the pages that are open, with what was wrong on them: by address, width, theme and context."""


def close_pages(address):
    """Closes the pages of a server that has ended."""
    for browser, known in PAGES.items():
        for key in [key for key in known if key[0].rstrip("/") == address.rstrip("/")]:
            page, _ = known.pop(key)
            if browser.is_connected():
                page.context.close()


WHEN_ENDED.append(close_pages)


def new_page(browser, width, theme, wrong_answers, more):
    """A page in a context of its own, and a list that what goes wrong is added to."""
    context = browser.new_context(
        viewport={"width": width, "height": SIZES[width]}, color_scheme=theme, reduced_motion="reduce", **more
    )
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    faults = []

    def on_console(message):
        refused = wrong_answers and "Failed to load resource" in message.text
        refused |= "willReadFrequently" in message.text  # it is the test that reads
        if message.type in ("error", "warning") and not refused:
            faults.append(f"console: {message.text}")

    def on_request(request):
        parts = urlsplit(request.url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
            faults.append(f"a request to {request.url}")

    page.on("console", on_console)
    page.on("pageerror", lambda error: faults.append(f"error: {error}"))
    page.on("request", on_request)
    return page, faults


def at_rest(page):
    """Waits until the page has asked all that it wants to ask, and has shown it."""
    page.evaluate(
        """async (patience) => {
            const root = document.getElementById('regard');
            const until = performance.now() + 1000 * patience;
            const idle = () => root.dataset.idle === 'true';
            const frame = () => new Promise((done) => requestAnimationFrame(done));
            while (performance.now() < until) {
                let quiet = 0;
                for (; quiet < 4 && idle(); quiet += 1) await new Promise((done) => setTimeout(done, 40));
                // what is asked for within a frame is drawn in the next; it may ask for more, and the wait begins again
                await frame();
                await frame();
                if (quiet === 4 && idle()) return;
            }
            throw new Error('the page did not come to rest');
        }""",
        PATIENCE,
    )


def state_of(page):
    """What the page shows, as its own state has it."""
    return page.evaluate("() => ({ ...document.getElementById('regard').page.app.state })")


def pixel_of(page, query, key):
    """What stands on the map at a weight: its code, the colour that the table has for it, the one on the canvas."""
    return page.evaluate(
        """([query, key]) => {
            const found = document.getElementById('regard').page.app.map.probe(query, key);
            const canvas = document.querySelector('.map canvas');
            const ratio = window.devicePixelRatio;
            const [x, y] = [found.x * ratio, found.y * ratio].map(Math.floor);
            const data = canvas.getContext('2d').getImageData(x, y, 1, 1).data;
            const { pixel } = found;
            const table = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
            return { ...found, table, shown: [...data].slice(0, 3) };
        }""",
        [query, key],
    )


def shows(page, **part):
    """Sets what the page shows, as its panels do."""
    page.evaluate("(part) => document.getElementById('regard').page.app.store.set(part)", part)
    at_rest(page)


def tile_of(page, **place):
    """A tile's codes as the page gets them."""
    return page.evaluate(
        """async (place) => {
            const { app } = document.getElementById('regard').page;
            return [...new Uint16Array((await app.call('tile', place)).data)];
        }""",
        place,
    )
