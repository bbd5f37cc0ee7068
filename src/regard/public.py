"""The public names and where they come from: all that `import regard` offers, loaded when one is asked for."""

from regard.biases import Alibi, Bias, RelativeBias
from regard.cache import Cache, LayerCache
from regard.functional import Plan, SquareWarning, attention, attention_with_lse, plan
from regard.generation import generate, sample
from regard.kernels import KernelError
from regard.layers import Block, FeedForward, MultiHeadAttention, TokenEmbedding
from regard.masks import Band, Causal, Chunk, Dense, Document, Mask, Padding, Prefix, Strided, Tile, Where, Window
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, MaskedLanguageModel, ModelConfig
from regard.observation import Observation, observe
from regard.positions import (
    DynamicScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Sinusoidal,
    YarnScaling,
)
from regard.recording import Ablate, HideKey, Recording, Replace, Scale, gather, intervene, load_recording, record
from regard.reference import AttentionOutput
from regard.scores import Additive
from regard.shapes import LayoutWarning, ShapeError
from regard.stepwise import Step, Steps, steps
from regard.training.checkpoint import load

__all__ = [
    "Ablate",
    "Additive",
    "Alibi",
    "AttentionOutput",
    "Band",
    "Bias",
    "Block",
    "Cache",
    "Causal",
    "Chunk",
    "Classifier",
    "Decoder",
    "Dense",
    "Document",
    "DynamicScaling",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "HideKey",
    "KernelError",
    "LayerCache",
    "LayoutWarning",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "Mask",
    "MaskedLanguageModel",
    "ModelConfig",
    "MultiHeadAttention",
    "Observation",
    "Padding",
    "Plan",
    "Prefix",
    "Recording",
    "RelativeBias",
    "Replace",
    "Rotary",
    "Scale",
    "ShapeError",
    "Sinusoidal",
    "SquareWarning",
    "Step",
    "Steps",
    "Strided",
    "Tile",
    "TokenEmbedding",
    "Where",
    "Window",
    "YarnScaling",
    "attention",
    "attention_with_lse",
    "gather",
    "generate",
    "intervene",
    "load",
    "load_recording",
    "observe",
    "plan",
    "record",
    "sample",
    "steps",
]
