"""One class is a whole mask, and one a whole bias: what is defined here works wherever regard's own do."""

import json
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard
from cases import BATCH, GRID, HEAD_DIM, HEADS, KEY_LEN, KV_HEADS, QUERY_LEN, tensors
from comparing import assert_close, assert_same_cells
from regard import Causal, Dense, Padding, Tile, Window, attention, attention_with_lse, observe
from regard.biases import Bias, Given
from regard.cli.mask_expression import read_mask
from regard.indexing import lookup
from regard.kernels.strips.options import plan_of
from regard.masks import Mask
from regard.masks.planning import by_batch
from regard.rules import Rule, deserialise, is_data, same, serialise
from regard.shapes import Grid, ShapeError


class EveryBlock(Mask):
    """Keys in every k-th block of n."""

    def __init__(self, n, k):
        self.n, self.k = n, k

    def rule(self, batch, head, query, key):
        return key // self.n % self.k == 0

    def coverage(self, rows, columns):
        blocks = range(columns[0] // self.n, columns[-1] // self.n + 1)
        seen = sum(block % self.k == 0 for block in blocks[: self.k])
        return Tile.EMPTY if not seen else Tile.FULL if seen == len(blocks) else Tile.PARTIAL


class Turns(Mask):
    """Tokens of the same turn of a dialogue, and in head 0 everything: data of tokens, and the number of a head."""

    axes = {"turns": ("batch", "key_len")}  # noqa: RUF012

    def __init__(self, turns):
        self.turns = turns

    def rule(self, batch, head, query, key):
        return (lookup(self.turns, batch, query) == lookup(self.turns, batch, key)) | (head == 0)


class Recency(Bias):
    """A learned bonus for each of the last few keys, by head; its numbers lie in a dict."""

    def __init__(self, numbers):
        self.numbers = numbers

    def rule(self, batch, head, query, key):
        bonus = self.numbers["bonus"]
        back = (query - key).clamp(0, bonus.shape[1] - 1)
        return bonus[head, back]


TURNS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2]])
MASKS = {
    "blocks": EveryBlock(2, 3),
    "causal blocks": Causal() & EveryBlock(2, 3),
    "turns": Turns(TURNS),
    "not of a turn, in a window": ~Turns(TURNS) & Window(6),
    "blocks or turns, no padding": (EveryBlock(3, 2) | Turns(TURNS)) & Padding([11, 6]),
}


def cells(mask, grid=GRID):
    """What a mask says, asked cell by cell through its rule."""
    bound = mask.bind(grid)
    axes = torch.meshgrid(*map(torch.arange, grid[:4]), indexing="ij")
    return bound.rule(*axes)


def as_tensor(mask, grid=GRID):
    return Dense(cells(mask, grid))


def test_it_prints_and_draws_itself():
    assert repr(Causal() & ~EveryBlock(2, 3)) == "Causal() & ~EveryBlock(2, 3)"
    assert (Causal() & EveryBlock(2, 2)).draw(6, 6) == (
        "# . . . . .\n# # . . . .\n# # . . . .\n# # . . . .\n# # . . # .\n# # . . # #"
    )
    assert repr(Turns(TURNS)) == "Turns(<[2, 11]>)"


@pytest.mark.parametrize("name", MASKS)
def test_a_rectangle_says_what_its_cells_say(name):
    mask = MASKS[name].bind(GRID)
    whole = mask.allowed(range(QUERY_LEN), range(KEY_LEN)).expand(GRID[:4])
    assert_same_cells(whole, cells(MASKS[name]))
    for top in range(QUERY_LEN):
        for left in range(KEY_LEN):
            rows, columns = range(top, min(top + 3, QUERY_LEN)), range(left, min(left + 4, KEY_LEN))
            part = whole[:, :, top : rows.stop, left : columns.stop]
            said = mask.tile(rows, columns)
            if said is not Tile.PARTIAL:
                assert bool(part.all()) if said is Tile.FULL else not bool(part.any())


@pytest.mark.parametrize("name", MASKS)
def test_every_kernel_computes_it_forward_and_backward(name):
    query, key, value = tensors()
    grads = {}
    for mask in (MASKS[name], as_tensor(MASKS[name])):
        for kernel in ("reference", "strips"):
            output, lse = attention_with_lse(query, key, value, mask=mask, kernel=kernel)
            grads[type(mask), kernel] = output, lse, *torch.autograd.grad(output.sin().sum(), (query, key, value))
    expected = grads[Dense, "reference"]
    for found in grads.values():
        for ours, right in zip(found, expected, strict=True):
            assert_close(ours, right, tolerance=1e-12)


def test_planning_is_closed_form_at_any_length():
    far = 1 << 40
    mask = (Causal() & EveryBlock(1 << 20, 4)).bind(Grid(1, 1, far, far))
    assert mask.closed_form
    assert mask.tile(range(far - 64, far), range(1 << 20, 1 << 21)) is Tile.EMPTY
    assert mask.tile(range(far - 64, far), range(1 << 22, (1 << 22) + 64)) is Tile.FULL
    query = torch.empty(1, 1, 4096, 8)
    plan = regard.plan(query, query, query, mask=EveryBlock(256, 8))
    assert plan.kernel in ("native", "strips")
    assert plan.quadratic_numbers == 0
    assert plan.flops_computed == pytest.approx(2 * 16 * 4096 * 4096 / 8, rel=0.1)
    causal = regard.plan(query, query, query, mask=Causal() & EveryBlock(256, 8))
    assert causal.flops_computed < plan.flops_computed


def test_plans_are_kept_for_the_same_mask_and_not_for_another():
    query = torch.randn(1, 1, 300, 8)

    def planned(mask):
        return plan_of(regard.functional.check_call("t", query, query, query, mask, *[None] * 5, 0.0, None, False))

    assert planned(EveryBlock(8, 3)) is planned(EveryBlock(8, 3))
    assert planned(EveryBlock(8, 3)) is not planned(EveryBlock(8, 4))


def test_it_is_one_node_of_a_compiled_graph_forward_and_backward():
    torch.compiler.reset()
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attention(2 * q, k, v, mask=Causal() & EveryBlock(4, 3)), backend=counted, fullgraph=True
    )
    query, key, value = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    found = compiled(query, key, value)
    assert counted.frame_count == 1
    expected = attention(2 * query, key, value, mask=Causal() & EveryBlock(4, 3))
    assert_close(found, expected, tolerance=1e-6)
    for ours, right in zip(
        *(torch.autograd.grad(output.sum(), (query, key, value)) for output in (found, expected)), strict=True
    ):
        assert_close(ours, right, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", MASKS)
def test_its_rule_is_a_mask_mod_of_flex_attention(name):
    query, key, value = (t.detach().float() for t in tensors(kv_heads=HEADS, value_dim=HEAD_DIM))
    bound = MASKS[name].bind(GRID)
    block_mask = create_block_mask(bound.mask_mod, BATCH, HEADS, QUERY_LEN, KEY_LEN, device="cpu")
    theirs = flex_attention(query, key, value, block_mask=block_mask)
    assert_close(attention(query, key, value, mask=MASKS[name]), theirs, tolerance=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_as_text_as_data_and_by_batch_row_it_stays_what_it_is(name):
    mask = MASKS[name]
    assert is_data(mask)
    assert same(mask, MASKS[name].map_tensors(torch.clone))
    kept: list[torch.Tensor] = []
    line = serialise(mask, kept)
    json.loads(line)
    assert_same_cells(cells(deserialise(line, kept)), cells(mask))
    assert mask == deserialise(line, kept)
    assert_same_cells(cells(mask.to("cpu")), cells(mask))
    whole = cells(mask)
    for row, one in by_batch(mask.bind(GRID), GRID).items():
        if row is not None:
            alone = one.allowed(range(QUERY_LEN), range(KEY_LEN)).expand(1, HEADS, QUERY_LEN, KEY_LEN)
            assert_same_cells(alone, whole[row : row + 1])


def test_statistics_know_it():
    query, key, _ = tensors()
    for mask in MASKS.values():
        ours, right = (observe(query, key, mask=m) for m in (mask, as_tensor(mask)))
        assert_close(ours.entropy(), right.entropy(), tolerance=1e-12)
        assert_close(ours.received(), right.received(), tolerance=1e-12)


class OneLayer(nn.Module):
    def __init__(self, mask, bias=None):
        super().__init__()
        self.attention, self.mask, self.bias = regard.MultiHeadAttention(12, HEADS, kv_heads=KV_HEADS), mask, bias

    def forward(self, x):
        return self.attention(x, mask=self.mask, bias=self.bias)


def test_a_recording_with_it_is_saved_and_loaded_as_the_class_it_is(tmp_path):
    model = OneLayer(Causal() & EveryBlock(2, 3))
    with regard.record(model) as recording:
        model(torch.randn(1, 9, 12))
    recording.save(tmp_path / "run.safetensors")
    loaded = regard.load_recording(tmp_path / "run.safetensors")
    assert loaded["attention"].scoring.mask == recording["attention"].scoring.mask
    assert isinstance(next(iter(loaded["attention"].scoring.mask.leaves())), Mask)
    assert torch.equal(loaded["attention"].weights(), recording["attention"].weights())
    kinds = regard.rules.RULE_KINDS
    known = kinds.pop(EveryBlock.kind)
    try:
        with pytest.raises(ValueError, match="no mask or bias 'test_open_masks:EveryBlock'; import test_open_masks"):
            regard.load_recording(tmp_path / "run.safetensors")
    finally:
        kinds[EveryBlock.kind] = known


def test_the_command_line_reads_it():
    assert read_mask("Causal() & EveryBlock(2, k=3)") == Causal() & EveryBlock(2, 3)
    assert same(read_mask("~Turns([[0, 0, 1]])"), ~Turns(torch.tensor([[0, 0, 1]])))
    with pytest.raises(ValueError, match="EveryBlock"):
        read_mask("EveryBlock(2)")


def test_a_model_of_transformers_runs_under_it():
    transformers = pytest.importorskip("transformers")
    regard.huggingface.register()
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    config = transformers.LlamaConfig(**sizes)
    torch.manual_seed(0)
    ours = transformers.LlamaForCausalLM(config).eval()
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    theirs.load_state_dict(ours.state_dict())
    ours.set_attn_implementation("regard")
    theirs.set_attn_implementation("sdpa")
    tokens = torch.randint(50, (1, 17))
    mask, grid = Causal() & EveryBlock(3, 2), Grid(1, 4, 17, 17)
    lazy = regard.huggingface.LazyMask(mask.bind(grid), (1, 17, 17), torch.device("cpu"))
    with torch.no_grad():
        right = theirs(tokens, attention_mask=cells(mask, grid)[:, :1]).logits
        assert_close(ours(tokens, attention_mask=lazy).logits, right, tolerance=1e-5)


def test_an_argument_that_would_hide_a_method_is_refused_where_the_class_is_written():
    with pytest.raises(TypeError, match="Wrong: an argument cannot be called 'tile', which is a method"):

        class Wrong(Mask):
            def __init__(self, tile):
                self.tile = tile


def test_data_for_another_call_is_refused_in_words():
    with pytest.raises(ShapeError, match=r"Turns: turns is for \[batch=2, key_len=11\], the scores are"):
        Turns(TURNS).bind(GRID._replace(key_len=12))
    with pytest.raises(ValueError, match="Turns: turns is on meta, the call runs on cpu"):
        Turns(TURNS.to("meta")).bind(GRID)


def test_a_mask_without_a_rule_or_with_hidden_arguments_says_what_is_missing():
    class Empty(Mask):
        pass

    class Forgetful(EveryBlock):
        def __init__(self, size):
            super().__init__(size, 2)

    with pytest.raises(NotImplementedError, match=r"Empty has no rule\(batch, head, query, key\)"):
        Empty().allowed(range(2), range(2))
    with pytest.raises(TypeError, match=r"Forgetful: every argument of __init__ must be kept under its own name"):
        Forgetful(3).structure()

    class Numbers(Mask):
        def rule(self, batch, head, query, key):
            return query - key

    with pytest.raises(TypeError, match=r"Numbers: rule must return a bool tensor .*, got torch\.int64"):
        Numbers().allowed(range(2), range(2))


# --- biases -----------------------------------------------------------------------------------------------------------


def test_a_bias_from_outside_learns_wherever_its_numbers_lie_on_every_kernel():
    query, key, value = tensors()
    torch.manual_seed(1)
    learned = nn.ParameterDict({"bonus": nn.Parameter(torch.randn(HEADS, 4, dtype=torch.float64))})
    found = {}
    for holder in (learned, dict(learned.items())):
        for kernel in ("reference", "strips"):
            output = attention(query, key, value, bias=Recency(holder), mask=EveryBlock(2, 2), kernel=kernel)
            found[type(holder), kernel] = torch.autograd.grad(output.sin().sum(), (query, key, learned["bonus"]))
    axes = torch.meshgrid(*map(torch.arange, GRID[:4]), indexing="ij")
    whole = Given(Recency(learned).bind(GRID).rule(*axes))
    output = attention(query, key, value, bias=whole, mask=as_tensor(EveryBlock(2, 2)), kernel="reference")
    expected = torch.autograd.grad(output.sin().sum(), (query, key, learned["bonus"]))
    assert float(expected[2].abs().max()) > 0
    for grads in found.values():
        for ours, right in zip(grads, expected, strict=True):
            assert_close(ours, right, tolerance=1e-12)


def test_what_two_parts_of_a_bias_share_gets_its_gradient_once():
    query, key, value = tensors()
    slopes = torch.rand(HEADS, dtype=torch.float64, requires_grad=True)
    for bias in (regard.Alibi(slopes=slopes) + regard.Alibi(slopes=slopes), regard.Alibi(slopes=2 * slopes)):
        output = attention(query, key, value, bias=bias, mask=Causal(), kernel="strips")
        grad = torch.autograd.grad(output.sin().sum(), slopes)[0]
        reference = attention(
            query, key, value, bias=regard.Alibi(slopes=2 * slopes), mask=Causal(), kernel="reference"
        )
        assert_close(grad, torch.autograd.grad(reference.sin().sum(), slopes)[0], tolerance=1e-10)


def test_every_kind_of_regards_own_declares_its_data():
    own = {kind for kind in regard.rules.RULE_KINDS.values() if kind.__module__.startswith("regard.")}
    assert {"Band", "Document", "Alibi", "RelativeBias", "Given"} <= {kind.__name__ for kind in own}
    for kind in own:
        assert issubclass(kind, Rule)
        assert set(kind.axes) <= {*kind.fields, "offset"}, kind
        assert kind.rule is not Rule.rule or kind in (Mask, Bias) or kind.__name__.startswith(("_", "Positioned")), kind
    assert "test_open_masks" in sys.modules
