"""Text from a language model: which token comes next, one at a time, with the cache."""

from regard.generation.sampling import sample
from regard.generation.streaming import TextStream
from regard.generation.writing import generate, generate_batch

__all__ = ["TextStream", "generate", "generate_batch", "sample"]
