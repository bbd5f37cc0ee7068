"""regard: attention for PyTorch that is exact, fast with any mask, and open to look into at any length.

attention, attention_with_lse, plan     the function, its log-sum-exp, and what a call would cost
Causal, Window, Prefix, Document, ...   masks: who may attend to whom; they compose with & | ~
Alibi, RelativeBias                     biases: what is added to a score
observe, record, gather, steps          what a call, a model and a layer did
intervene                               a model with single heads changed
MultiHeadAttention, Block, ...          layers
Encoder, Decoder, EncoderDecoder        models, from one ModelConfig
regard.huggingface                      regard inside transformers
regard.plots                            figures
regard.layouts                          other libraries' weights in regard's layers and models
regard.training                         tokenizer, data, loop and files of a language model
"""

from regard import layouts as layouts
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
from regard.shapes import ShapeError
from regard.steps import Step, Steps, steps

__version__ = "0.1.0"

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
    "load_recording",
    "observe",
    "plan",
    "record",
    "sample",
    "steps",
]
