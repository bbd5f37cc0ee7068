"""Keeps q and k of every attention layer while a model runs, so that it can be asked afterwards what it attended to;
and changes single heads while it runs.

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

    watching       names the attention layers of a model, wrapped or not, and stands around them (`regard.hooks`)
    views          masks and biases of some heads, of several calls, without one key
    interventions  changes to a head
    gathering      statistics of every layer, and nothing else kept
    texts          what one layer saw of one text
    reading        what a call reads: tokens, an image, another sequence
    kinds          what a head can be called where there are no tokens
    summary        what a head does, in a few numbers
    file           a recording as a safetensors file
    recorder       record, Recording, load_recording
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
