"""The linear map of layers and models: in blocks for a few rows, and torch's own everywhere else."""

import pytest
import torch
import torch.nn.functional as F

from comparing import assert_close
from regard import Decoder, ModelConfig, linear, measured, processor

SIZES = [(513, 256), (100 * 16 + 13, 96), (32, 4096), (48, 5003)]
"""Outputs that are and are not a multiple of the blocks, and inputs too many for the products that are turned round."""


@pytest.fixture
def blocks(monkeypatch):
    """Counts what is computed in blocks, on any build of torch, as where they were measured to take less time."""
    counted = []
    in_blocks = linear._in_blocks
    monkeypatch.setattr(processor, "MKL", True)
    monkeypatch.setattr(linear, "_price", lambda rows, side: 2.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(linear, "_in_blocks", lambda *given: counted.append(1) or in_blocks(*given))
    return counted


def layer(inputs, outputs, bias=True):
    return linear.Linear(inputs, outputs, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 16])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_few_rows_in_blocks_are_what_they_are_at_once(blocks, outputs, inputs, rows, bias):
    made = layer(inputs, outputs, bias)
    x = torch.randn(rows, 1, inputs)
    wanted = F.linear(x.double(), made.weight.double(), made.bias.double() if bias else None).float()
    assert_close(made(x), wanted)
    assert_close(made(x.mT.contiguous().mT), wanted)
    assert len(blocks) == 2


def test_everything_else_is_torchs_own_to_the_last_bit(blocks, monkeypatch):
    made, x = layer(256, 513), torch.randn(3, 256)
    learning = linear.Linear(256, 513)
    other = [
        (made, torch.randn(17, 256)),
        (made, torch.randn(256)),
        (made, torch.randn(0, 256)),
        (layer(256, 256), torch.randn(1, 256)),
        (layer(256, 513).double(), x.double()),
        (layer(256, 513).bfloat16(), x.bfloat16()),
        (learning, x),
    ]
    for given, rows in other:
        assert torch.equal(given(rows), F.linear(rows, given.weight, given.bias))
    with torch.no_grad():
        learning(x)
    assert blocks == [1], "without gradients it is in blocks"
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == torch.bfloat16
    assert_close(torch.func.vmap(made)(x[:, None])[:, 0], made(x))
    assert blocks == [1, 1]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    made(torch.randn(5, 256))
    assert blocks == [1, 1], "one thread gains nothing from blocks of more rows than are turned round"
    monkeypatch.setattr(processor, "MKL", False)
    made(x)
    assert blocks == [1, 1]


def test_a_row_that_does_not_fit_is_refused_in_torchs_own_words(blocks):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(256, 513)(torch.randn(3, 255))


def test_every_large_matrix_of_a_model_that_writes_is_read_in_blocks(blocks):
    sizes = {"vocab_size": 300, "context_length": 8, "dim": 512, "layers": 2, "heads": 4, "hidden_dim": 512}
    model = Decoder(ModelConfig.preset("gpt2", **sizes)).eval()
    tokens = torch.randint(300, (1, 3))
    wanted = model(tokens)
    assert not blocks
    with torch.inference_mode():
        assert_close(model(tokens), wanted)
    assert len(blocks) == 2 * 6 + 1


@pytest.mark.parametrize(
    ("prices", "by_blocks"),
    [
        ({(1, 1024): 2.5}, {1, 2, 5, 8, 16}),  # and of more rows too, whatever they take on one thread
        ({(1, 1024): 0.4}, set()),
        ({(8, 512): 1.2, (8, 1024): 0.8}, {5, 8}),
        ({(1, 512): 1.2, (16, 512): 1.1}, {1, 16}),
    ],
    ids=["one row", "none", "eight rows", "one row of a small matrix, and 16"],
)
def test_blocks_are_for_what_takes_less_time_by_them_on_this_machine(blocks, monkeypatch, prices, by_blocks):
    monkeypatch.setattr(linear, "_price", lambda rows, side: prices.get((rows, side), 0.5))
    made, found = layer(256, 513), set()
    for rows in (1, 2, 5, 8, 16, 17):
        blocks.clear()
        made(torch.randn(rows, 256))
        found |= {rows} if blocks else set()
    assert found == by_blocks


def test_both_ways_are_timed_for_as_many_rows(monkeypatch):
    asked = []
    monkeypatch.setattr(measured, "ratio", lambda name, one, other: asked.append((name, one(), other())) or 1.5)
    with torch.inference_mode():
        assert linear._price.__wrapped__(2, 512) == 1.5
    ((name, one, other),) = asked
    assert name == "linear / in blocks, 2 rows, 512 x 512"
    assert one.shape == (2, 512)
    assert_close(one, other)


def test_a_large_matrix_does_not_break_a_graph_of_torch_compile(monkeypatch):
    monkeypatch.setattr(processor, "MKL", True)
    made, x = layer(256, 513), torch.randn(3, 256)
    torch._dynamo.reset()
    assert_close(torch.compile(made, backend="eager", fullgraph=True)(x), F.linear(x, made.weight, made.bias))
    torch._dynamo.reset()
