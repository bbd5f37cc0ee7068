"""regard inside transformers: one call, and every architecture on its attention interface runs on `regard.attention`.

    regard.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="regard")

Three things are handed over there, and each has a file: *attention*, of the query, key and value of a layer (`attend`);
a *mask*, as a function of batch row, head, query and key, with lengths, beginnings and padding
(`mask_for_transformers`); and *weights*, which a layer returns beside its output and which end up in
``outputs.attentions`` (`LazyWeights`).

    lazy       a tensor that holds no numbers until somebody asks for them
    masks      a mask that transformers takes for a bool tensor
    parts      a tensor of which any rectangle can be made; and the gradient of one
    weights    the weights of one layer's call
    gradients  attention whose weights lie on the way to its output
    reading    transformers' mask functions as masks
    symbols    the same inside a graph of torch.compile's
    interface  what a layer calls

The mask is the heart. transformers builds masks of query_len x key_len from its mask functions. Here the function is
*read*: causal, window, chunk, packed texts, padding and what they are composed of become regard's own masks, whose
empty tiles cost nothing. Each such reading was compared with the function itself, cell by cell, before it is trusted;
a function that is not known, or no longer does what it did, is asked tile by tile instead: slower, and as exact.

What is not understood and would change the result raises an error.
"""

from inspect import signature

from regard.extras import how
from regard.huggingface.interface import HARMLESS, attend
from regard.huggingface.masks import LazyMask
from regard.huggingface.reading import mask_for_transformers
from regard.huggingface.weights import LazyWeights

__all__ = ["HARMLESS", "NAME", "LazyMask", "LazyWeights", "attend", "mask_for_transformers", "register"]

NAME = "regard"
"""What to pass as ``attn_implementation``."""


def register() -> None:
    """Makes ``attn_implementation="regard"`` known to transformers; a second call changes nothing.

    Raises:
        ImportError: transformers is missing, or older than 5.4, which gives masks in another way.

    Then ``AutoModel.from_pretrained(name, attn_implementation="regard")``; for a model that is there already,
    ``model.set_attn_implementation("regard")``.
    """
    needed = f"regard.huggingface needs transformers, 5.4 or newer: {how('hf')}"
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils
    except ImportError as error:
        raise ImportError(f"{needed} ({error})") from error
    if "q_length" not in signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"{needed} (there is {__version__})")
    # Under the same key: a key that is known for attention alone loses padding and causality without a word.
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_for_transformers)
