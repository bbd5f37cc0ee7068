"""How exactly the bundled model writes dates in ISO form: held-out dates, formats and languages that it never saw.

    python examples/dates.py data/dates
    python benchmarks/dates.py --data data/dates [--model dates] [--output benchmarks/results/dates.json]

Of the languages that were never seen, texts are counted apart by whether each of their words stands in some training
text: Galician writes "marzo" as Spanish and Italian do, and nobody but Basque writes "ekaina".
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import regard
from regard.bench import machine
from regard.training.table import Table, read_table
from regard.training.translating import split, translate_texts

RESULTS = Path(__file__).parent / "results" / "dates.json"

Row = tuple[str, ...]
"""source, target, locale."""


def rows(path: Path) -> list[Row]:
    return read_table(path, ["source", "target", "locale"]).rows


def words(texts: Sequence[str]) -> set[str]:
    """What stands between digits, spaces and marks."""
    return {word for text in texts for word in re.findall(r"[^\W\d]+", text)}


def share(right: Sequence[bool]) -> dict[str, float]:
    """How many texts there are, and the share that is written exactly."""
    return {"texts": len(right), "exact": round(sum(right) / len(right), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder that examples/dates.py wrote")
    parser.add_argument("--model", default="dates")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    loaded = regard.load(given.model)
    everything = rows(given.data / "train.tsv")
    training, held_out = split(Table(("source", "target"), [row[:2] for row in everything], 0))
    kept_out = {target for _, target in held_out}
    known = words([source for source, _ in training])
    unseen = rows(given.data / "unseen-languages.tsv")
    some = [
        *(("held-out dates", row) for row in everything if row[1] in kept_out),
        *(("unseen formats", row) for row in rows(given.data / "unseen-formats.tsv")),
        *(("unseen languages, known words", row) for row in unseen if words([row[0]]) <= known),
        *(("unseen languages, new words", row) for row in unseen if not words([row[0]]) <= known),
    ]
    written = translate_texts(loaded.model, loaded.tokenizer, [row[0] for _, row in some])
    groups, by_language = defaultdict(list), defaultdict(list)
    for (group, row), (best,) in zip(some, written, strict=True):
        groups[group].append(best.text == row[1])
        if group.startswith("unseen languages"):
            by_language[row[2]].append(best.text == row[1])
    result = {
        "machine": machine(),
        "languages": len({row[2].split("_")[0] for row in everything}),
        "groups": {name: share(right) for name, right in groups.items()},
        "unseen_languages": {name: share(right) for name, right in sorted(by_language.items())},
    }
    for name, told in {**result["groups"], **result["unseen_languages"]}.items():
        print(f"{name:<32}{told['texts']:>8,} texts{told['exact']:>9.2%}")
    given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
