"""Where a token stands: sinusoidal, learned and rotary positions.

Attention alone sees a set: permute the keys with their values and the output is the same. Order has to be put in.

**Added to the token.** `Sinusoidal` and `Learned` make one vector per position, added to the token's embedding once,
below the first block. Both speak of absolute places: "I am token 17".

**Turned into query and key.** `Rotary` takes the features of a query or a key in pairs and turns each pair, as a point
in the plane, by an angle that grows with the position p. With `R(p)` for all these turns together,

    (R(m) query) · (R(n) key)  =  query · (R(n - m) key)

so a score depends on the distance of query and key alone, and the length of every vector stays what it was. Pair i
turns by `p * frequency[i]` radians, where `frequency[i] = theta ** (-2 i / rotary_dim)`: the first pair turns by one
radian per token, the last ones so slowly that they tell far from near.

A model trained up to some length has never seen the angles beyond it. The scalings below bring them back into the
range that it knows, by slowing the turns; they differ in which pairs they slow, and by how much:

| scaling | which pairs it slows | depends on the length |
|---|---|---|
| `LinearScaling` | all by the same factor | no |
| `DynamicScaling` | the slower the pair, the more; the first not at all | yes, beyond the original context |
| `YarnScaling` | those that turn seldom; and it sharpens the softmax | no |
| `Llama3Scaling` | those that turn seldom, with another ramp up to the others | no |

**Precision.** At position 100,000 the angle of the first pair is 100,000 radians. float32 keeps it to 0.004, bfloat16
to 256, which is no angle at all. So angles are always computed in float64, and only the cosine and sine are rounded:
to float32 for inputs of at most that width, not at all for float64. Converting a module never rounds a table twice,
because tables are made again from float64.

Here belongs what says where a token stands. A bias that grows with distance is in `regard.biases`.
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
