"""What can be done to a head while a model runs: the changes that `regard.intervene` takes.

    with regard.intervene(model, regard.interventions.Ablate("layers.3", 5)):
        model(tokens)

Ablate      its output is zero
Scale       its output is multiplied by a factor
Replace     its output is replaced by a tensor, or by a function of it
HideKey     none of its queries sees one key

A change of your own derives from `Intervention`: `before` changes how its scores are made, `after` changes its output.
"""

from regard.recording.interventions import Ablate, HideKey, Intervention, Replace, Scale

__all__ = ["Ablate", "HideKey", "Intervention", "Replace", "Scale"]
