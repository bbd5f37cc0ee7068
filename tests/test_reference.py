"""The specification: numbers by hand, a naive implementation, gradients by finite differences, and the laws."""

import math

import pytest
import torch

from cases import BATCH, GRID, HEAD_DIM, HEADS, KEY_LEN, QUERY_LEN, biases, fixed_masks, tensors
from comparing import assert_close, assert_zero
from naive import naive
from regard.biases import Alibi, RelativeBias, as_bias
from regard.dropout import Dropout
from regard.masks import Causal, Dense
from regard.numerics import softmax
from regard.reference import AttentionOutput, reference
from regard.scores import Additive, Scoring
from regard.shapes import Grid

# --- by hand ------------------------------------------------------------------------------------------------------

KEYS = [[0.0, 1, 1], [4, 4, 0], [2, 3, 1]]
QUERIES = [[1.0, 0, 2], [2, 2, 2], [2, 1, 3]]
VALUES = [[1.0, 2, 3], [2, 8, 0], [2, 6, 3]]


def one_head(rows):
    return torch.tensor([[rows]], dtype=torch.float64)


def test_three_tokens_by_hand():
    x = torch.tensor([[1.0, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
    w_key = torch.tensor([[0.0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
    w_query = torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
    w_value = torch.tensor([[0.0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])
    assert (x @ w_key).tolist() == KEYS
    assert (x @ w_query).tolist() == QUERIES
    assert (x @ w_value).tolist() == VALUES
    scoring = Scoring(Grid(1, 1, 3, 3), 1.0)
    query, key, value = one_head(QUERIES), one_head(KEYS), one_head(VALUES)
    scores = scoring.tile(query, key, range(3), range(3))
    assert scores.tolist() == [[[[2, 4, 4], [4, 16, 12], [4, 12, 10]]]]
    weights, _ = softmax(scores)
    by_hand = one_head(
        [
            [6.3379e-02, 4.6831e-01, 4.6831e-01],
            [6.0337e-06, 9.8201e-01, 1.7986e-02],
            [2.9539e-04, 8.8054e-01, 1.1917e-01],
        ]
    )
    assert (
        float(((weights - by_hand) / by_hand).abs().max()) < 5e-5
    )  # all five digits of every weight, the tiny ones too
    exactly = one_head([[1.9366, 6.6831, 1.5951], [2.0000, 7.9640, 0.0540], [1.9997, 7.7599, 0.3584]])
    assert_close(reference(query, key, value, scoring).output, exactly, tolerance=5e-5 / 8)
    rounded = one_head(
        [[0.0, 0.5, 0.5], [0, 1, 0], [0, 0.9, 0.1]]
    )  # what rounding the weights to one digit makes of it
    assert_close(rounded @ value, one_head([[2, 7, 1.5], [2, 8, 0], [2, 7.8, 0.3]]))


def attend_two_keys(**parts):
    """One query of 1 and keys 0 and log 3: scores 0 and log 3, values 1 and 10."""
    query, key, value = one_head([[1.0]]), one_head([[0.0], [math.log(3)]]), one_head([[1.0], [10.0]])
    output, lse = reference(query, key, value, Scoring(Grid(1, 1, 1, 2), 1.0, **parts))
    return output.item(), lse.item()


def test_weights_one_quarter_and_three_quarters():
    assert attend_two_keys() == pytest.approx((1 / 4 + 30 / 4, math.log(4)))


def test_a_sink_as_strong_as_all_keys_takes_half_of_the_weight():
    sink = torch.tensor([math.log(4)])
    assert attend_two_keys(sink=sink) == pytest.approx((1 / 8 + 30 / 8, math.log(8)))


def test_a_bias_of_log_3_on_the_first_key_makes_both_equal():
    assert attend_two_keys(bias=as_bias(torch.tensor([math.log(3), 0.0]))) == pytest.approx((5.5, math.log(6)))


def test_a_bias_of_minus_inf_hides_a_key():
    assert attend_two_keys(bias=as_bias(torch.tensor([0.0, -math.inf]))) == pytest.approx((1.0, 0.0))


def test_a_softcap_bounds_the_score():
    capped = math.exp(20 / 41)  # 0.5 tanh(log(3) / 0.5) = 0.5 tanh(log 9) = 0.5 (81 - 1) / (81 + 1) = 20 / 41
    assert attend_two_keys(softcap=0.5) == pytest.approx(((1 + 10 * capped) / (1 + capped), math.log(1 + capped)))


def test_an_empty_row_is_zero_with_lse_minus_inf_or_its_sink():
    nothing = Dense(torch.zeros(1, 1, dtype=torch.bool))
    assert attend_two_keys(mask=nothing) == (0.0, -math.inf)
    assert attend_two_keys(mask=nothing, sink=torch.tensor([1.25])) == (0.0, 1.25)
    assert attend_two_keys(mask=nothing, sink=torch.tensor([-math.inf])) == (0.0, -math.inf)


def test_the_answer_is_a_pair_with_names():
    query, key, value = tensors()
    answer = reference(query, key, value, Scoring(GRID, 1.0))
    assert isinstance(answer, AttentionOutput)
    assert answer == (answer.output, answer.lse)
    assert answer.output.shape == (*query.shape[:3], value.shape[3])
    assert answer.lse.shape == query.shape[:3]


# --- softmax ------------------------------------------------------------------------------------------------------


def test_softmax_neither_overflows_nor_underflows():
    weights, lse = softmax(torch.tensor([[[[1e4, 1e4 - 1, -1e30], [-3e38, -3e38, -math.inf]]]]))
    assert_close(weights, torch.tensor([[[[0.731059, 0.268941, 0.0], [0.5, 0.5, 0.0]]]]), tolerance=1e-6)
    assert_close(lse, torch.tensor([[[1e4 + 0.313262, -3e38]]]), tolerance=1e-7)


def test_softmax_agrees_with_torch_where_no_row_is_empty():
    scores = torch.randn(2, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    weights, lse = softmax(scores)
    assert_close(weights, scores.softmax(-1))
    assert_close(lse, scores.logsumexp(-1))


# --- against the naive implementation -----------------------------------------------------------------------------


def bias_of(bias):
    values = as_bias(bias).bind(GRID).values(range(QUERY_LEN), range(KEY_LEN)).expand(GRID[:4]).tolist()
    return lambda b, h, i, j: values[b][h][i][j]


@pytest.mark.parametrize("name", fixed_masks())
def test_every_mask_against_the_naive_implementation(name):
    ruled = fixed_masks()[name]
    query, key, value = tensors()
    answer = reference(query, key, value, Scoring(GRID, 0.5, mask=ruled.mask.bind(GRID)))
    expected = naive(query, key, value, scale=0.5, allowed=lambda b, h, i, j: ruled.says(b, h, i, j, GRID))
    assert_close(answer.output, expected[0], "output")
    assert_close(answer.lse, expected[1], "lse")


@pytest.mark.parametrize("name", biases())
def test_every_bias_against_the_naive_implementation(name):
    bias, _ = biases()[name]
    query, key, value = tensors()
    answer = reference(query, key, value, Scoring(GRID, 0.5, bias=as_bias(bias).bind(GRID)))
    expected = naive(query, key, value, scale=0.5, bias=bias_of(bias))
    assert_close(answer.output, expected[0], "output")
    assert_close(answer.lse, expected[1], "lse")


@pytest.mark.parametrize("name", ["softcap", "sink", "additive", "all", "all, additive"])
def test_the_other_parts_of_a_score_against_the_naive_implementation(name):
    query, key, value = tensors()
    sink, v = torch.randn(HEADS, dtype=torch.float64), torch.randn(HEADS, HEAD_DIM, dtype=torch.float64)
    ruled, (bias, _) = fixed_masks()["padding of a whole row"], biases()["tensor with -inf"]
    ours, theirs = {}, {}
    if name in ("softcap", "all", "all, additive"):
        ours["softcap"] = theirs["softcap"] = 0.7
    if name in ("sink", "all", "all, additive"):
        ours["sink"], theirs["sink"] = sink, sink.tolist()
    if "additive" in name:
        ours["additive"], theirs["v"] = Additive(v), v.tolist()
    if "all" in name:
        ours |= {"mask": ruled.mask.bind(GRID), "bias": as_bias(bias).bind(GRID)}
        theirs |= {"allowed": lambda b, h, i, j: ruled.says(b, h, i, j, GRID), "bias": bias_of(bias)}
    answer = reference(query, key, value, Scoring(GRID, -1.3, **ours))
    expected = naive(query, key, value, scale=-1.3, **theirs)
    assert_close(answer.output, expected[0], "output")
    assert_close(answer.lse, expected[1], "lse")


def test_dropout_drops_weights_and_leaves_lse_alone():
    query, key, _ = tensors()
    everything = torch.eye(KEY_LEN, dtype=torch.float64).expand(BATCH, 3, -1, -1)  # values that show the weights
    scoring, dropout = Scoring(GRID, 0.5, mask=Causal().bind(GRID)), Dropout(0.4, 9)
    weights, lse = reference(query, key, everything, scoring)
    dropped, lse_too = reference(query, key, everything, scoring, dropout)
    keep = dropout.keep(GRID, range(QUERY_LEN), range(KEY_LEN))
    assert_close(dropped, weights * keep / 0.6)
    assert torch.equal(lse, lse_too)


# --- gradients by finite differences ------------------------------------------------------------------------------

SMALL = Grid(2, 4, 3, 5)


def gradcheck_case(name):
    """query, key, value and what else learns, and how a Scoring is made of them."""
    draw = torch.Generator().manual_seed(3)

    def leaf(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    inputs = [leaf(2, 4, 3, 2), leaf(2, 2, 5, 2), leaf(2, 2, 5, 3)]
    hidden = torch.tensor([[True, False, True, True, False], [False] * 5, [False, False, True, True, True]])
    mask = Dense(hidden)  # the second query sees nothing, the second key is seen by nobody
    minus_inf = torch.zeros(3, 5, dtype=torch.float64).masked_fill(~hidden, -math.inf)
    return {
        "plain": lambda: (inputs, dict),
        "mask with an empty row": lambda: (inputs, lambda: {"mask": mask}),
        "softcap": lambda: (inputs, lambda: {"mask": mask, "softcap": 0.8}),
        "bias": lambda: ([*inputs, leaf(3, 5)], lambda b: {"bias": as_bias(b).bind(SMALL), "mask": mask}),
        "bias with -inf": lambda: (
            [*inputs, leaf(4, 1, 5)],
            lambda b: {"bias": as_bias(b + minus_inf).bind(SMALL)},
        ),
        "sink": lambda: ([*inputs, leaf(4)], lambda s: {"sink": s, "mask": mask}),
        "slopes": lambda: ([*inputs, leaf(4)], lambda s: {"bias": Alibi(slopes=s).bind(SMALL), "mask": mask}),
        "table": lambda: (
            [*inputs, leaf(8, 4)],
            lambda t: {"bias": RelativeBias(t, max_distance=4).bind(SMALL), "mask": mask},
        ),
        "additive.v": lambda: ([*inputs, leaf(4, 2)], lambda v: {"additive": Additive(v), "mask": mask}),
    }[name]()


CASES = [
    "plain",
    "mask with an empty row",
    "softcap",
    "bias",
    "bias with -inf",
    "sink",
    "slopes",
    "table",
    "additive.v",
]


@pytest.mark.parametrize("dropout", [None, Dropout(0.3, 4)], ids=["", "dropout"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_output_and_lse_are_those_of_finite_differences(name, dropout, monkeypatch):
    monkeypatch.setattr(Additive, "CELLS", 40)  # in pieces, computed again in the backward pass
    inputs, parts = gradcheck_case(name)

    def attend(query, key, value, *learned):
        output, lse = reference(query, key, value, Scoring(SMALL, 0.6, **parts(*learned)), dropout)
        return output, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(attend, inputs)


def test_an_empty_row_has_no_gradient_of_any_kind():
    query, key, value = tensors()
    sink = torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    scoring = Scoring(GRID, 0.5, mask=Dense(torch.zeros(1, 1, dtype=torch.bool)), softcap=1.0)
    output, lse = reference(query, key, value, scoring)
    assert_zero(output)
    assert (lse == -math.inf).all()
    for gradient in torch.autograd.grad(output.sum() + lse.exp().sum(), (query, key, value)):
        assert_zero(gradient)
    output, lse = reference(query, key, value, Scoring(GRID, 0.5, mask=scoring.mask, sink=sink))
    assert_zero(output)
    assert_zero(lse)
    gradients = torch.autograd.grad(output.sum() + lse.sum(), (query, key, value, sink))
    for gradient in gradients[:3]:
        assert_zero(gradient)
    assert gradients[3].tolist() == [BATCH * QUERY_LEN] * HEADS  # lse is the sink itself


# --- laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fixed_masks())
def test_each_row_of_weights_sums_to_1_minus_what_the_sink_takes(name):
    query, key, _ = tensors()
    everything = torch.eye(KEY_LEN, dtype=torch.float64).expand(BATCH, 3, -1, -1)
    mask, sink = fixed_masks()[name].mask.bind(GRID), torch.randn(HEADS, dtype=torch.float64)
    weights, lse = reference(query, key, everything, Scoring(GRID, 0.5, mask=mask, sink=sink))
    assert_close(weights.sum(-1), 1 - (sink[:, None] - lse).exp(), "with a sink")
    weights, lse = reference(query, key, everything, Scoring(GRID, 0.5, mask=mask))
    assert_close(weights.sum(-1), (lse > -math.inf).double(), "without")
    scores = Scoring(GRID, 0.5, mask=mask).tile(query, key, range(QUERY_LEN), range(KEY_LEN))
    seen = lse > -math.inf
    assert_close(weights[seen], (scores - lse[..., None]).exp()[seen], "exp(score - lse)")
