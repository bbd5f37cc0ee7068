"""Positions of tokens: sinusoidal, learned and rotary.

Attention alone is permutation-invariant: permute the keys with their values and the output is the same. Order has to be
added.

**Added to the embedding.** `Sinusoidal` and `Learned` have one vector per position, added to the token's embedding
once, before the first block. Both encode absolute positions.

**Rotations of query and key.** `Rotary` rotates each pair of features of a query or key, as a point in the plane, by an
angle proportional to the position p. If `R(p)` are all these rotations together,

    (R(m) query) · (R(n) key)  =  query · (R(n - m) key)

so a score depends only on the distance between query and key, and rotation preserves the norm. Pair i rotates by
`p * frequency[i]` radians, with `frequency[i] = theta ** (-2 i / rotary_dim)`: the first pair rotates by one radian per
token, the last ones so slowly that they distinguish far from near.

A model trained up to some length has never seen the angles beyond it. The scalings below map them back into the trained
range by slowing the rotation; they differ in which pairs they slow, and by how much:

| scaling | which pairs it slows | depends on the length |
|---|---|---|
| `LinearScaling` | all by the same factor | no |
| `DynamicScaling` | the slower the pair, the more; the first not at all | yes, beyond the original context |
| `YarnScaling` | the slow ones; it also sharpens the softmax | no |
| `Llama3Scaling` | the slow ones, with a different ramp to the others | no |

**Precision.** At position 100,000 the angle of the first pair is 100,000 radians, which float32 resolves to 0.004 and
bfloat16 to 256. So angles are always computed in float64, and only cosine and sine are rounded: to float32 for inputs
up to that width, not at all for float64. Converting a module never rounds a table twice, because tables are recomputed
from float64.

A bias that depends on distance is in `regard.biases`.
"""

from regard.positions.added import Learned, Sinusoidal
from regard.positions.angles import inverse_frequencies
from regard.positions.rotary import Rotary
from regard.positions.scaling import DynamicScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling

__all__ = [
    "DynamicScaling",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "Rotary",
    "Scaling",
    "Sinusoidal",
    "YarnScaling",
    "inverse_frequencies",
]
