"""regard inside transformers: one call, and every architecture on its attention interface runs on `regard.attention`.

    regard.huggingface.register()
    model = AutoModel.from_pretrained(name, attn_implementation="regard")

The interface has three parts, each in its own file: *attention* for the query, key and value of a layer (`attend`); a
*mask*, given as a function of batch index, head, query and key, with lengths, offsets and padding
(`mask_for_transformers`); and *weights*, which a layer returns besides its output and which end up in
``outputs.attentions`` (`LazyWeights`).

Only this folder depends on transformers, and no other file imports it.

transformers builds masks of query_len x key_len from its mask functions. Here the function is *translated*: causal,
window, chunk, packed texts, padding and their combinations become regard masks, whose empty tiles are skipped. Each
translation is used only after it agreed with the function itself, cell by cell, on examples. A function that is
unknown, or has changed, is evaluated tile by tile instead: slower, equally exact.

Anything that is not understood and could change the result raises an error.
"""

from regard.huggingface.interface import HARMLESS, attend
from regard.huggingface.masks import LazyMask
from regard.huggingface.reading import mask_for_transformers
from regard.huggingface.registering import NAME, OLDEST_VERSION, register
from regard.huggingface.weights import LazyWeights

__all__ = [
    "HARMLESS",
    "NAME",
    "OLDEST_VERSION",
    "LazyMask",
    "LazyWeights",
    "attend",
    "mask_for_transformers",
    "register",
]
