"""Weights of other libraries in regard's layers and models.

Libraries store the same attention in many ways: with different names, with query, key and value in one matrix or in
three, and with matrices transposed or not:

    nn.Linear, regard        [output, input]    x @ W^T
    Conv1D (GPT-2)           [input, output]    x @ W
    one matrix per head      [heads, input, head_dim], for query, key and value each

| function | what it reads |
|---|---|
| `from_torch` | `nn.MultiheadAttention`, Transformer layers of torch.nn, and stacks of these |
| `from_fused` | one causal attention layer of GPT-2, minGPT or nanoGPT: `c_attn` and `c_proj` |
| `from_annotated` | one attention layer of four linear maps: `linears.0` to `linears.3` |
| `from_heads` | one attention layer with a matrix per head |
| `from_gpt` | a whole GPT-2, minGPT or nanoGPT |
| `from_transformers` | a GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma or BERT of transformers |

Each library or family of layouts has one file here: a table of names, theirs on the left, regard's on the right, and
the settings that tensors do not contain. `renaming` does the rest.

Every result has its own copy of the numbers, with their dtype and device (Gemma's in float32). Nothing is guessed: an
unknown name, a missing tensor, or an unsupported setting that would change the result raises an error that names it.
"""

from regard.layouts.gpt import config_of, from_gpt
from regard.layouts.layers import from_annotated, from_fused, from_heads
from regard.layouts.renaming import LAYOUTS, LEFT_OUT, Renamed
from regard.layouts.torch_nn import from_torch
from regard.layouts.transformers import ARCHITECTURES, Architecture, from_state_dict, from_transformers

__all__ = [
    "ARCHITECTURES",
    "LAYOUTS",
    "LEFT_OUT",
    "Architecture",
    "Renamed",
    "config_of",
    "from_annotated",
    "from_fused",
    "from_gpt",
    "from_heads",
    "from_state_dict",
    "from_torch",
    "from_transformers",
]
