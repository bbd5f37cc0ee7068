"""The weights of an attention call and statistics of them, recomputed exactly from query, key and log-sum-exp.

    weight[i, j] = exp(score[i, j] - lse[i])

Any weight can be recomputed from this, so nothing of size query_len x key_len is ever stored. A *statistic* reads each
tile of weights once and accumulates a few numbers per query, key or pixel; several statistics share one pass:

    seen = regard.observe(query, key, mask=Causal())
    entropy, top, picture = seen.gather(Entropy(), Top(8), Image(512))

`seen.entropy()` computes a single one. Tiles that are empty under the mask are skipped. What makes a pass cheap:

    weights   cost one matrix product and one exp2 if scores are plain dot products (`tile`)
    lse       comes from the same pass if a tile holds all keys that its queries see, up to `MAX_WHOLE_ROW_KEYS`. Longer
              texts need a separate pass for it; if only the entropy is wanted, one fused call of attention with the
              keys as values gives both: H = lse - sum_j w s = lse - scale q . (sum_j w k_j) (`passes`, `lse`)
    tiles     share one buffer, and statistics are computed while a tile is in the processor's cache (`tiling`)

If gradients are recorded, every statistic is differentiable: tiles are recomputed in the backward pass, so an entropy
penalty in a loss needs O(length) memory too (`streaming`).
"""

from regard.observation.comparing import Compare, Comparison
from regard.observation.images import Image, Pyramid
from regard.observation.measures import (
    Attended,
    Distance,
    Distances,
    Entropy,
    Largest,
    Mass,
    MaxScore,
    Received,
    Share,
    Spread,
    Top,
    Viewers,
    Visible,
)
from regard.observation.observation import Observation, observe
from regard.observation.observed import ObservedCall
from regard.observation.spans import MAX_NUMBERS_AT_ONCE, Selection
from regard.observation.statistic import PerKey, PerQuery, Statistic
from regard.observation.tile import ScoreTile

__all__ = [
    "MAX_NUMBERS_AT_ONCE",
    "Attended",
    "Compare",
    "Comparison",
    "Distance",
    "Distances",
    "Entropy",
    "Image",
    "Largest",
    "Mass",
    "MaxScore",
    "Observation",
    "ObservedCall",
    "PerKey",
    "PerQuery",
    "Pyramid",
    "Received",
    "ScoreTile",
    "Selection",
    "Share",
    "Spread",
    "Statistic",
    "Top",
    "Viewers",
    "Visible",
    "observe",
]
