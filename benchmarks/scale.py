"""What the factor 1/sqrt(head_dim) does: to scores, to softmax, to gradients, and to a model that learns.

    python benchmarks/scale.py [--draws 500] [--output benchmarks/results/scale.json]

One query, 64 keys and 64 values of one number each, all drawn from the normal distribution with variance 1, and this
many times over. The score is the product, or additive with v drawn alike; with the factor 1/sqrt(head_dim) and without.
Told for each are the variance of the scores, the largest weight (its mean), the share of queries that are saturated (as
`regard.steps` has it), and the length of the gradient of the output with respect to the query: its median, and between
which two numbers eight of ten lie.

Then a head of that size learns to find the one key, of 32, that belongs to a question. Nothing depends on the clock,
and on one machine the same numbers come out each time. The chapter of the guide is docs/guide/13-why-the-root.md.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import regard
from regard.stepwise import SATURATED_WEIGHT

RESULTS = Path(__file__).parent / "results" / "scale.json"
HEAD_DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
TRAINED = (16, 64, 256)
KEYS, CLASSES, STEPS, AVERAGED = 64, 32, 300, 10


def spread(similarity: str, scaled: bool, head_dim: int, draws: int) -> dict[str, Any]:
    """One row: scores, weights and gradients of random queries and keys of one size."""
    draw = torch.Generator().manual_seed(head_dim)
    query = torch.randn(draws, 1, 1, head_dim, generator=draw).requires_grad_()
    key = torch.randn(draws, 1, KEYS, head_dim, generator=draw)
    value = torch.randn(draws, 1, KEYS, 1, generator=draw)
    additive = regard.Additive(torch.randn(1, head_dim, generator=draw)) if similarity == "additive" else None
    call: dict[str, Any] = {"scale": head_dim**-0.5 if scaled else 1.0, "additive": additive}
    with torch.no_grad():
        seen = regard.observe(query, key, **call)
        largest = seen.weights().amax(-1)
        variance = float(seen.scores().var())
    regard.attention(query, key, value, **call).sum().backward()
    assert query.grad is not None
    low, middle, high = query.grad.norm(dim=-1).flatten().quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {
        "similarity": similarity,
        "scaled": scaled,
        "head_dim": head_dim,
        "variance": rounded(variance),
        "largest_weight": rounded(float(largest.mean())),
        "saturated": rounded(float((largest > SATURATED_WEIGHT).float().mean())),
        "gradient": [rounded(low), rounded(middle), rounded(high)],
    }


def learn(head_dim: int, scaled: bool, steps: int = STEPS) -> list[float]:
    """Mean squared error, over every `AVERAGED` steps, of a head that learns which key belongs to which question.

    Every class has a question and a key of 64 random features. In each of 64 examples the 32 keys get random values of
    -1 and 1, and the answer is the value of the key asked for. Query and key matrix learn, by Adam; they begin such
    that queries and keys have variance 1.
    """
    draw = torch.Generator().manual_seed(0)
    questions, keys = torch.randn(2, CLASSES, 64, generator=draw)
    w_query, w_key = ((torch.randn(64, head_dim, generator=draw) / 8).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([w_query, w_key], lr=1e-3)
    losses = []
    for _ in range(steps):
        asked = torch.randint(CLASSES, (64,), generator=draw)
        values = torch.randint(2, (64, CLASSES), generator=draw) * 2.0 - 1.0
        query, key = (questions[asked] @ w_query)[:, None, None], (keys @ w_key).expand(64, 1, -1, -1)
        scale = head_dim**-0.5 if scaled else 1.0
        answer = regard.attention(query, key, values[:, None, :, None], scale=scale).flatten()
        loss = (answer - values.gather(1, asked[:, None]).flatten()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [rounded(sum(losses[at : at + AVERAGED]) / AVERAGED) for at in range(0, steps, AVERAGED)]


def rounded(number: float) -> float:
    """To four significant digits."""
    return float(f"{number:.4g}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = []
    for similarity in ("product", "additive"):
        for scaled in (False, True):
            for head_dim in HEAD_DIMS:
                rows.append(spread(similarity, scaled, head_dim, options.draws))
                print(*rows[-1].values(), flush=True)
    learnt = [
        {"head_dim": head_dim, "scaled": scaled, "loss": learn(head_dim, scaled, options.steps)}
        for head_dim in TRAINED
        for scaled in (False, True)
    ]
    said = {"draws": options.draws, "keys": KEYS, "averaged": AVERAGED, "rows": rows, "learnt": learnt}
    options.output.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
