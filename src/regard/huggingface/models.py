"""Models of transformers by folder or name: as regard's own where its parts suffice, else run by transformers.

config.json, model.safetensors                 one file
config.json, model.safetensors.index.json      shards, and which tensor lies in which
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from regard.extras import need
from regard.huggingface.registering import register
from regard.huggingface.vocabulary import ForeignTokenizer
from regard.layouts import from_state_dict
from regard.models import Decoder

MOST_TOKENS = 1 << 20
"""The context of a model whose configuration names none."""


@dataclass(frozen=True)
class ForeignSizes:
    """What regard asks about a model that transformers runs."""

    vocab_size: int
    context_length: int
    layers: int
    heads: int


class ForeignModel(nn.Module):
    """A language model that transformers runs, on ``attn_implementation="regard"``.

    Shapes: tokens int [batch, length] -> logits [batch, length, vocab_size].

    Attributes:
        config: the sizes that regard asks about.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.theirs = theirs
        config = theirs.config.get_text_config()
        self.config = ForeignSizes(
            config.vocab_size,
            getattr(config, "max_position_embeddings", None) or MOST_TOKENS,
            config.num_hidden_layers,
            config.num_attention_heads,
        )
        self.train(theirs.training)  # a wrapper is in training to begin with, and so may not be what it holds

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.theirs(input_ids=tokens, use_cache=False).logits
        return logits

    def texts(self, texts: Sequence[Sequence[int]]) -> "ForeignTexts":
        """Texts that the model has read and goes on with, as in `regard.generation`."""
        return ForeignTexts(self, texts)


class ForeignTexts:
    """Texts that a model has read, each with a cache of transformers' own; see `regard.generation.texts.Texts`."""

    def __init__(self, model: ForeignModel, texts: Sequence[Sequence[int]]) -> None:
        self.model, self._context = model, model.config.context_length
        self._texts = [list(text[-self._context :]) for text in texts]
        self._caches: list[Any] = [None] * len(texts)
        self._read = [0] * len(texts)
        self.logits = torch.cat([self._step(row, text) for row, text in enumerate(self._texts)])

    def keep(self, rows: Sequence[int]) -> None:
        """Forgets all texts but these."""
        for name in ("_texts", "_caches", "_read"):
            setattr(self, name, [getattr(self, name)[row] for row in rows])

    def add(self, tokens: Sequence[int]) -> None:
        """One more token for each text; one that has filled the context goes on from its last half."""
        logits = []
        for row, token in enumerate(tokens):
            self._texts[row] = [*self._texts[row][-self._context :], token]
            new = [token]
            if self._read[row] == self._context:
                new = self._texts[row][-max(1, self._context // 2) :]
                self._caches[row], self._read[row] = None, 0
            logits.append(self._step(row, new))
        self.logits = torch.cat(logits)

    def _step(self, row: int, new: Sequence[int]) -> Tensor:
        tokens = torch.tensor([list(new)], device=next(self.model.parameters()).device)
        found = self.model.theirs(input_ids=tokens, past_key_values=self._caches[row], use_cache=True)
        if getattr(found, "past_key_values", None) is None:
            kind = type(self.model.theirs).__name__
            raise ValueError(f"generate: {kind} does not give back what it has read, so no text can go on from there")
        self._caches[row] = found.past_key_values
        self._read[row] += len(new)
        logits: Tensor = found.logits[:, -1]
        return logits


def from_folder(folder: str | Path) -> Any:
    """A model of transformers on disk as a model of regard, with the same logits; nothing but tensors is read.

    Args:
        folder: with config.json and model.safetensors, or its shards and model.safetensors.index.json.
    Raises:
        ValueError: a file is missing, damaged or of another kind, or regard has no such model.
        ImportError: transformers is missing; it reads config.json.
    """
    need("a model of transformers", "hf", "transformers")
    from transformers import AutoConfig

    folder = Path(folder)
    config = _asked(
        str(folder), lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    )
    names = getattr(config, "architectures", None) or []
    if len(names) != 1:
        raise ValueError(f"{folder / 'config.json'}: expected one name under architectures, got {names}")
    return from_state_dict(names[0], config, read_tensors(folder)).eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: of model.safetensors, or of the shards that its index lists.

    Raises:
        ValueError: there are none, or a file is missing or damaged; the message names it.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return _tensors(folder / "model.safetensors")
    if not index.is_file():
        kinds = sorted(
            {path.suffix for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5")}
        )
        there = f"; it has files in {', '.join(kinds)}, which regard does not read" if kinds else ""
        raise ValueError(f"{folder}: expected model.safetensors, or model.safetensors.index.json and its shards{there}")
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not a table of shards ({error})") from error
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: expected the names of files beside it, got {name!r}")
        found |= _tensors(folder / name)
    missing = sorted(set(places) - set(found))
    if missing:
        raise ValueError(f"{folder}: its shards lack {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}")
    return found


def open_model(name: str) -> tuple[Decoder | ForeignModel, ForeignTokenizer, str | None]:
    """A language model of transformers and its tokenizer, by folder or by name.

    Returns:
        The model, as regard's own where its parts suffice; its tokenizer; and, of a model that transformers runs, why.
    Raises:
        ValueError: there is no such model, it is none that foretells the next token, or it needs code of its own, which
            is never run. ImportError: transformers is missing.
    """
    folder, config = _described(name)
    if not _foretells(config):
        raise ValueError(f"model: {folder} is no language model that foretells the next token ({_kinds(config)})")
    tokenizer = ForeignTokenizer(_tokenizer(folder))
    why = None
    tensors = read_tensors(Path(folder))
    try:
        own = from_state_dict(next(iter(config.architectures or [""])), config, tensors)
        if isinstance(own, Decoder):
            return own.float().eval(), tokenizer, None
    except ValueError as error:
        why = str(error).partition("\n")[0].removeprefix("from_transformers: ")
    return ForeignModel(_run_by_transformers(folder, config)), tokenizer, why


def open_as_it_is(name: str) -> tuple[Any, Any]:
    """A model of transformers that reads one text, run by transformers with regard's attention, and its tokenizer.

    Raises:
        ValueError: as `open_model`; but it need not foretell the next token. ImportError: transformers is missing.
    """
    folder, config = _described(name)
    tokenizer = _tokenizer(folder)
    model = _run_by_transformers(folder, config)
    if model.main_input_name != "input_ids":
        raise ValueError(f"model: {folder} reads {model.main_input_name}, and not a text ({_kinds(config)})")
    return model, tokenizer


def _described(name: str) -> tuple[str, Any]:
    """The folder of a model and its configuration."""
    need(f"the model {name!r}", "hf", "transformers")
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    folder = name
    if not Path(name).is_dir():  # a name: its folder in the cache
        folder = _asked(name, lambda: str(Path(cached_file(name, "config.json", local_files_only=True) or "").parent))
    config = _asked(folder, lambda: AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
    if config.is_encoder_decoder:
        raise ValueError(
            f"model: {folder} reads a text and writes another ({_kinds(config)}); of such models regard takes those "
            "that regard train --task translate wrote, and of models of transformers those that read one text"
        )
    if not hasattr(config.get_text_config(), "num_attention_heads"):
        raise ValueError(f"model: {folder} has no attention heads ({_kinds(config)})")
    return folder, config


def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return _asked(folder, lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True))


def _run_by_transformers(folder: str, config: Any) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    register()
    kind = AutoModelForCausalLM if _foretells(config) else AutoModel
    return _asked(
        folder,
        lambda: kind.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, attn_implementation="regard", dtype=torch.float32
        ),
    ).eval()


def _kinds(config: Any) -> str:
    return ", ".join(getattr(config, "architectures", None) or [type(config).__name__])


def _foretells(config: Any) -> bool:
    """Whether a model is one that foretells the next token."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not _masked(config)


def _masked(config: Any) -> bool:
    """Whether the weights are those of an encoder, which could be loaded as a decoder and would write nonsense."""
    return any(
        not name.endswith(("ForCausalLM", "LMHeadModel")) for name in getattr(config, "architectures", None) or []
    )


def _asked(name: str, ask: Any) -> Any:
    """What transformers answers; whatever it raises as one message."""
    try:
        return ask()
    except Exception as error:  # of whatever kind: it parses files that anybody may have written
        said = str(error).strip().partition("\n")[0]
        if "trust_remote_code" in str(error):
            raise ValueError(f"model: {name} needs code of its own, which regard never runs") from error
        raise ValueError(f"model: transformers cannot open {name!r}: {said or type(error).__name__}") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file, though the index names it") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error
