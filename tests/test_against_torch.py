"""torch as the judge: scaled_dot_product_attention for what it can say, FlexAttention (eager) for the rest."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from cases import BATCH, GRID, HEAD_DIM, HEADS, KEY_LEN, ON_A_CPU, QUERY_LEN, fixed_masks, tensors
from comparing import assert_close
from regard.biases import Alibi
from regard.functional import attention, attention_with_lse
from regard.kernels import KernelError
from regard.masks import Causal, Document, Padding, Prefix, Strided, Window

every_kernel = pytest.mark.parametrize("kernel", ON_A_CPU)


def gradients(output, inputs):
    factors = torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)
    return torch.autograd.grad((output * factors).sum(), inputs, retain_graph=True)


def compare(ours, theirs, inputs, what=""):
    assert_close(ours, theirs, f"{what} output")
    for name, found, expected in zip("qkvb", gradients(ours, inputs), gradients(theirs, inputs), strict=False):
        assert_close(found, expected, f"{what} gradient of {name}")


def math_sdpa(*arguments, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*arguments, **options)


# --- scaled_dot_product_attention ---------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("scale", [None, 0.3])
def test_without_a_mask(kernel, scale):
    inputs = tensors()
    compare(attention(*inputs, scale=scale, kernel=kernel), math_sdpa(*inputs, scale=scale, enable_gqa=True), inputs)


@every_kernel
@pytest.mark.parametrize(("query_len", "key_len"), [(7, 7), (7, 11), (11, 7)])
def test_its_is_causal_is_our_causal_at_offset_0(kernel, query_len, key_len):
    inputs = tensors(query_len=query_len, key_len=key_len)
    theirs = math_sdpa(*inputs, is_causal=True, enable_gqa=True)
    compare(attention(*inputs, mask=Causal(offset=0), kernel=kernel), theirs, inputs)


@every_kernel
def test_its_causal_lower_right_is_our_causal(kernel):
    inputs = tensors(value_dim=HEAD_DIM, kv_heads=HEADS)
    theirs = F.scaled_dot_product_attention(*inputs, attn_mask=causal_lower_right(QUERY_LEN, KEY_LEN))
    compare(attention(*inputs, mask=Causal(), kernel=kernel), theirs, inputs)


@every_kernel
@pytest.mark.parametrize("name", fixed_masks())
def test_every_mask_as_a_bool_tensor(kernel, name):
    ruled = fixed_masks()[name]
    inputs = tensors()
    theirs = math_sdpa(*inputs, attn_mask=ruled.cells(GRID), enable_gqa=True)
    compare(attention(*inputs, mask=ruled.mask, kernel=kernel), theirs, inputs, name)


@every_kernel
def test_a_float_mask_is_our_bias(kernel):
    bias = torch.randn(BATCH, HEADS, QUERY_LEN, KEY_LEN, dtype=torch.float64, requires_grad=True)
    inputs = tensors()
    ours = attention(*inputs, bias=bias, kernel=kernel)
    theirs = math_sdpa(*inputs, attn_mask=bias, enable_gqa=True)
    compare(ours, theirs, (*inputs, bias))


# --- FlexAttention, not compiled ----------------------------------------------------------------------------------

IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3]])

MASKS = {  # ours, theirs as mask_mod(b, h, q, k)
    "causal": (Causal(offset=0), lambda b, h, q, k: q >= k),
    "causal window": (Causal(0) & Window(3, 0), lambda b, h, q, k: (q >= k) & (q - k < 3)),
    "window": (Window(2, 0), lambda b, h, q, k: (q - k).abs() < 2),
    "prefix": (Causal(0) | Prefix(4), lambda b, h, q, k: (q >= k) | (k < 4)),
    "streaming": (Causal(0) & (Window(3, 0) | Prefix(2)), lambda b, h, q, k: (q >= k) & ((q - k < 3) | (k < 2))),
    "documents": (Causal(0) & Document(IDS), lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k])),
    "padding": (Padding([11, 4]), lambda b, h, q, k: k < torch.tensor([11, 4])[b]),
    "strided": (Strided(3, 0), lambda b, h, q, k: (q - k) % 3 == 0),
    "not causal": (~Causal(0), lambda b, h, q, k: q < k),
}

SLOPES = torch.tensor([2.0 ** (-8 * (h + 1) / 4) for h in range(4)], dtype=torch.float64)

SCORES = {  # our parts, theirs as score_mod(score, b, h, q, k)
    "softcap": ({"softcap": 1.5}, lambda s, b, h, q, k: 1.5 * torch.tanh(s / 1.5)),
    "alibi": ({"bias": Alibi(slopes=SLOPES)}, lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()),
    "softcap, then alibi": (
        {"softcap": 0.7, "bias": Alibi(slopes=SLOPES)},
        lambda s, b, h, q, k: 0.7 * torch.tanh(s / 0.7) - SLOPES[h] * (q - k).abs(),
    ),
}


def flex(inputs, mask_mod=None, score_mod=None):
    query, key, _ = inputs
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(
            mask_mod, query.shape[0], query.shape[1], query.shape[2], key.shape[2], device="cpu"
        )
    output, auxiliary = flex_attention(
        *inputs, score_mod=score_mod, block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return output, auxiliary.lse


def eager_inputs():
    return [x.detach() for x in tensors(query_len=11, heads=4, kv_heads=2, head_dim=8, value_dim=8)]


def compare_with_flex(kernel, parts, mask_mod=None, score_mod=None):
    """Output and lse. Its gradient is not defined on CPU; ours is judged by finite differences in test_reference."""
    inputs = eager_inputs()
    output, lse = flex(inputs, mask_mod, score_mod)
    try:
        assert_close(attention(*inputs, **parts, kernel=kernel), output, "output")
        ours = attention_with_lse(*inputs, **parts, kernel=kernel)
    except KernelError:
        return
    assert_close(ours.output, output, "output")
    assert_close(ours.lse, lse.to(ours.lse.dtype), "lse", tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@every_kernel
@pytest.mark.parametrize("name", MASKS)
def test_masks_against_flex_attention(kernel, name):
    mask, mask_mod = MASKS[name]
    compare_with_flex(kernel, {"mask": mask}, mask_mod)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@every_kernel
@pytest.mark.parametrize("masked", ["causal", "documents", None])
@pytest.mark.parametrize("name", SCORES)
def test_scores_against_flex_attention(kernel, name, masked):
    parts, score_mod = SCORES[name]
    mask, mask_mod = MASKS[masked] if masked else (None, None)
    compare_with_flex(kernel, parts | {"mask": mask}, mask_mod, score_mod)


def test_an_empty_row_of_flex_attention_has_lse_minus_inf_as_ours():
    inputs = eager_inputs()
    _, lse = attention_with_lse(*inputs, mask=~Causal(0))
    assert lse[..., -1].eq(-math.inf).all()
