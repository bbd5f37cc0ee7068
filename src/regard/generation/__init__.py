"""Text from a model: which token comes next, one at a time, with the cache; and whole texts, by beam search."""

from regard.generation.beams import Written, translate
from regard.generation.sampling import sample
from regard.generation.streaming import TextStream
from regard.generation.writing import generate, generate_batch

__all__ = ["TextStream", "Written", "generate", "generate_batch", "sample", "translate"]
