"""The definition of a score: stages by hand, tiles of the whole, heads that share a key; and dropout as a function."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import BATCH, GRID, HEAD_DIM, HEADS, KEY_LEN, KV_HEADS, QUERY_LEN, biases, fixed_masks, tensors
from comparing import assert_close, assert_same_cells, assert_zero
from regard.biases import Alibi, as_bias
from regard.dropout import Dropout
from regard.masks import Causal
from regard.numerics import grouped_matmul, upcast, zero_unseen
from regard.scores import Additive, Scoring
from regard.shapes import Grid

ROWS, COLUMNS = range(QUERY_LEN), range(KEY_LEN)


def scorings() -> dict[str, Scoring]:
    """One for each mask, each bias, and each other part of a score."""
    found = {name: Scoring(GRID, 0.5, mask=ruled.mask.bind(GRID)) for name, ruled in fixed_masks().items()}
    found |= {name: Scoring(GRID, 0.5, bias=as_bias(bias).bind(GRID)) for name, (bias, _) in biases().items()}
    causal, alibi = Causal().bind(GRID), Alibi(HEADS).bind(GRID)
    v = torch.linspace(-1, 1, HEADS * HEAD_DIM, dtype=torch.float64).view(HEADS, HEAD_DIM)
    return found | {
        "softcap": Scoring(GRID, 2.0, softcap=1.5),
        "all together": Scoring(GRID, -0.7, softcap=3.0, mask=causal, bias=alibi),
        "additive": Scoring(GRID, 1.0, additive=Additive(v)),
        "additive, all together": Scoring(GRID, 0.3, softcap=2.0, mask=causal, bias=alibi, additive=Additive(v)),
    }


# --- by hand ------------------------------------------------------------------------------------------------------


def test_a_score_is_capped_then_biased_then_masked():
    grid = Grid(1, 1, 2, 2)
    query, key = torch.tensor([[[[1.0, 2.0], [3.0, 0.0]]]]), torch.tensor([[[[2.0, 1.0], [0.0, 4.0]]]])
    bias = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
    scoring = Scoring(grid, 0.5, softcap=2.0, bias=as_bias(bias).bind(grid), mask=Causal().bind(grid))
    stages = list(scoring.stages(query, key, range(2), range(2)))
    # products 4, 8, 6, 0; halved 2, 4, 3, 0; 2 tanh(x/2): 1.52319, 1.92806, 1.81030, 0
    assert [stage.name for stage in stages] == ["score", "scale", "cap", "bias", "mask"]
    assert [stage.formula for stage in stages] == [
        "query @ key^T", "scores * 0.5", "2 * tanh(scores / 2)", "scores + Given(<[1, 1, 2, 2]>)",
        "-inf where not Causal(offset=0)",
    ]  # fmt: skip
    for stage, expected in zip(
        stages,
        (
            [[4, 8], [6, 0]],
            [[2, 4], [3, 0]],
            [[1.52319, 1.92806], [1.8103, 0]],
            [[11.52319, 21.92806], [31.8103, 40]],
            [[11.52319, -math.inf], [31.8103, 40]],
        ),
        strict=True,
    ):
        assert_close(stage.scores, torch.tensor([[expected]], dtype=torch.float32), stage.name, tolerance=1e-5)
    assert torch.equal(scoring.tile(query, key, range(2), range(2)), stages[-1].scores)


def test_stages_that_a_call_does_not_have_are_not_told():
    query, key, _ = tensors()
    assert [s.name for s in Scoring(GRID, 1.0).stages(query, key, ROWS, COLUMNS)] == ["score"]
    assert [s.name for s in Scoring(GRID, 0.5).stages(query, key, ROWS, COLUMNS)] == ["score", "scale"]


def test_the_additive_similarity_by_hand():
    query, key = torch.tensor([[[[0.5, -1.0]]]]), torch.tensor([[[[0.5, 1.0], [0.0, 2.0]]]])
    additive = Additive(torch.tensor([[2.0, 3.0]]))
    # 2 tanh(1) + 3 tanh(0) = 1.52319;   2 tanh(0.5) + 3 tanh(1) = 0.92423 + 2.28478
    assert_close(additive(query, key), torch.tensor([[[[1.52319, 3.20902]]]]), tolerance=1e-5)


# --- laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", scorings())
def test_tiles_glue_to_the_whole(name):
    scoring = scorings()[name]
    query, key, _ = tensors()
    whole = scoring.tile(query, key, ROWS, COLUMNS)
    assert whole.shape == GRID[:4]
    row_cuts, column_cuts = [0, 3, 4, 7], [0, 5, 6, 11]
    glued = torch.cat(
        [
            torch.cat(
                [
                    scoring.tile(query[:, :, r0:r1], key[:, :, c0:c1], range(r0, r1), range(c0, c1))
                    for c0, c1 in pairwise(column_cuts)
                ],
                dim=-1,
            )
            for r0, r1 in pairwise(row_cuts)
        ],
        dim=-2,
    )
    assert_close(glued, whole, name)
    rows, columns = torch.tensor([6, 0, 3, 3]), torch.tensor([10, 1, 4])
    scattered = scoring.tile(query[:, :, rows], key[:, :, columns], rows, columns)
    assert_close(scattered, whole[:, :, rows][..., columns], f"{name}, scattered")


@pytest.mark.parametrize("name", scorings())
def test_heads_that_share_a_key_score_as_if_each_had_its_own(name):
    scoring = scorings()[name]
    query, key, _ = tensors()
    repeated = key.repeat_interleave(HEADS // KV_HEADS, dim=1)
    assert_close(scoring.tile(query, key, ROWS, COLUMNS), scoring.tile(query, repeated, ROWS, COLUMNS), name)


def test_query_head_h_meets_kv_head_h_over_the_size_of_a_group_at_every_entry():
    left, right = torch.randn(BATCH, HEADS, QUERY_LEN, HEAD_DIM), torch.randn(BATCH, KV_HEADS, HEAD_DIM, KEY_LEN)
    found = grouped_matmul(left, right)
    for h in range(HEADS):
        assert_close(found[:, h], left[:, h] @ right[:, h // 2], f"head {h}", tolerance=1e-5)


def test_heads_split_and_joined_again_are_what_they_were_at_every_entry():
    x = torch.randn(BATCH, QUERY_LEN, HEADS * HEAD_DIM)
    split = x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
    for h in range(HEADS):  # head h holds features h * head_dim and following, of every token
        assert torch.equal(split[:, h], x[..., h * HEAD_DIM : (h + 1) * HEAD_DIM])
    assert torch.equal(split.transpose(1, 2).flatten(-2), x)


@pytest.mark.parametrize("sizes", [(0, 6, 7, 5, 11), (2, 6, 0, 5, 11), (2, 6, 7, 0, 11), (2, 6, 7, 5, 0)], ids=str)
def test_a_grouped_product_with_an_axis_of_size_0_keeps_its_shape(sizes):
    batch, heads, M, D, N = sizes
    product = grouped_matmul(torch.zeros(batch, heads, M, D), torch.zeros(batch, 3, D, N))
    assert product.shape == (batch, heads, M, N)
    assert_zero(product)


def test_the_additive_similarity_is_the_same_in_pieces_and_so_are_its_gradients(monkeypatch):
    query, key, _ = tensors()
    v = torch.randn(HEADS, HEAD_DIM, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(GRID[:4], dtype=torch.float64)
    whole = Additive(v)(query, key)
    expected = torch.autograd.grad((whole * upstream).sum(), (query, key, v))
    per_row = BATCH * HEADS * KEY_LEN * HEAD_DIM  # numbers that one row of queries holds
    for cells in (1, 2 * per_row, 3 * per_row + 1):
        monkeypatch.setattr(Additive, "CELLS", cells)
        pieces = Additive(v)(query, key)
        assert_close(pieces, whole)
        for name, found, right in zip(
            "qkv", torch.autograd.grad((pieces * upstream).sum(), (query, key, v)), expected, strict=True
        ):
            assert_close(found, right, f"gradient of {name} with {cells} cells")


def test_scores_are_float32_or_wider():
    for dtype, expected in (
        (torch.float16, torch.float32), (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32), (torch.float64, torch.float64),
    ):  # fmt: skip
        query, key, _ = tensors(dtype)
        v = torch.ones(HEADS, HEAD_DIM, dtype=dtype)
        for scoring in (Scoring(GRID, 0.5, bias=Alibi(HEADS).bind(GRID)), Scoring(GRID, 1.0, additive=Additive(v))):
            assert scoring.tile(query, key, ROWS, COLUMNS).dtype == upcast(query).dtype == expected


def test_products_beyond_float16_do_not_overflow():
    query = torch.full((1, 1, 1, 4), 300.0, dtype=torch.float16)
    assert Scoring(Grid(1, 1, 1, 1), 1.0).tile(query, query, range(1), range(1)).item() == 4 * 300.0**2


# --- what is hidden -----------------------------------------------------------------------------------------------


def test_allowed_joins_the_mask_and_a_bias_of_minus_inf():
    bias, _ = biases()["tensor with -inf"]
    scoring = Scoring(GRID, 1.0, bias=as_bias(bias).bind(GRID), mask=Causal().bind(GRID))
    assert_same_cells(scoring.allowed(ROWS, COLUMNS), fixed_masks()["causal"].cells(GRID) & ~bias.isneginf())
    assert_same_cells(Scoring(GRID, 1.0, bias=as_bias(bias)).allowed(ROWS, COLUMNS), ~bias.isneginf())
    assert Scoring(GRID, 1.0).allowed(ROWS, COLUMNS) is None
    assert Scoring(GRID, 1.0, bias=Alibi(HEADS).bind(GRID)).allowed(ROWS, COLUMNS) is None


def test_hide_zeroes_the_keys_that_no_query_of_the_group_may_see():
    tensor = torch.full((1, 2, 3, 1), math.nan)
    allowed = torch.zeros(1, 4, 2, 3, dtype=torch.bool)
    allowed[0, 1, 1, 0] = True  # head 1 is in the group of kv head 0
    allowed[0, 2, 0, 2] = True  # head 2 in that of kv head 1
    hidden = zero_unseen(tensor, allowed)
    assert hidden.isnan().squeeze().tolist() == [[True, False, False], [False, False, True]]
    assert hidden[0, 0, 1:].tolist() == [[0.0], [0.0]]
    assert zero_unseen(tensor, None) is tensor


@pytest.mark.parametrize("name", fixed_masks())
def test_hide_agrees_with_the_rule_of_every_mask(name):
    ruled = fixed_masks()[name]
    _, key, _ = tensors()
    hidden = zero_unseen(key, ruled.mask.bind(GRID).allowed(ROWS, COLUMNS))
    seen = ruled.cells(GRID).any(dim=2).unflatten(1, (KV_HEADS, -1)).any(dim=2)
    assert_close(hidden, torch.where(seen[..., None], key, 0.0))


# --- dropout ------------------------------------------------------------------------------------------------------

LARGE = Grid(2, 3, 97, 211)


def kept(rate=0.3, seed=1, grid=LARGE):
    return Dropout(rate, seed).keep(grid, range(grid.query_len), range(grid.key_len))


def test_the_same_seed_drops_the_same_weights_and_another_seed_others():
    assert torch.equal(kept(seed=1), kept(seed=1))
    for other in (0, 2, 1 + 2**32, 2**62 + 1, 2**63 - 2):
        agree = (kept(seed=1) == kept(seed=other)).double().mean().item()
        assert abs(agree - (0.3**2 + 0.7**2)) < 5 * math.sqrt(0.25 / kept().numel()), other


def test_a_seed_drops_what_it_always_dropped():
    def final(x):  # the finalizer of MurmurHash3
        x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
        x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
        return x ^ x >> 16

    def random(number, seed):
        low, high = seed & 0xFFFFFFFF, seed >> 32
        return final((((number ^ low) * 0x2545F491) + (number >> 32) * 0x85EBCA6B + high * 0x9E3779B9) & 0xFFFFFFFF)

    def keeps(batch, head, query, key):
        row, pair = random((batch * 3 + head) * 5 + query, seed), random(key // 2, seed ^ 0x5DEECE66D)
        half = final(row ^ pair) >> 16 * (key % 2) & 0xFFFF
        return (half ^ 0x8000) >= round(0.3 * 2**16)

    seed = 1234567890123456789
    expected = [[[[keeps(b, h, q, k) for k in range(9)] for q in range(5)] for h in range(3)] for b in range(2)]
    assert torch.equal(kept(0.3, seed, Grid(2, 3, 5, 9)).bool(), torch.tensor(expected))


@given(st.data())
def test_a_tile_of_what_is_kept_is_a_slice_of_the_whole(data):
    start, stop = sorted((data.draw(st.integers(0, 97)), data.draw(st.integers(0, 97))))
    first, last = sorted((data.draw(st.integers(0, 211)), data.draw(st.integers(0, 211))))
    dropout, whole = Dropout(0.3, 1), kept()
    for rows, columns in ((slice(start, stop), slice(first, last)), (slice(start, stop, 3), slice(first, last, 2))):
        for places in (range, torch.arange):  # the first keeps what tiles have in common
            queries, keys = (places(*(part.start, part.stop, part.step or 1)) for part in (rows, columns))
            part = dropout.keep(LARGE, queries, keys, batches=range(1, 2), heads=range(1, 3))
            assert torch.equal(part, whole[1:, 1:, rows, columns])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3])
def test_the_share_that_is_kept_is_1_minus_rate(rate, seed):
    grid = Grid(3, 5, 211, 307)
    share = kept(rate, seed, grid).double().mean().item()
    assert abs(share - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / (3 * 5 * 211 * 307))


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batch rows", "heads", "rows", "columns"])
@pytest.mark.parametrize("distance", [1, 2, 16, 32, 64])
def test_neighbours_are_dropped_independently_along_every_axis(axis, distance):
    grid = Grid(*(2 * distance + 2 if a == axis else n for a, n in enumerate((3, 3, 61, 127))))
    keep = kept(0.5, 3, grid).double() * 2 - 1
    length = keep.shape[axis] - distance
    products = keep.narrow(axis, 0, length) * keep.narrow(axis, distance, length)
    assert abs(products.mean().item()) < 5 / math.sqrt(products.numel())


def test_no_row_or_column_is_dropped_more_often_than_chance_allows():
    grid, rate = Grid(4, 4, 256, 256), 0.2
    keep = kept(rate, 5, grid).double()
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3), (3,), (2,)):
        share = keep.mean(dims)
        each = keep.numel() / share.numel()
        sigmas = (share - (1 - rate)).abs().max().item() / math.sqrt(rate * (1 - rate) / each)
        assert sigmas < 6, (dims, sigmas)


def test_places_far_beyond_32_bits_are_dropped_as_independently_as_the_first():
    grid = Grid(1, 1, 1 << 40, 1 << 40)
    rows, columns = range(1 << 39, (1 << 39) + 200), range((1 << 36), (1 << 36) + 300)
    far = Dropout(0.5, 1).keep(grid, rows, columns)
    near = Dropout(0.5, 1).keep(grid, range(200), range(300))
    for keep in (far, far == near):
        assert abs(keep.double().mean().item() - 0.5) < 5 * math.sqrt(0.25 / keep.numel())


def test_the_terms_of_a_bias_are_added_in_the_precision_of_the_scores():
    slope = Alibi(slopes=torch.tensor([1 / 3]))
    table = torch.randn(1, 1, 40, 40)
    scoring = Scoring(Grid(1, 1, 40, 40), 1.0, bias=(slope + table).bind(Grid(1, 1, 40, 40)))
    parts = slope.bind(Grid(1, 1, 40, 40)).values(range(40), range(40)), table
    assert torch.equal(scoring.biases(range(40), range(40), torch.float64), parts[0].double() + parts[1].double())
