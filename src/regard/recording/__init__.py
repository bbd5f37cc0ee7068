"""Records what the attention layers of a running model attend to, and changes single heads.

Query and key of every layer are kept, so that it can be asked afterwards what it attended to.

    with regard.record(model) as recording:
        model(tokens)
    recording["layers.3"].head(5).entropy()
    recording.save("run.safetensors")

The model runs as fast as ever: nothing is computed until something is asked, and what is kept is what the layer made,
not a copy, with lse where the layer's kernel had it on the way. (A tensor into which somebody writes later, such as a
static cache, is copied.)

A layer may be called several times. While a model generates, the keys of a call are those of the call before and the
new ones; such calls are one text, read in pieces, and its keys are kept once. `recording[layer]` is the last text a
layer saw, whole: all its queries and all its keys. `recording.calls(layer)` are its calls, one by one.

    text in pieces:  queries 0-4 | 5 | 6      keys 0-4 | 0-5 | 0-6      a query sees what its own call had

Where it is known beforehand what will be asked, `gather` asks while the model runs and keeps the answers alone:

    with regard.gather(model, Entropy(), Top(8)) as gathered:
        model(tokens)
    entropy, top = gathered["layers.3"]

A head is changed by `intervene`, through the same seam:

    with regard.intervene(model, Ablate("layers.3", 5), HideKey("layers.4", 0, key=7)):
        model(tokens)

Here belongs what hooks take from a running model or change in it. Where they stand is decided in `regard.hooks`, what a
statistic is in `regard.observation`.
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
