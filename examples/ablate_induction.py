"""Which heads let the model repeat what it has read? Take them away and see.

A row of random tokens is read twice. Nothing foretells the first reading; the second is foretold by the first, for a
model that finds the earlier occurrence of a token and looks at what followed it: by induction (Olsson et al. 2022).
The heads that do this are found by where they look and taken away by `intervene`: the loss on the second reading rises.
So it does without the heads that look at the token before, which tell an induction head what a token followed. Other
heads, taken away in the same way, are the control.

    python examples/ablate_induction.py
"""

import argparse

import torch
import torch.nn.functional as F

import regard
from regard.training.checkpoint import load


def repeated(vocab_size: int, length: int, rows: int, end_id: int) -> torch.Tensor:
    """Rows of random tokens, each read twice, with the token that opens every text before them."""
    once = torch.randint(1, vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
    return torch.cat([torch.full((rows, 1), end_id), once, once], dim=1)


@torch.inference_mode()
def losses(model: regard.Decoder, tokens: torch.Tensor, heads: list[tuple[str, int]]) -> tuple[float, float]:
    """Loss in nats per token on the first and the second reading, without these heads."""
    with regard.intervene(model, *(regard.interventions.Ablate(layer, head) for layer, head in heads)):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    first, second = loss.chunk(2, dim=1)
    return float(first.mean()), float(second[:, 1:].mean())  # the first token of the second reading is no repetition


def main(length: int = 128, rows: int = 4, count: int = 4) -> dict[str, tuple[float, float]]:
    """Prints the table and returns it: loss on the first and the second reading, by what was taken away."""
    loaded = load("stdlib")
    model = loaded.model
    tokens = repeated(model.config.vocab_size, length, rows, loaded.tokenizer.end_id)
    with torch.inference_mode(), regard.record(model) as recording:
        model(tokens)
    summary = sorted(recording.summary(), key=lambda head: -head.shares["induction"])
    print(f"{rows} rows of {length} random tokens, each read twice. The heads with most induction:")
    for head in summary[:count]:
        print(f"  {head.layer} head {head.head}: {head.shares['induction']:.2f} of its weight; kind: {head.kind}")
    chosen = [(head.layer, head.head) for head in summary[:count]]
    before = [(head.layer, head.head) for head in summary if head.kind == "previous token"]
    # the control: heads of other kinds, the nearest to those above
    others = [head for head in summary if head.kind not in ("induction", "previous token")]
    nearest = sorted(others, key=lambda head: head.layer, reverse=True)
    control = [(head.layer, head.head) for head in nearest if (head.layer, head.head) not in chosen][:count]
    table = {"nothing": losses(model, tokens, [])}
    for taken in range(1, count + 1):
        table[f"{taken} induction head{'s' * (taken > 1)}"] = losses(model, tokens, chosen[:taken])
    table["previous-token heads"] = losses(model, tokens, before)
    table[f"{len(control)} other heads"] = losses(model, tokens, control)
    print(f"\n{'taken away':<20}  first reading  second reading   (loss, nats per token)")
    for name, (first, second) in table.items():
        print(f"{name:<20}  {first:13.2f}  {second:14.2f}")
    return table


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128, help="tokens that are read twice")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--count", type=int, default=4, help="how many heads are taken away")
    main(**vars(parser.parse_args()))
