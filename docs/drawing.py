"""What the pictures of README and guide have in common: colours, a head's weights as an image, files without dates."""

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.colors
import torch
from matplotlib.figure import Figure
from PIL import Image

import regard
from regard.observation import Observation
from regard.plots import COLOURS
from regard.recording import Recording
from regard.training.checkpoint import load

INK = "#1f4e79"
PALE, WARM, GREEN = "#9db8d2", "#d95f02", "#7a9a01"
STYLE = {
    "svg.hashsalt": "regard",
    "svg.fonttype": "path",
    "font.size": 8.0,
    "axes.titlesize": 8.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
}


def recorded(text: str) -> tuple[Recording, list[str]]:
    """A text read by the model in the package, and its tokens."""
    loaded = load("stdlib")
    ids = [loaded.tokenizer.end_id, *loaded.tokenizer.encode(text)]
    with torch.inference_mode(), regard.record(loaded.model) as recording:
        loaded.model(torch.tensor([ids]))
    return recording, ["▸", *(piece.replace("\\n", "↵") for piece in loaded.tokenizer.pieces(ids[1:]))]


def heat(axes: Any, seen: Observation, labels: list[str]) -> None:
    """One head's weights with the tokens beside them; grey is what the mask hides."""
    weights = seen.weights()[0, 0].masked_fill(seen.scores()[0, 0] == -torch.inf, torch.nan)
    colours = mpl.colormaps[COLOURS].with_extremes(bad="0.92")
    axes.imshow(weights.numpy(), cmap=colours, norm=mpl.colors.PowerNorm(0.5, vmin=0.0, vmax=1.0))
    axes.set_xticks(range(len(labels)), [label.strip() for label in labels], rotation=90, fontsize=7)
    axes.set_yticks(range(len(labels)), [label.strip() for label in labels], fontsize=7)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """A figure as SVG or PNG, without a date or a version in it; a PNG with 128 colours, which is small."""
    if path.suffix == ".svg":
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, format="png")
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
