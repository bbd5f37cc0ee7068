"""Small models whose attention is far from even, and heads that look where a test says."""

import torch

from regard.configuration import ModelConfig
from regard.models import Decoder
from regard.observation import observe
from regard.recording import Recorded

VOCAB, LENGTH = 29, 11


def config(**changes):
    sizes = {"vocab_size": VOCAB, "context_length": 13, "dim": 24, "layers": 3, "heads": 6, "hidden_dim": 17}
    return ModelConfig(**sizes | changes)


def spread(model):
    """Weights large enough that attention is far from even, in float64."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.dim() > 1 else 1.0))
    return model.double()


def decoder(**changes):
    return spread(Decoder(config(**changes))).eval()


def text(batch=2, length=LENGTH):
    return torch.randint(VOCAB, (batch, length))


def looking_at(*targets, key_len=None, mask=None, **reads):
    """What heads saw that put all weight on one key each: targets[head][query], or None to look evenly."""
    length = len(targets[0])
    key_len = length if key_len is None else key_len
    query = torch.zeros(1, len(targets), length, key_len, dtype=torch.float64)
    for head, keys in enumerate(targets):
        for place, key in enumerate(keys):
            if key is not None:
                query[:, head, place, key] = 1000.0
    key = torch.eye(key_len, dtype=torch.float64).expand(1, len(targets), -1, -1)
    seen = observe(query, key, mask=mask, scale=1.0)
    return Recorded(seen.query, seen.key, seen.scoring, **reads)
