"""What a run learns: which texts it reads, what it makes of them, what kind of model comes of it, and how good it is.

`run.py` brings a run from its recipe to its end, whatever it learns; one class for each task says the rest. A task is
made from a recipe, and has then read its texts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from torch import nn

from regard.configuration import ModelConfig
from regard.training.data import Examples
from regard.training.report import Listener
from regard.training.settings import Recipe
from regard.training.text import Tokenizer


class Measured(Protocol):
    """How good a model is."""

    def rows(self) -> Mapping[str, str]:
        """For the model card: what was measured, and the figures in words."""

    def __str__(self) -> str:
        """The same in a line or two, for the screen."""


class Task(ABC):
    """What a run learns.

    Attributes:
        model: the kind of model, made from a `ModelConfig`.
        sizes: of a model that is begun anew, where the recipe names none.
        architecture: what else such a model's configuration has, before the texts are read.
    """

    model: ClassVar[type[Any]]
    sizes: ClassVar[Mapping[str, int]]
    architecture: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def __init__(self, recipe: Recipe, listener: Listener) -> None:
        """Reads the texts, and tells the listener what they are.

        Raises:
            ValueError: there are none, or too few to hold some of them out.
        """

    def config(self, config: ModelConfig) -> ModelConfig:
        """The model's configuration, with what the texts decide."""
        return config

    @classmethod
    def may_start_from(cls, model: object) -> bool:
        """Whether a run may start from this model."""
        return isinstance(model, cls.model)

    def start_from(self, model: Any, first: Any) -> None:
        """Takes over the weights of the model that the run starts from."""
        model.load_state_dict(first.state_dict())

    @abstractmethod
    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """A vocabulary of at most so many tokens, learned from the training texts."""

    @abstractmethod
    def examples(self, tokenizer: Tokenizer, context_length: int) -> Examples:
        """The training texts as the loop wants them."""

    @abstractmethod
    def held_out_examples(self, tokenizer: Tokenizer, context_length: int) -> Examples:
        """The held-out texts likewise, to evaluate with while the model is trained."""

    @abstractmethod
    def sample(self, model: Any, tokenizer: Tokenizer) -> str:
        """Something that the model says, to be read while it is trained: the same question every time."""

    @abstractmethod
    def measure(self, model: Any, tokenizer: Tokenizer, progress: Callable[[int, int], None]) -> Measured:
        """How good a model is on the texts that were held out."""

    @abstractmethod
    def card(self) -> Mapping[str, str]:
        """What the model card says of the texts: rows of its table."""

    @abstractmethod
    def remarks(self) -> str:
        """The end of the model card: what was held out, and what the model is good for."""


def describe(model: nn.Module) -> str:
    """The kind of a model, in words: 'decoder', 'encoder-decoder'."""
    return {
        "Decoder": "decoder",
        "EncoderDecoder": "encoder-decoder",
        "MaskedLanguageModel": "masked language model",
        "Classifier": "classifier",
        "ForeignModel": "decoder",
    }[type(model).__name__]
