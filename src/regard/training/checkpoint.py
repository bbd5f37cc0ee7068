"""A model on disk: a folder of three files, and more where it was trained.

    model.safetensors      the weights; the configuration is in its header, as JSON
    tokenizer.json         what cuts text into the model's tokens
    card.md                what it was trained on, how, and how good it is (written by `regard train`)
    progress.safetensors   the optimizers' state and the place in the data, to go on from
    metrics.jsonl          loss, learning rate and speed of every step
    best.safetensors       with early stopping, the weights that did best on held-out texts

The first two are there from the first step on, so that a model can be used while it is being trained. Nothing is
pickled. Every file is written beside its place and moved there when it is whole, so that an interruption, or a full
disk, leaves the old one. Models that come with regard lie in the package, in `pretrained/`, and are loaded by name.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.configuration import ModelConfig
from regard.extras import need
from regard.models import Classifier, Decoder, EncoderDecoder, MaskedLanguageModel
from regard.shapes import kind
from regard.storage import save
from regard.training.spreading import like, whole
from regard.training.text import Tokenizer

PRETRAINED = Path(__file__).parent.parent / "pretrained"
DEFAULT_MODEL = "stdlib"
WEIGHTS = "model.safetensors"

Model = Decoder | EncoderDecoder | MaskedLanguageModel | Classifier
"""What training makes: each is made from a `ModelConfig` alone."""

FORMATS: dict[str, type[Model]] = {
    "regard.decoder.1": Decoder,
    "regard.encoder-decoder.1": EncoderDecoder,
    "regard.masked.1": MaskedLanguageModel,
    "regard.classifier.1": Classifier,
}
"""What a file's header calls a kind of model."""

M = TypeVar("M", Decoder, EncoderDecoder, MaskedLanguageModel, Classifier)


@dataclass(frozen=True)
class Loaded(Generic[M]):
    """A model ready to use, its tokenizer, and the folder they came from.

    Attributes:
        unfinished: of a model whose training is not done, the steps it has had and those it is to have; else None.
        foreign: of a model that transformers runs, why regard's own parts do not suffice; else None.
    """

    model: M
    tokenizer: Tokenizer
    folder: Path
    unfinished: tuple[int, int] | None = None
    foreign: str | None = None


def bundled() -> list[str]:
    """Names of the models in the package."""
    return sorted(folder.name for folder in PRETRAINED.glob("*") if (folder / "model.safetensors").is_file())


def load(name: str | os.PathLike[str] = DEFAULT_MODEL, *, weights: str = WEIGHTS) -> Loaded[Any]:
    """A model and its tokenizer, by name or from a folder.

    Args:
        name: a model in the package (`bundled()` lists them), the folder that `regard train` wrote, or a language model
            of transformers: its folder, or its name where it is in transformers' cache. It becomes a `Decoder` where
            regard's parts suffice; else transformers runs it, with its attention computed by regard. Code that comes
            with a model is never run.
        weights: the file of its weights; a training with early stopping also keeps best.safetensors.
    Raises:
        ValueError: there is no such model, or its files are damaged; the message says which.
        ImportError: the package tokenizers is not installed.

    >>> loaded = load("stdlib")
    >>> loaded.model.config.layers
    6
    """
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"load: name must be that of a model or a folder, got {kind(name)}")
    if of_transformers(name):
        from regard.huggingface.models import open_model

        foreign_model, its_tokenizer, why = open_model(os.fspath(name))
        does_as_decoder: Any = foreign_model
        does_as_tokenizer: Any = its_tokenizer
        return Loaded(does_as_decoder, does_as_tokenizer, Path(name), foreign=why)
    folder = find(name)
    need("a model's tokenizer", "cli", "tokenizers")
    path = folder / weights
    metadata, tensors = read(path)
    made = FORMATS.get(metadata.get("format", ""))
    if made is None:
        expected = " or ".join(map(repr, FORMATS))
        raise ValueError(f"{path}: not a regard model (format {metadata.get('format')!r}, expected {expected})")
    try:
        model = made(ModelConfig.from_dict(json.loads(metadata["config"])))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no usable configuration in its header: {error}") from error
    _put(path, tensors, model)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{folder / 'tokenizer.json'}: has {tokenizer.vocab_size} tokens, the model beside it "
            f"{model.config.vocab_size}"
        )
    step, steps = json.loads(metadata.get("steps", "[0, 0]"))
    return Loaded(model.eval(), tokenizer, folder, (step, steps) if step < steps else None)


def kind_of(name: str | os.PathLike[str]) -> type[Model] | None:
    """The kind of a model, from its header alone; None where there is no model of ours of this name."""
    try:
        with safe_open(find(name) / "model.safetensors", "pt") as file:
            return FORMATS.get((file.metadata() or {}).get("format", ""))
    except (ValueError, SafetensorError, OSError):
        return None


def find(name: str | os.PathLike[str]) -> Path:
    """The folder of a model."""
    for folder in (Path(name), PRETRAINED / name):
        if (folder / "model.safetensors").is_file():
            return folder
    known = ", ".join(bundled()) or "none"
    raise ValueError(
        f"model: no model {str(name)!r}; expected a name (in the package: {known}) or a folder with model.safetensors "
        "and tokenizer.json, or a model of transformers: its folder, or OWNER/NAME of one that was downloaded"
    )


def of_transformers(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a folder that transformers wrote, or of a model in its cache: OWNER/NAME."""
    if Path(name).exists():
        return (Path(name) / "config.json").is_file()
    return (_cache() / f"{_CACHED}{'--'.join(Path(name).parts)}").is_dir()


def downloaded() -> list[str]:
    """Names of the models in the cache of transformers that have a tokenizer."""
    folders = {path.parents[2].name for path in _cache().glob(f"{_CACHED}*/snapshots/*/tokenizer*")}
    return sorted(folder.removeprefix(_CACHED).replace("--", "/") for folder in folders)


_CACHED = "models--"
"""With what the folder of a model in the cache of transformers begins."""


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def save_model(
    folder: Path | None,
    model: Model,
    *,
    dtype: torch.dtype | None = None,
    steps: tuple[int, int] | None = None,
    name: str = WEIGHTS,
) -> None:
    """Writes model.safetensors, or a file of another `name`.

    Args:
        folder: where; None, here and below: nowhere, but take part in putting together what lies in shards.
        dtype: of the stored weights; None keeps their own.
        steps: of a model in training, the steps it has had and those it is to have.
    """
    weights = _whole(_weights(model), folder is not None)
    if folder is None:
        return
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in weights.items()}
    metadata = {"format": format_of(model), "config": json.dumps(model.config.to_dict())}
    if steps is not None:
        metadata["steps"] = json.dumps(steps)
    save(folder / name, tensors, metadata)


def save_batch(path: Path | None, model: Model, batch: Mapping[str, Tensor], note: Mapping[str, Any]) -> None:
    """Writes a batch, the weights that met it (`model.` before their names) and `note`, to find out what went wrong."""
    weights = _whole({f"model.{name}": tensor for name, tensor in _weights(model).items()}, path is not None)
    if path is not None:
        save(path, {**weights, **batch}, {"config": json.dumps(model.config.to_dict()), "note": json.dumps(dict(note))})


def save_progress(
    path: Path | None, model: Model, optimizers: Iterable[torch.optim.Optimizer], header: Mapping[str, Any]
) -> None:
    """Writes everything that going on needs: weights, the optimizers' state, and `header` (plain data)."""
    tensors = {f"model.{name}": tensor for name, tensor in _weights(model).items()}
    numbers: dict[str, float] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, entry in state.items():
                place = f"optimizer.{number}.{index}.{name}"
                if isinstance(entry, Tensor):
                    tensors[place] = entry
                else:
                    numbers[place] = entry
    tensors = _whole(tensors, path is not None)
    if path is not None:
        save(path, tensors, {"header": json.dumps(dict(header)), "numbers": json.dumps(numbers)})


def load_progress(path: Path, model: Model, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Puts back what `save_progress` wrote.

    Raises:
        ValueError: the file is damaged, or holds another model.
    """
    metadata, tensors = read(path)
    _put(path, {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}, model)
    entries = {**tensors, **json.loads(metadata["numbers"])}
    for number, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for place, entry in entries.items():
            if place.startswith(f"optimizer.{number}."):
                _, _, index, name = place.split(".", 3)
                parameter = parameters[int(index)]
                per_weight = isinstance(entry, Tensor) and entry.shape == parameter.shape
                state.setdefault(int(index), {})[name] = like(entry, parameter) if per_weight else entry
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def progress_header(path: Path) -> dict[str, Any]:
    """The plain data of `save_progress`, without reading the tensors."""
    try:
        with safe_open(path, "pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["header"])
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file, so no training run to go on with") from None
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a training run that can be resumed ({error})") from error
    return header


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a safetensors file."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error


def format_of(model: Model) -> str:
    """What a file's header calls this kind of model."""
    return next(name for name, made in FORMATS.items() if isinstance(model, made))


def _weights(model: Model) -> dict[str, Tensor]:
    """What is stored of a model: of weights that are shared (a tied output layer is the embedding) the first name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _whole(tensors: Mapping[str, Tensor], kept: bool) -> dict[str, Tensor]:
    """Tensors with the rows of all processes; what is not to be kept is put together for the others alone."""
    found = {}
    for name, tensor in tensors.items():
        every = whole(tensor)
        if kept:
            found[name] = every
    return found


def _put(path: Path, weights: Mapping[str, Tensor], model: Model) -> None:
    """Copies stored weights into a model, in the model's own dtype."""
    wanted = {name: tensor.shape for name, tensor in _weights(model).items()}
    given = {name: tensor.shape for name, tensor in weights.items()}
    wrong = [name for name in sorted({*wanted, *given}) if wanted.get(name) != given.get(name)]
    if wrong:
        some = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        raise ValueError(f"{path}: its weights are not this model's; missing, too many or of another size: {some}")
    placed = {name: like(weights[name], parameter) for name, parameter in model.named_parameters()}
    model.load_state_dict(placed, strict=False)  # strict but for what shares the weights of another
