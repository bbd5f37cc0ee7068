"""The public names and where they come from: all that `import regard` offers, loaded when one is asked for.

The changes to heads are documented in `regard.interventions`; `regard.Ablate` and so on are short for them.
"""

from regard.biases import Alibi, Bias, RelativeBias
from regard.cache import Cache, LayerCache
from regard.configuration import ModelConfig
from regard.embedding import embed, nearest
from regard.feed_forward import FeedForward
from regard.functional import Plan, QuadraticMemoryWarning, attention, attention_with_lse, plan
from regard.generation import TextStream, generate, generate_batch, sample, translate
from regard.interventions import Ablate, HideKey, Replace, Scale
from regard.kernels import KernelError
from regard.layers import Block, MultiHeadAttention, TokenEmbedding
from regard.masks import Band, Causal, Chunk, Dense, Document, Mask, Padding, Prefix, Strided, Tile, Where, Window
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, MaskedLanguageModel
from regard.observation import (
    Compare,
    Distance,
    Entropy,
    Image,
    Mass,
    MaxScore,
    Observation,
    PerKey,
    PerQuery,
    Pyramid,
    Received,
    Share,
    Spread,
    Statistic,
    Top,
    Viewers,
    Visible,
    observe,
)
from regard.positions import (
    DynamicScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Sinusoidal,
    YarnScaling,
)
from regard.recording import Recording, gather, intervene, load_recording, record
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
    "Compare",
    "Decoder",
    "Dense",
    "Distance",
    "Document",
    "DynamicScaling",
    "Encoder",
    "EncoderDecoder",
    "Entropy",
    "FeedForward",
    "HideKey",
    "Image",
    "KernelError",
    "LayerCache",
    "LayoutWarning",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "Mask",
    "MaskedLanguageModel",
    "Mass",
    "MaxScore",
    "ModelConfig",
    "MultiHeadAttention",
    "Observation",
    "Padding",
    "PerKey",
    "PerQuery",
    "Plan",
    "Prefix",
    "Pyramid",
    "QuadraticMemoryWarning",
    "Received",
    "Recording",
    "RelativeBias",
    "Replace",
    "Rotary",
    "Scale",
    "ShapeError",
    "Share",
    "Sinusoidal",
    "Spread",
    "Statistic",
    "Step",
    "Steps",
    "Strided",
    "TextStream",
    "Tile",
    "TokenEmbedding",
    "Top",
    "Viewers",
    "Visible",
    "Where",
    "Window",
    "YarnScaling",
    "attention",
    "attention_with_lse",
    "embed",
    "gather",
    "generate",
    "generate_batch",
    "intervene",
    "load",
    "load_recording",
    "nearest",
    "observe",
    "plan",
    "record",
    "sample",
    "steps",
    "translate",
]
