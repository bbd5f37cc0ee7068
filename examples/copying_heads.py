"""Which heads of the bundled model copy a name?

A piece of Python uses a name that nobody has used before, so the model can only know it from the text. Wherever the
name comes again, every head is asked two things: how much of its weight goes from a part of the name to the parts that
followed it the times before; and how much worse the model foretells the rest of the name without this head.

    python examples/copying_heads.py
"""

import argparse

import torch

import regard
from regard.training.checkpoint import load

NAME = "quillbackFerrymoss"
TEXT = '''
import json


def load_{name}(path):
    """Reads the {name} from a file."""
    with open(path) as file:
        {name} = json.load(file)
    if not {name}:
        raise ValueError("no {name}")
    return {name}


def save_{name}({name}, path):
    with open(path, "w") as file:
        json.dump({name}, file)
'''


def occurrences(tokens: list[int], part: list[int]) -> list[int]:
    """Where a run of tokens begins in a text."""
    return [i for i in range(len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part]


@torch.inference_mode()
def main(name: str = NAME, count: int = 6) -> list[tuple[str, int, float, float]]:
    """Prints the heads that copy most, and returns all: layer, head, weight on the part to copy, loss without it."""
    loaded = load("stdlib")
    model, tokenizer = loaded.model, loaded.tokenizer
    ids = [tokenizer.end_id, *tokenizer.encode(TEXT.format(name=name))]
    # tokens differ with what stands before a word: the inner ones of a name are the same everywhere
    inner = tokenizer.encode("_" + name)[1:][1:]
    places = occurrences(ids, inner)
    tokens = torch.tensor([ids])
    print(f"{name}: {len(places)} times in {len(ids)} tokens, as {tokenizer.pieces(inner)} and what stands before\n")

    # each part of a name but its last, from the second time on, and the parts that followed it the times before
    followed = {
        here + i: [before + i + 1 for before in places if before < here]
        for here in places[1:]
        for i in range(len(inner) - 1)
    }
    queries = torch.tensor(list(followed))

    def loss() -> float:
        """How badly the rest of the name is foretold, in nats per token."""
        logits = model(tokens)[0, queries].log_softmax(-1)
        return float(-logits.gather(1, tokens[0, queries + 1, None]).mean())

    with regard.record(model) as recording:
        plain = loss()
    found = []
    for layer, seen in recording.items():
        all_weights = seen.weights()[0]
        weights = torch.stack([all_weights[:, query, keys].sum(-1) for query, keys in followed.items()]).mean(0)
        for head in range(seen.grid.heads):
            with regard.intervene(model, regard.interventions.Ablate(layer, head)):
                found.append((layer, head, float(weights[head]), loss()))
    found.sort(key=lambda row: -row[2])
    kinds = {(head.layer, head.head): head.kind for head in recording.summary()}
    print(f"{'layer':<10}{'head':>4}{'weight':>9}{'loss without it':>17}   kind on this text")
    for layer, head, weight, without in found[:count]:
        print(f"{layer:<10}{head:>4}{weight:>9.2f}{without:>17.2f}   {kinds[layer, head]}")
    print(f"\nloss with all heads {plain:.2f}; without any of the {count} together: ", end="")
    changes = [regard.interventions.Ablate(layer, head) for layer, head, _, _ in found[:count]]
    with regard.intervene(model, *changes):
        print(f"{loss():.2f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default=NAME, help="a name to copy, better one that nobody uses")
    parser.add_argument("--count", type=int, default=6, help="how many heads to show")
    main(**vars(parser.parse_args()))
