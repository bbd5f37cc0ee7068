"""Draws docs/look.svg, the picture in the README: what `regard look` shows of a short text, without its last table.

python docs/picture.py
"""

import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from regard.terminal import head_map, look, shaded
from regard.training.checkpoint import load

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "examples" / "library_desk.py").read_text(encoding="utf-8").split("    def take_back")[0].rstrip() + "\n"


def main() -> None:
    loaded = load("stdlib")
    view = look(loaded.model, loaded.tokenizer, TEXT, name="stdlib", source="examples/library_desk.py")
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=104, file=nowhere, force_terminal=True, color_system="truecolor")
        piece = view.pieces[view.query]
        console.print(Text(f"$ regard look {view.source}\n", style="bold"))
        console.print(
            f"What token {view.query} '{piece}' attends to in layer {view.layer}, head {view.head}:\n", highlight=False
        )
        console.print(shaded(view))
        console.print("\nEvery head: kind and share, mean distance in tokens, spread\n", highlight=False)
        console.print(head_map(view))
        drawing = console.export_svg(title="regard look")
    # the fonts come from the reader's machine, not from a server
    drawing = re.sub(r"@font-face \{.*?\}\s*", "", drawing, flags=re.DOTALL)
    drawing = drawing.replace("Fira Code", "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono")
    (ROOT / "docs" / "look.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
