"""Text from a language model: which token comes next, one at a time, with the cache."""

from regard.generation.sampling import sample
from regard.generation.writing import generate

__all__ = ["generate", "sample"]
