"""Rotary positions: query and key rotated by an angle proportional to the position."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from regard import hints
from regard.graphs import is_of_many
from regard.hints import hinted
from regard.hooks import Share, share_of
from regard.positions.angles import (
    MAX_PAST_ROWS,
    MIN_GROWTH_ROWS,
    angles_between,
    positions_from,
    positions_of,
    span,
)
from regard.positions.scaling import Scaling, Unscaled
from regard.shapes import check_real, check_whole, is_plain, kind


class _Turns(NamedTuple):
    """Cosines and sines for the positions `first` to `end - 1`, valid for one deciding length.

    `table` is [2, rows, rotary_dim]: the cosine of every feature's angle, and the sine with its sign in that feature,
    minus for the first feature of a pair and plus for the second.
    """

    table: Tensor
    first: int
    end: int
    deciding_length: int


@hinted(hints.ROTARY)
class Rotary(nn.Module):
    """Rotates query and key so that their product depends on the distance between them.

    For each pair (a, b) of features at position p, with `angle = p * frequency[pair]`:

        a' = a * cos(angle) - b * sin(angle)
        b' = b * cos(angle) + a * sin(angle)

    Rotate the query and the key, never the value, and rotate a key before it enters a cache.

    `layout` determines which features form pairs. The two layouts differ by a fixed permutation of the features, so a
    model trained with one does not work with the other:

        "half"         (i, i + rotary_dim // 2)   GPT-NeoX; Llama, Mistral and Qwen in transformers
        "interleaved"  (2 i, 2 i + 1)             the paper (RoFormer), GPT-J, Llama in Meta's own code

    Shapes:
        x        [batch, heads, length, head_dim]
        returns  [batch, heads, length, head_dim], in x's dtype

    Args:
        head_dim: features per head.
        theta: base of the frequencies, above 1; default 10,000.
        rotary_dim: number of leading features that are rotated, even; the others pass unchanged. Default: all.
        layout: "half" (default) or "interleaved".
        scaling: a `Scaling`, for contexts longer than in training; default: none.

    Raises:
        TypeError: theta is not a number, scaling is not a Scaling, or x is not floating point.
        ValueError: a size or offset is not a whole number, rotary_dim is odd or above head_dim, layout is unknown, x is
            not [batch, heads, length, head_dim], or offset is negative or does not have one number per batch index.

    Notes:
        Cosines and sines are cached for all positions seen so far, on the device of the last input, in float32 or
        wider. They are not buffers, so nothing that converts, saves or synchronises a module's tensors affects them,
        and `.to(torch.bfloat16)` does not degrade them. One module may be shared by all layers of a model.

        An offset tensor is read on the host: with a GPU, keep it on the CPU to avoid a synchronisation.

    >>> rotary = Rotary(2)
    >>> east = torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2)
    >>> rotary(east)
    tensor([[[[ 1.0000,  0.0000],
              [ 0.5403,  0.8415],
              [-0.4161,  0.9093]]]])

    References:
        Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", section 3.2, arXiv:2104.09864
    """

    def __init__(
        self,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_dim: int | None = None,
        layout: Literal["half", "interleaved"] = "half",
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__()
        check_real("Rotary", "theta", theta, above=1.0)
        self.head_dim = check_whole("Rotary", "head_dim", head_dim)
        self.theta = theta
        self.rotary_dim = head_dim if rotary_dim is None else check_whole("Rotary", "rotary_dim", rotary_dim, least=2)
        self.layout = layout
        self.scaling = scaling
        if self.rotary_dim % 2:
            raise ValueError(
                f"Rotary: rotary_dim must be even (features rotate in pairs), got rotary_dim={self.rotary_dim} with "
                f"head_dim={head_dim}" + ("\n  hint: rotary_dim is head_dim by default" if rotary_dim is None else "")
            )
        if self.rotary_dim > head_dim:
            raise ValueError(
                f"Rotary: rotary_dim must be at most head_dim, got rotary_dim={rotary_dim} with head_dim={head_dim}"
            )
        if layout not in ("half", "interleaved"):
            raise ValueError(f'Rotary: layout must be "half" or "interleaved", got {layout!r}')
        if scaling is not None and not isinstance(scaling, Scaling):
            raise TypeError(f"Rotary: scaling must be a Scaling such as LinearScaling(2.0), got {scaling!r}")
        self._scaling = Unscaled() if scaling is None else scaling
        self._turns = _Turns(torch.empty(2, 0, self.rotary_dim, device="cpu"), first=0, end=0, deciding_length=-1)
        self._shared: tuple[Share | None, Tensor] = None, self._turns.table

    def forward(self, x: Tensor, *, offset: int | Tensor = 0) -> Tensor:
        """Rotates a query or key whose first token has position `offset`.

        Args:
            x: query or key [batch, heads, length, head_dim].
            offset: position of the first token; an int, or an int tensor [batch] if batch indices start at different
                positions, as in a cache of texts of different lengths.
        """
        if not is_plain(x):
            raise TypeError(
                f"Rotary: x must be a tensor [batch, heads, length, head_dim={self.head_dim}], got {kind(x)}"
            )
        if x.dim() != 4 or x.shape[-1] != self.head_dim:
            raise ValueError(f"Rotary: x must be [batch, heads, length, head_dim={self.head_dim}], got {list(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"Rotary: x must be floating point, got {x.dtype}")
        length, share = x.shape[2], share_of(self)
        if share is not None:
            cosine, sine = self._turns_of(share, offset, x).unbind()
        elif not isinstance(offset, Tensor):
            first, end = span("Rotary", offset, length)
            turns = self._turns_for(first, end, x)
            cosine, sine = turns.table[:, first - turns.first : end - turns.first].unbind()
        else:
            turns = self._turns_for(*span("Rotary", offset, length, batch=x.shape[0]), x)
            rows = positions_from(offset, length, x.device) - turns.first
            cosine, sine = turns.table[:, rows].unsqueeze(2).unbind()  # [batch, 1, length, rotary_dim]

        whole = self.rotary_dim == self.head_dim
        turning = x if whole else x[..., : self.rotary_dim]
        # the other feature of each pair; its sign is in the sine
        if self.layout == "half":
            partner = turning.roll(self.rotary_dim // 2, dims=-1)
        else:
            partner = torch.unflatten(turning, -1, (-1, 2)).flip(-1).flatten(-2)
        # float32 cosines widen a half-precision x, so that the result is rounded only once
        turned = turning * cosine
        turned = turned + partner * sine if is_of_many(x) else turned.addcmul_(partner, sine)
        turned = turned.to(x.dtype)
        return turned if whole else torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)

    def frequencies(self, length: int) -> tuple[Tensor, float]:
        """The inverse frequencies, float64 [rotary_dim // 2], and the attention factor at a length."""
        return self._scaling.frequencies(self.rotary_dim, self.theta, length)

    def _turns_for(self, first: int, end: int, x: Tensor) -> _Turns:
        """Cosines and sines for the positions from first to end - 1, from the cache if possible."""
        turns = self._turns
        dtype = torch.promote_types(x.dtype, torch.float32)
        deciding_length = self._scaling.deciding_length(end)
        usable = (
            turns.deciding_length == deciding_length and turns.table.dtype == dtype and turns.table.device == x.device
        )
        if usable and turns.first <= first and end <= turns.end:
            return turns

        frequencies, attention_factor = self.frequencies(end)

        def make(first: int, end: int) -> Tensor:
            angles = angles_between(first, end, frequencies)
            return self._signed(angles, attention_factor).to(device=x.device, dtype=dtype)

        # a table created in inference_mode could not be used in training later
        with torch.inference_mode(False):
            if usable and first <= turns.end and turns.first <= end:
                start = first if first - turns.first > MAX_PAST_ROWS else min(first, turns.first)
                if end > turns.end:
                    end = max(end, turns.end + len(turns.table[0]) // 4 + MIN_GROWTH_ROWS)
                kept = turns.table[:, max(0, start - turns.first) :]
                stop = max(end, turns.end)
                table = torch.cat((make(start, max(start, turns.first)), kept, make(turns.end, stop)), dim=1)
                first, end = start, stop
            else:
                # a first call, another dtype or device, other frequencies, or a jump: exactly the requested rows, since
                # a jump must not fill the gap, and frequencies that change with every token must not redo earlier rows
                table = make(first, end)
        # a single assignment, so that at worst two threads both do the work
        self._turns = _Turns(table, first, end, deciding_length)
        return self._turns

    def _turns_of(self, share: Share, offset: int | Tensor, x: Tensor) -> Tensor:
        """Cosines and sines for the tokens that this process holds of a longer text: [2, length, rotary_dim]."""
        positions = positions_of("Rotary", share, offset, x.shape[2], torch.device("cpu"))
        dtype = torch.promote_types(x.dtype, torch.float32)
        known, table = self._shared
        if known != share or table.dtype != dtype or table.device != x.device:
            with torch.inference_mode(False):
                frequencies, attention_factor = self.frequencies(share.length)
                angles = torch.outer(positions.double(), frequencies)
                table = self._signed(angles, attention_factor).to(device=x.device, dtype=dtype)
            self._shared = share, table
        return table

    def _signed(self, angles: Tensor, attention_factor: float) -> Tensor:
        """The table of `_Turns` for angles [rows, rotary_dim // 2]."""
        cosine, sine = angles.cos() * attention_factor, angles.sin() * attention_factor
        pair_axis = -2 if self.layout == "half" else -1
        signed = torch.stack((torch.stack((cosine, cosine), pair_axis), torch.stack((-sine, sine), pair_axis)))
        return signed.flatten(-2)

    def extra_repr(self) -> str:
        parts = [str(self.head_dim), f"theta={self.theta}"]
        if self.rotary_dim != self.head_dim:
            parts.append(f"rotary_dim={self.rotary_dim}")
        parts.append(f"layout={self.layout!r}")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling}")
        return ", ".join(parts)
