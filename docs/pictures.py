"""Draws the pictures of README and guide: of the model in the package, and of the guide's own examples.

    python docs/pictures.py                    all of them, into docs/
    python docs/pictures.py look heads         some, by name
    python docs/pictures.py --to elsewhere/

Nothing is random, so the same versions of everything draw the same bytes. `PICTURES` names each file and what draws it.
"""

import argparse
import html
import importlib.util
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.colors
import torch
from matplotlib.figure import Figure
from PIL import Image

import regard
from regard import Causal, Document, Prefix, Window
from regard.display.alignment import align
from regard.display.script import Script
from regard.observation import observe
from regard.plots import COLOURS, head_grid
from regard.stepwise import three_tokens
from regard.training.checkpoint import load

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

from drawing import INK, STYLE, heat, recorded, save  # noqa: E402
from guide_figures import FIGURES  # noqa: E402

CODE = "def read(path):\n    with open(path) as file:\n        return file.read()\n"
LOOK = ["look", "self.quillback = quillback; self.quill", "--without", "5.0,5.3"]
"""The command of the first picture."""


def ablation_example() -> Any:
    """examples/ablate_induction.py as a module."""
    spec = importlib.util.spec_from_file_location("ablate_induction", ROOT / "examples" / "ablate_induction.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(arguments: list[str], columns: int = 80, theme: str = "light") -> str:
    """What a command of regard writes to a terminal of that width and theme."""
    read, write = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")} | {
        "COLUMNS": str(columns), "TERM": "xterm-256color", "COLORTERM": "truecolor", "REGARD_THEME": theme,
    }  # fmt: skip
    alone = ["--no-page"] if arguments[0] == "look" else []
    command = [sys.executable, "-m", "regard", *arguments, *alone]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.DEVNULL, env=environment, cwd=ROOT):
        os.close(write)
        said = b""
        while part := _part(read):
            said += part
    os.close(read)
    return said.decode().replace("\r\n", "\n")


def _part(file: int) -> bytes:
    try:
        return os.read(file, 65536)
    except OSError:  # how Linux ends a terminal
        return b""


def look(path: Path) -> None:
    """What `regard look` prints, as it prints it, in a light terminal."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    written = " ".join(f'"{word}"' if " " in word else word for word in LOOK)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text(f"$ regard {written}\n", style="bold"))
        console.print(Text.from_ansi(printed(LOOK)), soft_wrap=True)
        black, white = (31, 31, 31), (255, 255, 255)
        theme = TerminalTheme(white, black, [black] * 8)
        drawing = console.export_svg(title="regard look", theme=theme, unique_id="look")
    # the fonts come from the reader's machine, not from a server
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono")
    path.write_text(drawing, encoding="utf-8")


def words_of(drawing: str) -> list[str]:
    """The lines of text in a picture that `look` drew."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for x, y, words in re.findall(r'<text class="look-r\d+" x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', drawing):
        lines.setdefault(float(y), []).append((float(x), html.unescape(words).replace("\xa0", " ")))
    width = 12.2  # of a letter, in rich's drawings
    found = []
    for y in sorted(lines):
        line = ""
        for x, words in sorted(lines[y]):
            line = line.ljust(round(x / width)) + words
        found.append(line.rstrip())
    return found


def heads(path: Path) -> None:
    """All heads of the model on random tokens that come twice."""
    loaded = load("stdlib")
    tokens = ablation_example().repeated(loaded.model.config.vocab_size, 48, 1, loaded.tokenizer.end_id)
    with torch.inference_mode(), regard.record(loaded.model) as recording:
        loaded.model(tokens)
    figure = head_grid(recording, cells=128)
    figure.set_size_inches(7.6, 7.6)
    save(figure, path)


def ablation(path: Path) -> None:
    """What it costs the model to repeat, without its induction heads."""
    with open(os.devnull, "w") as nowhere:
        kept, sys.stdout = sys.stdout, nowhere
        try:
            table = ablation_example().main()
        finally:
            sys.stdout = kept
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    axes = figure.subplots()
    names = list(table)[::-1]
    for place, name in enumerate(names):
        new, again = table[name]
        axes.barh(place, again, color=INK if "induction" in name or "previous" in name else "#9db8d2", height=0.62)
        inside = again > 2
        axes.text(
            again + (-0.12 if inside else 0.12), place, f"{again:.2f}", va="center",
            ha="right" if inside else "left", color="white" if inside else "black",
        )  # fmt: skip
        axes.plot([new, new], [place - 0.31, place + 0.31], color="0.35", lw=1.4)
    axes.plot([], [], color="0.35", lw=1.4, label="the first reading")
    axes.set_yticks(range(len(names)), [f"without {name}" if name != "nothing" else "with all heads" for name in names])
    axes.set(xlabel="loss when random tokens come again, nats per token", xlim=(0, 12))
    axes.legend(frameon=False, loc="upper right")
    axes.tick_params(axis="y", length=0)
    save(figure, path)


def three(path: Path) -> None:
    """The weights and the output of the example that chapter 1 works by hand."""
    layer, x = three_tokens()
    shown = regard.steps(layer, x)
    figure = Figure(figsize=(7.2, 2.3), layout="constrained")
    for axes, (name, title) in zip(
        figure.subplots(1, 3), [("score", "scores"), ("softmax", "weights"), ("weigh", "output")], strict=True
    ):
        numbers = shown[name].tensor[0, 0]
        top = float(numbers.max())
        axes.imshow(numbers.numpy() ** 0.5, cmap=COLOURS, vmin=0, vmax=top**0.5 * 1.2)
        for row in range(3):
            for column in range(3):
                value = float(numbers[row, column])
                colour = "white" if value > 0.55 * top else "black"
                axes.text(column, row, f"{value:.3g}", ha="center", va="center", color=colour)
        axes.set_title(title)
        axes.set(xticks=range(3), yticks=range(3))
        axes.set_xlabel("feature" if name == "weigh" else "key")
        axes.set_ylabel("query")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    save(figure, path)


def many_heads(path: Path) -> None:
    """Four heads of the model on one text."""
    recording, labels = recorded("self.price = price\nself.count = count\nself.price")
    figure = Figure(figsize=(7.2, 7.0), layout="constrained")
    chosen = [(4, 2, "the token before"), (5, 0, "what followed this token"), (2, 4, "the last few"), (0, 4, "all")]
    for axes, (layer, head, words) in zip(figure.subplots(2, 2).flat, chosen, strict=True):
        heat(axes, recording[layer].head(head), labels)
        axes.set_title(f"layer {layer}, head {head}: {words}")
    save(figure, path)


def causal(path: Path) -> None:
    """A head of the model as it is, and with its mask taken away."""
    recording, labels = recorded(CODE)
    seen = recording[4].head(0)
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    free = observe(seen.query, seen.key, scale=seen.scoring.scale)
    for axes, what, title in zip(
        figure.subplots(1, 2), (free, seen), ("no mask: it would look ahead", "Causal(): it cannot"), strict=True
    ):
        heat(axes, what, labels)
        axes.set_title(title)
    save(figure, path)


def masks(path: Path) -> None:
    """One head's queries and keys, under four masks."""
    recording, labels = recorded("def area(a, b):\n    return a * b\ndef edge(a, b):\n    return 2 * (a + b)\n")
    seen = recording[3].head(5)
    second = 1 + next(n for n, label in enumerate(labels[2:], 1) if "def" in label)
    lengths = [second, len(labels) - second]
    chosen = {
        "Causal()": Causal(),
        "Causal() & Window(8)": Causal() & Window(8),
        "Causal() & (Window(8) | Prefix(2))": Causal() & (Window(8) | Prefix(2)),
        "Causal() & Document.from_lengths([...])": Causal() & Document.from_lengths(lengths),
    }
    figure = Figure(figsize=(7.2, 7.0), layout="constrained")
    for axes, (title, mask) in zip(figure.subplots(2, 2).flat, chosen.items(), strict=True):
        under = observe(seen.query, seen.key, scale=seen.scoring.scale, mask=mask)
        heat(axes, under, labels)
        axes.set_title(title)
    save(figure, path)


def positions(path: Path) -> None:
    """The sinusoidal table, and how far back three heads with rotary positions look."""
    text = (ROOT / "examples" / "library_desk.py").read_text(encoding="utf-8")
    recording, _ = recorded(text)
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    table = regard.Sinusoidal(64)(100)
    left.imshow(table.numpy(), cmap="RdBu_r", aspect="auto", vmin=-1, vmax=1)
    left.set(xlabel="feature", ylabel="position", title="Sinusoidal(64): what is added")
    left.spines[:].set_visible(False)
    for layer, head, colour in ((4, 2, INK), (2, 4, "#d95f02"), (5, 0, "#7a9a01"), (0, 3, "0.55")):
        weights = recording[layer].head(head).weights()[0, 0]
        back = [float(weights.diagonal(-n).mean()) for n in range(17)]
        right.plot(range(17), back, color=colour, lw=1.4, label=f"layer {layer}, head {head}")
    right.set(xlabel="tokens back", ylabel="mean weight", xlim=(0, 16), ylim=(0, 1), title="Rotary: how far heads look")
    right.legend(frameon=False)
    save(figure, path)


def block(path: Path) -> None:
    """What attention and feed-forward add in every block of the model, and how well its guesses are by then."""
    text = (ROOT / "examples" / "library_desk.py").read_text(encoding="utf-8")
    loaded = load("stdlib")
    model = loaded.model
    tokens = torch.tensor([[loaded.tokenizer.end_id, *loaded.tokenizer.encode(text)]])
    kept: dict[str, list[torch.Tensor]] = {"attention": [], "feed_forward": [], "block": []}
    hooks = []
    for layer in model.layers:
        for name in ("attention", "feed_forward"):
            part = layer.get_submodule(name)
            hooks.append(part.register_forward_hook(lambda _, __, out, name=name: kept[name].append(out)))
        hooks.append(layer.register_forward_hook(lambda _, __, out: kept["block"].append(out)))
    with torch.inference_mode():
        model(tokens)
        for hook in hooks:
            hook.remove()
        losses = []
        for x in kept["block"]:
            logits = model.logits(x if model.norm is None else model.norm(x))
            losses.append(float(torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])))
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = torch.arange(len(losses))
    for shift, (name, words, colour) in enumerate(
        (("attention", "attention adds", INK), ("feed_forward", "feed-forward adds", "#9db8d2"))
    ):
        sizes = [float(out[0].norm(dim=-1).mean()) for out in kept[name]]
        left.bar(numbers + 0.4 * shift - 0.2, sizes, width=0.38, color=colour, label=words)
    sums = [float(x[0].norm(dim=-1).mean()) for x in kept["block"]]
    left.plot(numbers, sums, "o-", color="0.35", ms=3, lw=1, label="the sum")
    left.set(xlabel="block", ylabel="mean length of the vectors", xticks=numbers.tolist())
    left.legend(frameon=False)
    right.plot(numbers, losses, "o-", color=INK, ms=4, lw=1.4)
    right.set(xlabel="after block", ylabel="loss, nats per token", ylim=(0, None), xticks=numbers.tolist())
    save(figure, path)


def alignment(path: Path) -> None:
    """Four dates, and what the last cross-attention looked at when each character of the answer was chosen."""
    loaded = load("dates")
    figure = Figure(figsize=(7.2, 5.6), layout="constrained")
    texts = ["3. März 2026", "March 3rd, 2026", "Tuesday, 3 March 2026", "terça-feira, 3 de março de 2026"]
    for axes, text in zip(figure.subplots(2, 2).flat, texts, strict=True):
        seen = align(loaded.model, Script(loaded.tokenizer, text), name="dates", source=text)
        colours = mpl.colormaps[COLOURS]
        axes.imshow(seen.shown.numpy(), cmap=colours, norm=mpl.colors.PowerNorm(0.5, vmin=0.0, vmax=1.0), aspect="auto")
        keys = ["", *text]
        axes.set_xticks(range(len(keys)), keys, fontsize=7)
        axes.set_yticks(range(len(seen.labels)), seen.labels, fontsize=7)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(text)
    save(figure, path)


def photograph(path: Path, fragment: str, theme: str, size: tuple[int, int], part: str | None = None) -> None:
    """The real page on a file of the examples, in a Chromium.

    Args:
        fragment: what is on screen, the part of the address after #. part: a part of the page, as a CSS selector.
    """
    from playwright.sync_api import sync_playwright

    from regard.viewer.readers import DecoderReader
    from regard.viewer.reading import read
    from regard.viewer.server import Server
    from regard.viewer.session import Session

    chromium = os.environ.get("REGARD_CHROMIUM") or shutil.which("chromium")
    source = ROOT / "examples" / "library_desk.py"
    reader = DecoderReader(load("stdlib"))
    server = Server(Session([read(reader, source.read_text(encoding="utf-8"), source.name)], [reader]))
    server.start()
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            width, height = size
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            page.goto(f"{server.address}#{fragment}")
            for _ in range(5):  # until nothing is asked for any more, and the range of colours has settled
                page.wait_for_timeout(300)
                page.locator("#regard[data-idle=true]").wait_for()
            taken = page.screenshot() if part is None else page.locator(part).screenshot()
            browser.close()
    finally:
        server.close()
    image = Image.open(io.BytesIO(taken)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(path, optimize=True)


def page(path: Path) -> None:
    """The page as it opens: heads, map and text."""
    photograph(path, "layer=5&head=3&query=150&key=90", "light", (1280, 800))


def page_weights(path: Path) -> None:
    """Single weights on the map, with the tokens on both axes."""
    photograph(path, "layer=5&head=3&query=150&key=90&at=80.5,140,22", "dark", (1280, 800))


def page_steps(path: Path) -> None:
    """One token in one head, step by step."""
    photograph(path, "layer=5&head=3&query=150&key=90", "light", (900, 800), ".more")


def page_change(path: Path) -> None:
    """Two heads are off: what the model expects then."""
    photograph(path, "layer=5&head=0&query=150&tab=change&changes=5.0o,5.3o", "dark", (900, 800), ".more")


def page_phone(path: Path) -> None:
    """The page on a narrow screen."""
    photograph(path, "layer=5&head=3&query=150&key=90", "dark", (390, 844), ".map-panel")


def lengths(path: Path) -> None:
    """Three models that translate dates: texts written exactly, by their length."""
    run = json.loads((ROOT / "benchmarks" / "results" / "recurrent.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(7.2, 2.8), layout="constrained")
    axes = figure.subplots()
    for (name, model), colour in zip(run["models"].items(), ("#d95f02", "#7a9a01", INK), strict=True):
        characters = [row["characters"] for row in model["rows"]]
        axes.plot(characters, [row["exact"] for row in model["rows"]], "o-", color=colour, ms=4, lw=1.4, label=name)
    trained = characters[len(run["trained_on"]) - 1]
    axes.axvspan(trained + 3, characters[-1] + 3, color="0.94", zorder=0)
    axes.text(characters[-1] + 2, 0.98, "longer than any in training", ha="right", va="top", color="0.4")
    axes.set(xlabel="characters read", ylabel="texts written exactly", ylim=(-0.02, 1.02), xlim=(0, characters[-1] + 3))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.4))
    save(figure, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    "look.svg": look,
    "heads.png": heads,
    "ablation.svg": ablation,
    "page.png": page,
    "page-weights.png": page_weights,
    "page-steps.png": page_steps,
    "page-change.png": page_change,
    "page-phone.png": page_phone,
    "guide/three-tokens.svg": three,
    "guide/many-heads.png": many_heads,
    "guide/causal.png": causal,
    "guide/masks.png": masks,
    "guide/positions.svg": positions,
    "guide/block.svg": block,
    "guide/alignment.png": alignment,
    "guide/lengths.svg": lengths,
    **FIGURES,
}


def main(names: list[str], to: Path) -> None:
    """Draws pictures by name, or all of them."""
    known = {Path(file).stem: file for file in PICTURES}
    for name in names:
        if name not in known:
            raise SystemExit(f"pictures: there is no {name!r}; there are: {', '.join(known)}")
    for name in names or known:
        file = to / known[name]
        file.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(STYLE):
            PICTURES[known[name]](file)
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    mpl.use("agg")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="which pictures; none: all")
    parser.add_argument("--to", type=Path, default=DOCS, help="the folder they are written to")
    given = parser.parse_args()
    main(given.names, given.to)
