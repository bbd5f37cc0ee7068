"""How a model is trained, as plain data; nothing here needs torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

MAY_CHANGE = {
    "save_every", "save_minutes", "threads", "data", "pattern", "accumulate", "context_parallel", "shard",
    "tensorboard",
}  # fmt: skip
"""What may differ when a run goes on: it does not decide what the weights become. (The texts themselves do, wherever
they lie: they are compared by their digest.)"""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "constant": lambda done: 1.0,
}
"""What the learning rate is multiplied by when a share of the steps, 0 to 1, is done."""

TASKS: dict[str, dict[str, Any]] = {
    "text": {},
    "translate": {"batch_size": 128, "learning_rate": 0.005},
    "masked": {"batch_size": 16},
    "classify": {"batch_size": 32, "learning_rate": 0.001, "steps": 600},
}
"""What can be learned, and the settings that are usual there, where they are not those of `Settings`."""

LARGEST_VOCABULARY = 1 << 20
"""Tokens; the tokenizers library takes memory for as many as are asked for before it reads a text."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a model is optimised.

    Args:
        steps: number of optimizer steps.
        batch_size: rows of context_length tokens per step, of all processes together.
        accumulate: parts in which a process computes its rows of a step, one after another, which takes less memory.
        learning_rate: the peak of the schedule.
        schedule: how the learning rate falls: "linear" and "cosine" to 0 at the last step, "constant" not at all.
        warmup: share of the steps, 0 to 1, over which the learning rate climbs to its peak.
        weight_decay: of matrices.
        clip: largest norm of a step's gradient; a longer one is scaled down to it.
        seed: for dropout; in a `Recipe` also for the initial weights and the order of the data.
        precision: "bf16" multiplies in bfloat16 (weights stay float32), "no" everything in float32; "auto" is "bf16"
            where the processor or GPU has instructions for it.
        context_parallel: how many processes hold the tokens of each row together, each some of them.
        shard: of several processes, whether each keeps a part of the weights (FSDP2), not all of them.
        evaluate_every: steps between two evaluations on held-out texts; None: only at the end.
        patience: evaluations without a lower loss after which training ends; the model is that of the lowest. None: all
            steps are done, and the model is that of the last.
        save_every: steps between two saves; None: not by steps.
        save_minutes: minutes between two saves; None: not by time.
    Raises:
        ValueError: a number is out of its range.
    """

    steps: int
    batch_size: int = 8
    accumulate: int = 1
    learning_rate: float = 3e-3
    schedule: str = "linear"
    warmup: float = 0.03
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    precision: str = "auto"
    context_parallel: int = 1
    shard: bool = False
    evaluate_every: int | None = None
    patience: int | None = None
    save_every: int | None = 200
    save_minutes: float | None = 5.0

    def __post_init__(self) -> None:
        for name in (
            "steps", "batch_size", "accumulate", "context_parallel", "save_every", "evaluate_every", "patience"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.patience is not None and self.evaluate_every is None:
            raise ValueError(f"patience: {self.patience} evaluations need evaluate_every, the steps between two")
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning_rate must be between 0 and 1, got {self.learning_rate}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps, 0 to 1, got {self.warmup}")
        if not self.clip > 0:
            raise ValueError(f"clip must be more than 0, got {self.clip}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be a whole number of 64 bits, got {self.seed}")
        if self.precision not in ("auto", "bf16", "no"):
            raise ValueError(f"precision must be auto, bf16 or no, got {self.precision!r}")
        if self.save_minutes is not None and not self.save_minutes > 0:
            raise ValueError(f"save_minutes must be more than 0, got {self.save_minutes}")

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        climbing = (step + 1) / max(1.0, self.warmup * self.steps)
        return self.learning_rate * min(1.0, climbing) * SCHEDULES[self.schedule](step / self.steps)

    def rows_at_once(self, processes: int) -> int:
        """Rows that a process computes at once.

        Raises:
            ValueError: the rows of a step cannot be dealt out evenly, or their tokens to so many processes.
        """
        together = self.context_parallel
        if processes % together:
            raise ValueError(
                f"context_parallel: {together} processes are to read each row together, and there "
                f"{'is 1' if processes == 1 else f'are {processes}'}\n  hint: start {together} of them or a multiple: "
                f"torchrun --nproc-per-node {together} --no-python regard train ..., or --context-parallel 1"
            )
        processes //= together
        parts = processes * self.accumulate
        if self.batch_size % parts:
            groups = f"{processes} processes" if together == 1 else f"{processes} groups of {together} processes"
            among = groups + (f" in {self.accumulate} parts each" if self.accumulate > 1 else "")
            if processes == 1:
                among = f"{self.accumulate} parts"
            raise ValueError(
                f"batch_size: {self.batch_size} rows cannot be dealt out evenly to {among}; give a multiple of {parts}"
            )
        return self.batch_size // parts


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """Everything that determines the model that a run trains: settings, texts and sizes.

    Args:
        task: what is learned: "text", to foretell the next token of texts; "translate", to write one text for another;
            "masked", to foretell hidden tokens from both sides; "classify", to tell the label of a text.
        data: "stdlib" (Python's standard library), a folder of texts, or a file; of pairs and of labelled texts a .csv,
            .tsv or .jsonl file.
        pattern: which files of a folder, as in `pathlib.Path.glob`; None takes every file that holds text.
        source, target: columns of the table, what is read and what is to be told; None: of pairs the first two that are
            not named, of labelled texts "text" and "label".
        repeats: share of rows, 0 to 1, replaced by repeated random tokens, which teach a model to copy.
        start_from: a model, by name or folder, whose weights, vocabulary and sizes are taken over.
        vocab_size: tokens in the vocabulary, at most (few texts give fewer); None: as `start_from`, else 4096.
        context_length: tokens in a row; None: as `start_from`, else 512.
        dim: features of a token; None: as `start_from`, else 192.
        layers: number of blocks; None: as `start_from`, else 6.
        heads: attention heads in each block; None: as `start_from`, else 6.
        hidden_dim: hidden features of the feed-forward layers; None: as `start_from`, else 8/3 of dim.
        threads: processor threads; None: torch's choice.
        tensorboard: whether the run is written for TensorBoard too.
    """

    steps: int = 5000
    task: str = "text"
    data: str = "stdlib"
    pattern: str | None = None
    source: str | None = None
    target: str | None = None
    repeats: float = 0.0
    start_from: str | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    dim: int | None = None
    layers: int | None = None
    heads: int | None = None
    hidden_dim: int | None = None
    threads: int | None = None
    tensorboard: bool = False

    @classmethod
    def of(cls, task: str = "text", **given: Any) -> "Recipe":
        """A recipe for a task, with what is usual there.

        >>> Recipe.of("translate", data="pairs.csv").batch_size
        128
        """
        return cls(task=task, **{**TASKS.get(task, {}), **given})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        if self.context_parallel > 1 and self.task == "classify":
            raise ValueError(
                "context_parallel: to classify, a model reads the first token's state, which one process has"
            )
        if not 0 <= self.repeats <= 1:
            raise ValueError(f"repeats must be between 0 and 1, got {self.repeats}")
        for name in ("vocab_size", "context_length", "dim", "layers", "heads", "hidden_dim", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.vocab_size is not None and self.vocab_size > LARGEST_VOCABULARY:
            raise ValueError(f"vocab_size must be at most {LARGEST_VOCABULARY:,}, got {self.vocab_size:,}")


def settings_alone(settings: Settings) -> dict[str, Any]:
    """The fields of `Settings`, without what a `Recipe` has besides."""
    return {field.name: getattr(settings, field.name) for field in fields(Settings)}


def contradictions(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where a run that goes on would differ from how it was begun, in words; more steps are no contradiction."""
    return [
        f"{name} was {value!r} and is {now.get(name)!r}"
        for name, value in was.items()
        if name not in MAY_CHANGE and now.get(name) != value and not (name == "steps" and now.get(name, 0) > value)
    ]
