"""regard embed and regard classify: vectors and labels of texts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.console import open_console, print_cut, progress_bar, tell
from regard.cli.inputs import load_model, read_texts
from regard.cli.options import ModelOption

if TYPE_CHECKING:
    from torch import Tensor

    from regard.embedding import Near

TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar='"TEXT"...', help="Texts in quotes; - for the lines of standard input; or --data for those of a file."
    ),
]
DataOption = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="A .csv, .tsv or .jsonl file with a column of texts, or one per line."),
]
ColumnOption = Annotated[str, typer.Option("--column", metavar="NAME", help="The column of the texts.")]


def embed(
    texts: TextsArgument = None,
    data: DataOption = None,
    column: ColumnOption = "text",
    model: ModelOption = "stdlib",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the vectors to a .safetensors or a .jsonl file."),
    ] = None,
    nearest: Annotated[
        str | None, typer.Option("--nearest", metavar="TEXT", help="Show the texts that are nearest to this one.")
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="How many of the nearest.")] = 5,
) -> None:
    """Turn texts into vectors: the mean of the states that a model gives their tokens.

    A .safetensors file holds them as "vectors", float32 with a row for each text, and the texts as JSON in its header;
    a .jsonl file has a line with text and vector for each. Without --output and --nearest, such lines are printed.

    [bold]Examples[/bold]

      regard embed --data reviews.csv --output reviews.safetensors
      regard embed --data README.md --nearest "how fast is it" --count 3
      regard embed "the cat sat" "a dog ran" --model runs/masked
    """
    from regard.embedding import embed as vectors_of
    from regard.embedding import nearest as nearest_of

    if output is not None and output.suffix not in (".safetensors", ".jsonl"):
        raise ValueError(f"--output: expected a file in .safetensors or .jsonl, got {output}")
    if nearest is not None and not nearest.strip():
        raise ValueError("--nearest: empty; give the text whose neighbours to find")
    words = _texts("embed", texts, data, column)
    loaded = load_model(model, "decoder", "masked language model", "classifier")
    tokenizer = loaded.tokenizer
    rows = [[tokenizer.end_id, *ids] for ids in tokenizer.encode_batch(words)]
    with progress_bar(open_console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)
        vectors = vectors_of(
            loaded.model, rows, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    if output is not None:
        _write(output, words, vectors)
        tell(open_console(stderr=True), f"written: {output}, {len(words):,} vectors of {vectors.shape[1]} numbers")
    if nearest is not None:
        query = vectors_of(loaded.model, [[tokenizer.end_id, *tokenizer.encode(nearest)]])
        _show(words, nearest_of(vectors, query, count)[0])
    elif output is None:
        for text, vector in zip(words, vectors.tolist(), strict=True):
            print(json.dumps({"text": text, "vector": vector}, ensure_ascii=False))


def classify(
    texts: TextsArgument = None,
    data: DataOption = None,
    column: ColumnOption = "text",
    model: Annotated[
        str, typer.Option("--model", metavar="FOLDER", help="A folder that regard train --task classify wrote.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object for each text: its label and every probability.")
    ] = False,
) -> None:
    """Tell the label of each text, with a model that was trained on labelled ones.

    Before each label stands its probability. A text that is longer than the model's context is read up to there.

    [bold]Examples[/bold]

      regard train runs/sections --task classify
      regard classify "Wait for a future with a timeout." --model runs/sections
      regard classify --data reviews.csv --model runs/reviews --json
    """
    from regard.training.classifying import probabilities

    if not model:
        raise ValueError("--model: expected a folder that regard train --task classify wrote, got none")
    words = _texts("classify", texts, data, column)
    loaded = load_model(model, "classifier")
    labels = loaded.model.config.labels
    for first in range(0, len(words), 64):
        some = words[first : first + 64]
        for text, shares in zip(some, probabilities(loaded.model, loaded.tokenizer, some).tolist(), strict=True):
            best = max(range(len(labels)), key=shares.__getitem__)
            if as_json:
                told = {"text": text, "label": labels[best], "probabilities": dict(zip(labels, shares, strict=True))}
                print(json.dumps(told, ensure_ascii=False))
            else:
                print_cut(f"{shares[best]:6.1%}  {labels[best]}  {text}")


def _texts(command: str, texts: list[str] | None, data: Path | None, column: str) -> list[str]:
    """The texts that are named, or those of a file."""
    from regard.training.table import KINDS, read_table
    from regard.training.text import read_text

    if (texts is None) == (data is None):
        raise ValueError(f"{command}: give texts in quotes, - for standard input, or --data FILE: one of these")
    if data is None:
        found = read_texts(command, texts or [])
    elif data.suffix.lower() in KINDS:
        found = [text for (text,) in read_table(data, [column]).rows]
    else:
        found = [line for line in read_text(data).split("\n") if line.strip()]
    if not found or not all(text.strip() for text in found):
        raise ValueError(f"{command}: expected texts with something in them, got {'an empty one' if found else 'none'}")
    return found


def _write(output: Path, words: list[str], vectors: "Tensor") -> None:
    from regard.storage import replacing, save

    if output.suffix == ".safetensors":
        save(output, {"vectors": vectors}, {"texts": json.dumps(words, ensure_ascii=False)})
        return
    with replacing(output) as new, new.open("w", encoding="utf-8") as file:
        for text, vector in zip(words, vectors.tolist(), strict=True):
            file.write(json.dumps({"text": text, "vector": vector}, ensure_ascii=False) + "\n")


def _show(words: list[str], near: "list[Near]") -> None:
    for number, cosine in near:
        print_cut(f"{cosine:6.3f}  {words[number]}")
