"""Models that read texts for the page: regard's own, and those of transformers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.layers import MultiHeadAttention
from regard.models import Decoder
from regard.training.checkpoint import Loaded, load, of_transformers
from regard.training.task import describe
from regard.viewer.texts import Tokens, of_ids, of_text


class Reader(Protocol):
    """A language model and its tokenizer.

    Attributes:
        name: what to call it. context: most tokens at once; None: no limit known.
        opening, closing: tokens that stand before and after every text; None: none does.
        foretells: whether logits at a token are for the next one, so that the model can go on with a text.
        layers: how many attention layers there are; None: not known.
    """

    name: str
    context: int | None
    opening: int | None
    closing: int | None
    foretells: bool
    layers: int | None

    @property
    def model(self) -> nn.Module:
        """The module that is recorded."""

    def encode(self, text: str) -> tuple[list[int], Tokens]:
        """The token numbers of a text, and what they stand for."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [1, length, vocab_size] for tokens int [1, length]; of a model that has none, what it gives."""

    def follow(self, tokens: Sequence[int], count: int, draw: Callable[[Tensor], int]) -> Iterator[int]:
        """Tokens that follow, one by one, as `draw` takes them from logits [1, vocab_size]; read with a cache."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; U+FFFD for a part of a character."""


class DecoderReader:
    """A model of regard's own, `loaded`."""

    foretells = True

    def __init__(self, loaded: Loaded[Decoder]) -> None:
        self.name, self.model, self.tokenizer = loaded.folder.name, loaded.model, loaded.tokenizer
        self.context: int | None = loaded.model.config.context_length
        self.opening: int | None = loaded.tokenizer.end_id
        self.closing: int | None = None
        self.layers: int | None = sum(isinstance(module, MultiHeadAttention) for module in loaded.model.modules())
        self.loaded, self._decoder = loaded, loaded.model

    def encode(self, text: str) -> tuple[list[int], Tokens]:
        ids = self.tokenizer.encode(text)
        return ids, of_text(text, ids, self.tokenizer.spans(text))

    def logits(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self._decoder(tokens)
        return logits

    def follow(self, tokens: Sequence[int], count: int, draw: Callable[[Tensor], int]) -> Iterator[int]:
        cache, new = self._decoder.cache(), list(tokens)
        for _ in range(count):
            token = draw(self._decoder(torch.tensor([new]), cache=cache)[:, -1])
            if token == self.opening:
                return
            yield token
            new = [token]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)


class TransformersReader:
    """A model of transformers, which must use ``attn_implementation="regard"``.

    Args:
        name: what to call it. model: a language model. tokenizer: its own.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any) -> None:
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        config = model.config.get_text_config()
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.layers: int | None = getattr(config, "num_hidden_layers", None)
        self.foretells = bool(model.can_generate()) and not model.config.is_encoder_decoder
        plain, whole = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (False, True))
        at = next((n for n in range(len(whole)) if whole[n : n + len(plain)] == plain), 0)
        self.opening: int | None = whole[0] if at else None
        self.closing: int | None = whole[-1] if len(whole) > at + len(plain) else None

    def encode(self, text: str) -> tuple[list[int], Tokens]:
        if not self.tokenizer.is_fast:  # it cannot say where a token stands
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
            return ids, of_ids(ids, lambda token: self.decode([token]))
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found.input_ids), of_text(text, found.input_ids, found.offset_mapping)

    def logits(self, tokens: Tensor) -> Tensor:
        found = self.model(input_ids=tokens)
        logits: Tensor = found.logits if "logits" in found else found[0]
        return logits

    def follow(self, tokens: Sequence[int], count: int, draw: Callable[[Tensor], int]) -> Iterator[int]:
        cache, new = None, list(tokens)
        for _ in range(count):
            found = self.model(input_ids=torch.tensor([new]), past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            token = draw(found.logits[:, -1])
            if token == self.tokenizer.eos_token_id:
                return
            yield token
            new = [token]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))


def find_reader(name: str) -> Reader:
    """A model that reads texts: one of regard's own, or one of transformers, as transformers runs it.

    Args:
        name: as in `regard.load`.
    Raises:
        ValueError: there is no such model, or it does not read one text. ImportError: a package is missing.
    """
    if of_transformers(name):
        from regard.huggingface.models import open_as_it_is

        return TransformersReader(name, *open_as_it_is(name))
    loaded = load(name)
    if not isinstance(loaded.model, Decoder):
        raise ValueError(
            f"model: expected a language model, which foretells the next token of one text; {name} is of the kind "
            f"{describe(loaded.model)}"
        )
    return DecoderReader(loaded)
