"""What can be continued: a decoder, and a prompt of token ids."""

from collections.abc import Sequence

from torch import Tensor

from regard.models import Decoder
from regard.shapes import INTEGER_DTYPES, is_plain, kind


def check_decoder(owner: str, model: object) -> None:
    """What generates text is a `Decoder`, or a model that reads texts in its own way, with `texts`."""
    if not isinstance(model, Decoder) and not hasattr(model, "texts"):
        theirs = "; a model of transformers has model.generate()" if hasattr(model, "generate") else ""
        raise TypeError(f"{owner}: model must be a Decoder, got {kind(model)}{theirs}")


def check_prompt(owner: str, prompt: object, vocab_size: int) -> list[int]:
    """The token ids of a prompt, checked against the vocabulary."""
    wanted = f"{owner}: prompt must be token numbers, a list or an int tensor [length], got"
    if isinstance(prompt, str):
        raise TypeError(f"{wanted} {kind(prompt)}; encode it first, with the tokenizer of the model")
    if isinstance(prompt, Tensor):
        whole = is_plain(prompt) and prompt.dtype in INTEGER_DTYPES
        if not whole or prompt.dim() != 1:
            row = "; one row at a time: tokens[0]" if whole and prompt.dim() == 2 else ""
            raise TypeError(f"{wanted} {kind(prompt)}{row}")
        prompt = prompt.tolist()
    if not isinstance(prompt, Sequence):
        raise TypeError(f"{wanted} {kind(prompt)}")
    text = list(prompt)
    wrong = next((token for token in text if not isinstance(token, int) or isinstance(token, bool)), None)
    if wrong is not None:
        raise TypeError(f"{wanted} a list with {kind(wrong)} in it")
    if not text:
        raise ValueError(f"{owner}: the prompt is empty; begin with the end token, which opens every text")
    for token in text:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{owner}: tokens must be 0 to {vocab_size - 1}, got {token}; "
                "is this the tokenizer the model was trained with?"
            )
    return text
