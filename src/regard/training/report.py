"""Progress reports during training."""

from dataclasses import dataclass

from regard.training.settings import Recipe


@dataclass(frozen=True)
class Report:
    """The state of training after a step.

    Attributes:
        step: steps done. loss: of this step, in nats per token. learning_rate: of this step.
        gradient_norm: before clipping. tokens_per_second: of this step. seconds: of training in all.
        held_out: the loss on held-out texts, where the model was evaluated after this step.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    seconds: float
    held_out: float | None = None


class Listener:
    """Receives progress reports of a run. Every method does nothing by default; override those you need."""

    def note(self, text: str) -> None:
        """Something that a reader should know, in a line or two."""

    def progress(self, work: str, done: int, total: int) -> None:
        """How far a piece of work, other than the training itself, has come."""

    def sample(self, step: int, text: str) -> None:
        """A text that the model wrote after so many steps."""

    def step(self, report: Report, settings: Recipe) -> None:
        """A step of training is done. KeyboardInterrupt, raised here, ends the run with a save."""
