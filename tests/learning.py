"""A model and rows for trainings of a few steps."""

import torch

from regard.configuration import ModelConfig
from regard.models import Decoder
from regard.training.data import Packed

CONTEXT = 16


def model_of(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 31, "context_length": CONTEXT, "dim": 12, "layers": 2, "heads": 3, "hidden_dim": 17}
    return Decoder(ModelConfig(**sizes | changes))


def rows():
    draw = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 31, (length,), generator=draw).tolist() for length in (5, 40, 1, 23, 17)]
    return Packed(documents, context_length=CONTEXT, vocab_size=31, seed=7, repeats=0.25)
