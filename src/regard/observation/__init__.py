"""What attention did, exactly, from q, k and one number per query.

    weight[i, j] = exp(score[i, j] - lse[i])

Any weight can be had again from that, so nothing of size query_len x key_len is ever kept. A *statistic* is told every
tile of weights once and holds a few numbers per query, per key or per pixel; several statistics share one pass:

    seen = regard.observe(query, key, mask=Causal())
    entropy, top, picture = seen.gather(Entropy(), Top(8), Image(512))

`seen.entropy()` is the same thing asked alone. Tiles that the mask calls empty are skipped. What makes a pass cheap:

    weights   cost one product and one exp2 where a score is a plain product (`tile`)
    lse       comes out of the same pass where a tile holds all that a query sees, up to `MAX_WHOLE_ROW_KEYS` keys. A
              longer text needs a pass of its own; where nothing but the entropy is wanted, one fused call of attention
              with the keys as values brings both, H = lse - sum_j w s = lse - scale q . (sum_j w k_j) (`passes`, `lse`)
    tiles     take each other's memory, and statistics are taken while a tile is in the processor's cache (`tiling`)

If query, key or whatever else makes a score wants a gradient, every statistic is differentiable: a tile's part is
computed again in the backward pass, so an entropy penalty in a loss needs memory of O(length) too (`streaming`).
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
