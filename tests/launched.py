"""Trainings of several processes: what each rank runs, in a module that the processes import."""

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # what takes time to import is imported once, before the processes are forked
import torch.distributed.tensor

from learning import CONTEXT, model_of, rows
from regard.configuration import ModelConfig
from regard.models import EncoderDecoder, MaskedLanguageModel
from regard.training import checkpoint
from regard.training.loop import train
from regard.training.masked import Masked
from regard.training.pairs import Pairs
from regard.training.settings import Settings

SETTINGS = Settings(
    steps=4, batch_size=8, precision="no", save_every=None, evaluate_every=2, seed=3, learning_rate=0.01
)


def texts():
    return model_of(layers=1), rows()


def hidden():
    torch.manual_seed(0)
    return MaskedLanguageModel(model_of(layers=1).config), Masked(rows())


def pairs():
    """Pairs of very unequal lengths: a share of the rows is another share of the tokens."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "context_length": CONTEXT, "dim": 12, "layers": 1, "heads": 3, "hidden_dim": 17}
    draw = torch.Generator().manual_seed(2)
    lengths = [(1 + 3 * n % 11, 1 + 5 * n % 13) for n in range(24)]
    texts = [[torch.randint(1, 31, (length,), generator=draw).tolist() for length in pair] for pair in lengths]
    return EncoderDecoder(ModelConfig(**sizes)), Pairs(texts, seed=7)


WORK = {"texts": texts, "hidden": hidden, "pairs": pairs}


def training(work, folder, *, stop_at=None, resume=False, diverge=False, other_data=False, **changes):
    """A run's reports, as plain data; its weights are in the folder."""
    reports = []

    def report(told):
        reports.append(asdict(told))
        if told.step == stop_at:
            raise KeyboardInterrupt

    (model, data), held_out = WORK[work](), WORK[work]()[1]
    if diverge:
        with torch.no_grad():
            model.norm.weight.fill_(float("inf"))
    if other_data:
        data.seed += dist.get_rank()
    settings = Settings(**asdict(SETTINGS) | changes)
    try:
        train(model, data, settings, Path(folder), held_out=held_out, resume=resume, report=report)
    except KeyboardInterrupt:
        assert stop_at is not None
    return reports


def trainings(group, cases):
    """Several runs one after another; of one that fails, the error."""
    found = []
    for work, folder, changes in cases:
        try:
            found.append(training(work, folder, **changes))
        except Exception as error:
            found.append((type(error).__name__, str(error)))
    return found


def in_a_world_of(group, count, meeting, cases):
    """The same in a world of the first few processes alone."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank < count:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
        return trainings(None, cases)
    return []


def on_a_full_disk(group, folder):
    """A run whose first process can write nothing after the beginning."""
    if dist.get_rank() == 0:
        write, written = checkpoint.save, []

        def save(path, *arguments, **more):
            written.append(path)
            if len(written) > 2:
                raise OSError(28, "No space left on device")
            write(path, *arguments, **more)

        checkpoint.save = save
    try:
        return trainings(group, [("texts", folder, {})])[0]
    finally:
        if dist.get_rank() == 0:
            checkpoint.save = write
