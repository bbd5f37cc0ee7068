"""What attention replaced: how exactly three models translate one to six dates, by the length of what they read.

    python examples/dates.py data/dates
    python benchmarks/recurrent.py --data data/dates/train.tsv [--seconds 240] [--only NAME ...]
                                   [--output benchmarks/results/recurrent.json]

A text is one to four dates in English, German, French and Spanish, as "3. März 2026; 5 Oct 1971", to be written in ISO
form. Five and six dates are never trained on. Dates on which a model is measured are in no training text.

    one vector          an LSTM reads the text; its last state is all that a second LSTM, which writes, is told of it
    additive attention  the same two, and each state of the second attends to all states of the first (Bahdanau et al.
                        2014's score, here after the LSTM's step and not before it, as in Luong et al. 2015)
    Transformer         regard's EncoderDecoder

All have the same number of parameters but for a few in a hundred, the same optimizer, texts, batches and schedule, and
train for the same time of one processor core. A text counts as exact if every character of the answer is right.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard import EncoderDecoder, ModelConfig, MultiHeadAttention, Padding, TokenEmbedding
from regard.bench import machine
from regard.training.data import IGNORED
from regard.training.pairs import PairBatch, Pairs
from regard.training.table import Table, read_table
from regard.training.text import CHARACTERS, Tokenizer, train_tokenizer
from regard.training.translating import split

RESULTS = Path(__file__).parent / "results" / "recurrent.json"

LOCALES = ("en", "en_GB", "de", "fr", "es")
TRAINED, MEASURED = range(1, 5), range(1, 7)
"""Dates in a text."""

DIM, BATCH_SIZE, LEARNING_RATE, WARMUP = 64, 64, 3e-3, 0.05


class Recurrent(nn.Module):
    """An LSTM that reads and one that writes; between them the last state, or additive attention over all states."""

    def __init__(self, vocab_size: int, hidden: int, *, attends: bool) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, DIM, scale=math.sqrt(DIM))
        nn.init.normal_(self.embedding.weight, std=1 / math.sqrt(DIM))
        told = 0 if attends else hidden  # the one vector stands beside every token that is written, too
        self.reads = nn.LSTM(DIM, hidden, batch_first=True)
        self.writes = nn.LSTM(DIM + told, hidden, batch_first=True)
        self.attention = (
            MultiHeadAttention(
                hidden, 1, key_dim=32, value_dim=hidden, output=False, similarity="additive", projection_bias=False
            )
            if attends
            else None
        )
        for lstm in (self.reads, self.writes):  # keep what the state holds, to begin with (Jozefowicz et al. 2015)
            with torch.no_grad():
                lstm.bias_hh_l0[hidden : 2 * hidden] = 1.0
        self.last = nn.Linear(2 * hidden if attends else hidden, DIM)

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(source), lengths, batch_first=True, enforce_sorted=False)
        outputs, (state, cell) = self.reads(packed)
        written = self.embedding(target)
        if self.attention is None:
            vector = state[0][:, None].expand(-1, target.shape[1], -1)
            states, _ = self.writes(torch.cat([written, vector], dim=-1), (state, cell))
        else:
            read, _ = pad_packed_sequence(outputs, batch_first=True)
            states, _ = self.writes(written, (state, cell))
            states = torch.cat([states, self.attention(states, read, mask=Padding(lengths))], dim=-1)
        return F.linear(torch.tanh(self.last(states)), self.embedding.weight)


class Transformer(nn.Module):
    """regard's EncoderDecoder, called as the others are."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.model = EncoderDecoder(
            ModelConfig(vocab_size=vocab_size, context_length=256, dim=DIM, layers=2, heads=4, hidden_dim=168)
        )

    def forward(self, source: Tensor, target: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.model(source, target, source_mask=Padding(lengths))
        return logits


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def recurrent(vocab_size: int, *, attends: bool) -> Recurrent:
    """The recurrent model that is nearest to the Transformer in size."""
    with torch.device("meta"):  # shapes without memory
        wanted = size(Transformer(vocab_size))
        best = min(range(32, 257, 2), key=lambda n: abs(size(Recurrent(vocab_size, n, attends=attends)) - wanted))
    return Recurrent(vocab_size, best, attends=attends)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "one vector": lambda vocab_size: recurrent(vocab_size, attends=False),
    "additive attention": lambda vocab_size: recurrent(vocab_size, attends=True),
    "Transformer": Transformer,
}


def dates(path: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Single dates to train on, and others to measure with."""
    table = read_table(path, ["source", "target", "locale", "typed"])
    kept = [row[:2] for row in table.rows if row[2] in LOCALES and row[3] == "printed"]
    return split(Table(table.columns[:2], kept, 0))


def joined(single: Sequence[tuple[str, str]], counts: Sequence[int], total: int, seed: int) -> list[tuple[str, str]]:
    """Texts of some dates each, as many of every count as of any other."""
    draw = random.Random(seed)
    found = []
    for number in range(total):
        chosen = draw.choices(single, k=counts[number % len(counts)])
        found.append(("; ".join(source for source, _ in chosen), " ".join(target for _, target in chosen)))
    return found


def rows_of(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], seed: int = 0) -> Pairs:
    sources, targets = (tokenizer.encode_batch(texts) for texts in zip(*pairs, strict=True))
    return Pairs(zip(sources, targets, strict=True), end_id=tokenizer.end_id, seed=seed)


def logits_of(model: nn.Module, batch: PairBatch) -> Tensor:
    logits: Tensor = model(batch.source, batch.target, batch.source_lengths)
    return logits


def train(model: nn.Module, data: Pairs, seconds: float) -> tuple[int, float]:
    """Trains for some seconds of one core; steps, and the mean loss of the last hundred."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    losses: list[float] = []
    start = time.process_time()
    while (done := (time.process_time() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, done / WARMUP + 1e-3) * (1 - done)
        batch = data.batch(len(losses) * BATCH_SIZE, BATCH_SIZE)
        loss = F.cross_entropy(logits_of(model, batch).flatten(0, 1), batch.wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return len(losses), sum(losses[-100:]) / len(losses[-100:])


@torch.inference_mode()
def exact(model: nn.Module, data: Pairs) -> float:
    """The share of texts that the model writes exactly, taking the likeliest token each time.

    Where every token is the likeliest after the right ones, the model writes just these; so one pass with the right
    answer tells, and nothing has to be written.
    """
    model.eval()
    right = []
    for place in range(0, data.rows, 50):
        batch = data.batch(place, 50)
        right.append(((logits_of(model, batch).argmax(-1) == batch.wanted) | (batch.wanted == IGNORED)).all(1))
    return float(torch.cat(right).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="train.tsv, as examples/dates.py writes it")
    parser.add_argument("--seconds", type=float, default=240, help="of one core, for each model")
    parser.add_argument("--texts", type=int, default=60_000, help="to train on")
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    single, held_out = dates(given.data)
    texts = joined(single, TRAINED, given.texts, seed=1)
    tokenizer = Tokenizer(train_tokenizer([text for pair in texts for text in pair], 2048, split=CHARACTERS))
    data = rows_of(tokenizer, texts)
    measured = {count: joined(held_out, [count], 1000, seed=count + 1) for count in MEASURED}
    known: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}
    models = known.get("models", {})
    for name in given.only:
        torch.manual_seed(0)
        model = MODELS[name](tokenizer.vocab_size)
        steps, loss = train(model, data, given.seconds)
        rows = [
            {
                "dates": count,
                "characters": round(sum(len(source) for source, _ in pairs) / len(pairs), 1),
                "exact": round(exact(model, rows_of(tokenizer, pairs)), 4),
            }
            for count, pairs in measured.items()
        ]
        models[name] = {"parameters": size(model), "steps": steps, "loss": round(loss, 5), "rows": rows}
        print(name, json.dumps(models[name]), flush=True)
        result = {"machine": machine(), "seconds": given.seconds, "batch_size": BATCH_SIZE, "texts": given.texts,
                  "trained_on": list(TRAINED), "models": models}  # fmt: skip
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
