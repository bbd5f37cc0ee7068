"""Records what the attention layers of a running model attend to, and changes single heads.

Query and key of every layer are kept, so that any weight or statistic can be computed afterwards.

    with regard.record(model) as recording:
        model(tokens)
    recording["layers.3"].head(5).entropy()
    recording.save("run.safetensors")

The model runs at full speed: weights and statistics are computed only on request. The layer's own tensors are kept, not
copies, with lse if the kernel computed it anyway. (Tensors written to later, such as a static cache, are copied.)

A layer may be called several times. During generation, the keys of a call are those of the previous call and the new
ones; such calls form one text, read in pieces, and its keys are kept once. `recording[layer]` is the whole last text of
a layer: all queries and all keys. `recording.calls(layer)` are the single calls.

    text in pieces:  queries 0-4 | 5 | 6      keys 0-4 | 0-5 | 0-6      a query sees what its own call had

If you know the statistics in advance, `gather` computes them during the forward pass and keeps only the results:

    with regard.gather(model, Entropy(), Top(8)) as gathered:
        model(tokens)
    entropy, top = gathered["layers.3"]

`intervene` changes single heads, through the same hooks:

    with regard.intervene(model, Ablate("layers.3", 5), HideKey("layers.4", 0, key=7)):
        model(tokens)

This folder holds the hooks that read or change a running model. How hooks are called is decided in `regard.hooks`; what
a statistic is, in `regard.observation`.
"""

from regard.recording.gathering import Gathered, gather
from regard.recording.interventions import Ablate, HideKey, Intervention, Replace, Scale, intervene
from regard.recording.recorder import Recording, load_recording, record
from regard.recording.summary import HeadSummary, Summary
from regard.recording.texts import Recorded

__all__ = [
    "Ablate",
    "Gathered",
    "HeadSummary",
    "HideKey",
    "Intervention",
    "Recorded",
    "Recording",
    "Replace",
    "Scale",
    "Summary",
    "gather",
    "intervene",
    "load_recording",
    "record",
]
