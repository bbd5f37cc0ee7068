"""Masks: by hand, every mask against its rule cell by cell, `tile` against `allowed`, the algebra, the errors."""

import math
import operator
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import GRID, composed_masks, document, fixed_masks, grids, single_masks
from comparing import assert_same_cells
from regard.masks import (
    EVERYTHING,
    And,
    Band,
    Causal,
    Chunk,
    Dense,
    Document,
    Everything,
    Mask,
    Not,
    Or,
    Padding,
    Prefix,
    Strided,
    Tile,
    Where,
    Window,
)
from regard.masks.planning import cells_on, common_keys, diagonals_of, visible
from regard.rules import deserialise, serialise
from regard.shapes import Grid, ShapeError


def whole(mask: Mask, grid: Grid) -> torch.Tensor:
    """What a mask allows in a call, every cell: [batch, heads, query_len, key_len]."""
    return mask.bind(grid).allowed(range(grid.query_len), range(grid.key_len)).expand(grid[:4])


# --- as a line of text ------------------------------------------------------------------------------------------------


@given(st.data())
def test_a_mask_that_is_spelt_and_read_again_is_the_same_mask_before_and_after_it_is_bound(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask
    for one in (mask, mask.bind(grid)):
        tensors: list[torch.Tensor] = []
        line = serialise(one, tensors)
        if line is None:
            assert "Where" in repr(one)
        else:
            assert_same_cells(whole(deserialise(line, tensors), grid), whole(one, grid))


def test_masks_as_lines_by_hand():
    lengths = torch.tensor([3, 4])
    tensors = []
    assert serialise(~Padding(lengths) | Prefix(2), tensors) == '["Or",["Not",["Padding",{"tensor":0}]],["Prefix",2]]'
    assert len(tensors) == 1
    assert torch.equal(tensors[0], lengths)
    assert serialise(EVERYTHING, tensors) == '["Everything"]'
    assert deserialise('["Everything"]', []) is EVERYTHING
    assert serialise(Causal() & Where(lambda batch, head, query, key: query > key), tensors) is None


# --- by hand ------------------------------------------------------------------------------------------------------


def test_two_new_tokens_after_three_in_the_cache_see_all_that_came_before():
    assert Causal().draw(2, 5) == "# # # # .\n# # # # #"
    assert Causal(offset=0).draw(2, 5) == "# . . . .\n# # . . ."
    assert Causal().draw(5, 2) == ". .\n. .\n. .\n# .\n# #"


def test_a_causal_window_sees_exactly_w_keys_itself_included():
    assert (Causal() & Window(3)).draw(5, 5) == "# . . . .\n# # . . .\n# # # . .\n. # # # .\n. . # # #"
    assert whole(Causal() & Window(3), Grid(1, 1, 9, 20)).sum(-1).flatten().tolist() == [3] * 9


def test_the_structured_masks_by_hand():
    assert Window(2).draw(3, 4) == "# # # .\n. # # #\n. . # #"
    assert Band(1, 0).draw(3, 3) == "# . .\n# # .\n. # #"
    assert Band(-1, None).draw(3, 3) == ". # #\n. . #\n. . ."
    assert (Causal() | Prefix(2)).draw(3, 3) == "# # .\n# # .\n# # #"
    assert Strided(2).draw(2, 5) == ". # . # .\n# . # . #"
    assert Chunk(2).draw(3, 4) == "# # . .\n. . # #\n. . # #"
    assert Chunk(2, offset=-1).draw(3, 4) == ". . . .\n# # . .\n# # . ."
    assert Padding([2, 3]).draw(1, 4, batch=2) == "# # . ."
    assert Document.from_lengths([1, 2]).draw(3, 3) == "# . .\n. # #\n. # #"
    assert (~Causal()).draw(2, 2) == ". #\n. ."


def test_a_whole_number_of_numpy_is_the_same_mask():
    numpy = pytest.importorskip("numpy")
    for kind in (Window, Strided, Chunk):
        assert kind(numpy.int64(3)) == kind(3)
        assert repr(kind(numpy.int64(3), offset=numpy.int32(1))) == repr(kind(3, offset=1))
        with pytest.raises(ValueError, match=r"must be a whole number, 1 or more, got numpy.ndarray \[2\]"):
            kind(numpy.array([3, 4]))
    assert Causal(numpy.array([1, 2])) == Causal([1, 2])


def test_documents_from_lengths_one_list_per_row_or_one_for_all():
    assert Document.from_lengths([2, 0, 1]).query_ids.tolist() == [[0, 0, 2]]
    assert Document.from_lengths([[2, 1], [1, 2]]).query_ids.tolist() == [[0, 0, 1], [0, 1, 1]]
    assert Document.from_lengths(torch.tensor([[3], [3]])).query_ids.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_masks_print_as_the_expression_that_makes_them():
    mask = Causal() & (Window(256) | Prefix(4)) & ~Chunk(8)
    assert repr(mask) == "Causal() & (Window(256) | Prefix(4)) & ~Chunk(8)"
    assert repr(~(Causal() | Padding([3, 4]))) == "~(Causal() | Padding([3, 4]))"
    assert repr(Causal(offset=[0, 3])) == "Causal(offset=[0, 3])"
    assert repr(Band(None, 2, offset=1)) == "Band(None, 2, offset=1)"
    assert repr(Strided(3, offset=-1) | Chunk(2, offset=5)) == "Strided(3, offset=-1) | Chunk(2, offset=5)"
    assert repr(Document(torch.tensor([0, 0, 1]))) == "Document([[0, 0, 1]])"
    assert repr(Document(torch.zeros(2, 99, dtype=torch.int64))) == "Document(<[2, 99]>)"
    assert repr(Dense(torch.ones(2, 3, dtype=torch.bool))) == "Dense(<bool [1, 1, 2, 3]>)"
    assert repr(Padding(torch.ones(2, 3, dtype=torch.bool))) == "Padding(<bool [2, 3]>)"
    assert repr(Prefix([1, 2]) & EVERYTHING) == "Prefix([1, 2]) & Everything()"

    def diagonal(batch, head, query, key):
        return query == key

    assert repr(Where(diagonal)) == "Where(diagonal)"


# --- against the rule, cell by cell -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", fixed_masks())
def test_every_mask_allows_what_its_rule_says(name):
    ruled = fixed_masks()[name]
    assert_same_cells(whole(ruled.mask, GRID), ruled.cells(GRID), name)


@given(st.data())
def test_random_masks_and_compositions_allow_what_their_rules_say(data):
    grid = data.draw(grids())
    ruled = data.draw(composed_masks(grid))
    assert_same_cells(whole(ruled.mask, grid), ruled.cells(grid), repr(ruled.mask))


@given(st.data())
def test_a_rectangle_is_a_slice_of_the_whole_in_whatever_way_it_is_asked_for(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    expected = mask.allowed(range(grid.query_len), range(grid.key_len)).expand(grid[:4])
    rows, columns = data.draw(rectangles(grid))
    part = expected[:, :, rows.start : rows.stop, columns.start : columns.stop]
    assert_same_cells(mask.allowed(rows, columns).expand(part.shape), part)
    slices = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    assert_same_cells(mask.allowed(*slices).expand(part.shape), part)
    queries = torch.tensor(data.draw(st.lists(st.integers(0, grid.query_len - 1))), dtype=torch.int64)
    keys = torch.tensor(data.draw(st.lists(st.integers(0, grid.key_len - 1))), dtype=torch.int32)
    scattered = expected[:, :, queries][:, :, :, keys.long()]
    assert_same_cells(mask.allowed(queries, keys).expand(scattered.shape), scattered)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_indices_of_any_integer_dtype_mean_the_same(dtype):
    mask = Document(torch.tensor([0, 0, 1, 1]))
    at = torch.tensor([0, 1], dtype=dtype)
    assert mask.allowed(at, torch.tensor([0, 1, 2], dtype=dtype)).tolist() == [[[[True, True, False]] * 2]]


# --- tile against allowed -----------------------------------------------------------------------------------------


@st.composite
def rectangles(draw, grid):
    def piece(length):
        start = draw(st.integers(0, length - 1))
        return range(start, draw(st.integers(start + 1, length)))

    return piece(grid.query_len), piece(grid.key_len)


def said_of(cells: torch.Tensor) -> Tile:
    return Tile.FULL if cells.all() else Tile.PARTIAL if cells.any() else Tile.EMPTY


@pytest.mark.parametrize("name", fixed_masks())
def test_every_rectangle_of_every_mask(name):
    ruled = fixed_masks()[name]
    cells, bound = ruled.cells(GRID), ruled.mask.bind(GRID)
    is_single = not isinstance(ruled.mask, And | Or | Not)
    for top, bottom in combinations(range(GRID.query_len + 1), 2):
        for left, right in combinations(range(GRID.key_len + 1), 2):
            said = bound.tile(range(top, bottom), range(left, right))
            if is_single or said is not Tile.PARTIAL:
                assert said is said_of(cells[:, :, top:bottom, left:right]), (top, bottom, left, right)


def test_every_rectangle_of_packed_documents():
    for ids in ([[0, 0, 0, 1, 2, 2, 2]], [[3, 3, 3, 3, 3, 3, 9], [-1, 0, 0, 4, 4, 4, 4]], [[0, 1, 1, 0, 0, 2, 2]]):
        grid, ruled = Grid(2, 1, 7, 7), document(ids)
        cells, bound = ruled.cells(grid), ruled.mask.bind(grid)
        for top, bottom in combinations(range(8), 2):
            for left, right in combinations(range(8), 2):
                said = bound.tile(range(top, bottom), range(left, right))
                assert said is said_of(cells[:, :, top:bottom, left:right]), (ids, top, bottom, left, right)


@pytest.mark.parametrize(
    ("left", "right", "joined", "either"),
    [
        (Tile.EMPTY, Tile.EMPTY, Tile.EMPTY, Tile.EMPTY),
        (Tile.EMPTY, Tile.PARTIAL, Tile.EMPTY, Tile.PARTIAL),
        (Tile.EMPTY, Tile.FULL, Tile.EMPTY, Tile.FULL),
        (Tile.PARTIAL, Tile.PARTIAL, Tile.PARTIAL, Tile.PARTIAL),
        (Tile.PARTIAL, Tile.FULL, Tile.PARTIAL, Tile.FULL),
        (Tile.FULL, Tile.FULL, Tile.FULL, Tile.FULL),
    ],
)
def test_the_tile_of_a_composition_follows_from_its_parts(left, right, joined, either):
    class Says(Mask):
        def __init__(self, says):
            self.says = says

        def coverage(self, rows, columns):
            return self.says

    for one, other in ((left, right), (right, left)):
        assert (Says(one) & Says(other)).tile(range(2), range(2)) is joined
        assert (Says(one) | Says(other)).tile(range(2), range(2)) is either
    opposite = {Tile.EMPTY: Tile.FULL, Tile.PARTIAL: Tile.PARTIAL, Tile.FULL: Tile.EMPTY}
    assert (~Says(left)).tile(range(2), range(2)) is opposite[left]


@settings(max_examples=200)
@given(st.data())
def test_the_tile_of_a_single_mask_is_exact(data):
    grid = data.draw(grids())
    ruled = data.draw(single_masks(grid))
    rows, columns = data.draw(rectangles(grid))
    assert ruled.mask.bind(grid).tile(rows, columns) is said_of(ruled.cells(grid, rows, columns)), repr(ruled.mask)


@given(st.data())
def test_empty_and_full_are_true_of_every_composition(data):
    grid = data.draw(grids())
    ruled = data.draw(composed_masks(grid))
    rows, columns = data.draw(rectangles(grid))
    said = ruled.mask.bind(grid).tile(slice(rows.start, rows.stop), columns)
    if said is not Tile.PARTIAL:
        assert said is said_of(ruled.cells(grid, rows, columns)), repr(ruled.mask)


@given(st.data())
def test_many_rectangles_at_once_are_told_what_each_is_told_alone(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    asked = data.draw(st.lists(rectangles(grid), min_size=1, max_size=20))
    ends = [(rows[0], rows[-1], columns[0], columns[-1]) for rows, columns in asked]
    said = mask.verdict(*torch.tensor(ends).unbind(1))
    if said is not None:
        for kind, found in zip((Tile.EMPTY, Tile.FULL), said, strict=True):
            alone = [mask.tile(*one) is kind for one in asked]
            assert torch.as_tensor(found).expand(len(asked)).tolist() == alone, (repr(mask), kind)
    else:
        assert any(not part.closed_form or type(part).verdict is Mask.verdict for part in mask.leaves())


def test_a_mask_that_knows_its_rectangles_better_than_its_class_is_asked_about_each():
    class Odd(Window):
        def coverage(self, rows, columns):
            return Tile.EMPTY

    assert Odd(3).closed_form
    assert Odd(3).verdict(0, 4, 0, 4) is None
    parts = [(range(n, n + 3), range(7)) for n in range(40)]
    assert visible(Odd(3).bind(Grid(1, 1, 50, 7)), parts, 2) == [[]] * 40


@pytest.mark.parametrize("edge", [1, 3])
@given(st.data())
def test_the_visible_parts_of_rectangles_hold_every_allowed_cell_and_name_no_hidden_one_full(edge, data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    asked = data.draw(st.lists(rectangles(grid), max_size=30))
    cells = mask.allowed(range(grid.query_len), range(grid.key_len)).expand(grid[:4])
    for questions in (math.inf, 40):
        for (rows, columns), parts in zip(asked, visible(mask, asked, edge, questions), strict=True):
            here = cells[:, :, rows.start : rows.stop]
            shown = [key for part, _ in parts for key in part]
            assert shown == sorted(set(shown) & set(columns))
            hidden = sorted(set(columns) - set(shown))
            assert not here[..., hidden].any()
            for part, kind in parts:
                assert kind is not Tile.FULL or here[..., part.start : part.stop].all()


@given(st.data())
def test_a_mask_that_was_never_bound_stands_at_offset_0(data):
    square = data.draw(st.integers(1, 9).map(lambda n: Grid(1, 1, n, n)))
    ruled = data.draw(single_masks(square))
    if isinstance(ruled.mask, Where):
        return
    rows, columns = data.draw(rectangles(square))
    expected = ruled.cells(square, rows, columns)
    assert_same_cells(ruled.mask.allowed(rows, columns), expected)
    assert ruled.mask.tile(rows, columns) is said_of(expected)


@given(st.data())
def test_a_part_of_a_call_sees_what_the_whole_says_of_it(data):
    grid = data.draw(grids())
    mask = data.draw(composed_masks(grid)).mask.bind(grid)
    rows, columns = data.draw(rectangles(grid))
    expected = mask.allowed(rows, columns).expand(grid.batch, grid.heads, len(rows), len(columns))
    part = mask.counted_from(rows.start, columns.start, grid)
    here = range(len(rows)), range(len(columns))
    assert_same_cells(part.allowed(*here).expand(expected.shape), expected)
    assert part.tile(*here) in (said_of(expected), Tile.PARTIAL)
    if rows.start + rows.start // 2 < grid.query_len and columns:
        at = rows.start + rows.start // 2
        again = part.counted_from(rows.start // 2, 0, grid).allowed(range(1), range(1))  # of rows that end elsewhere
        assert_same_cells(
            again.expand(grid.batch, grid.heads, 1, 1),
            mask.allowed(range(at, at + 1), columns[:1]).expand(grid.batch, grid.heads, 1, 1),
        )
    for index in range(grid.batch):
        alone = part.for_batch(index).bind(grid._replace(batch=1, query_len=len(rows), key_len=len(columns)))
        assert_same_cells(alone.allowed(*here).expand(1, *expected.shape[1:]), expected[index : index + 1])


def test_a_mask_with_a_rule_of_its_own_keeps_it_in_a_part_of_a_call():
    class Odd(Window):
        def rule(self, batch, head, query, key):
            return super().rule(batch, head, query, key) & (key % 2 == 1)

        closed_form = False

    grid = Grid(1, 1, 9, 9)
    mask = Odd(3).bind(grid)
    assert torch.equal(
        mask.counted_from(4, 3, grid).allowed(range(3), range(4)), mask.allowed(range(4, 7), range(3, 7))
    )


def test_a_rectangle_without_cells_is_empty():
    for rows, columns in ((range(0), range(3)), (range(3), range(2, 2))):
        assert EVERYTHING.tile(rows, columns) is Tile.EMPTY
        assert (~Causal()).tile(rows, columns) is Tile.EMPTY


def test_where_looks_at_every_cell_of_a_tile_and_says_partial_of_one_too_large_to_look_at(monkeypatch):
    grid = Grid(2, 3, 5, 7)
    last = Where(lambda b, h, i, j: (b == 1) & (h == 2) & (i == 4) & (j == 6)).bind(grid)
    assert last.tile(range(5), range(7)) is Tile.PARTIAL
    assert last.tile(range(4), range(7)) is Tile.EMPTY
    assert last.tile(range(4, 5), range(6, 7)) is Tile.PARTIAL  # one batch row and head of several
    everywhere = Where(lambda b, h, i, j: i >= 0).bind(grid)
    assert everywhere.tile(range(5), range(7)) is Tile.FULL
    monkeypatch.setattr(Where, "MAX_TILE_SCORES", 2 * 3 * 5 * 6)
    assert everywhere.tile(range(5), range(6)) is Tile.FULL
    assert everywhere.tile(range(5), range(7)) is Tile.PARTIAL


def test_a_tile_of_a_structured_mask_costs_nothing_at_any_length():
    far = 1 << 40
    mask = (Causal() & (Window(256) | Prefix(4))).bind(Grid(1, 1, far, far))
    assert mask.tile(range(far - 128, far), range(4, 1 << 20)) is Tile.EMPTY
    assert mask.tile(range(far - 128, far), range(far - 200, far - 150)) is Tile.FULL
    assert mask.tile(range(far - 128, far), range(far - 128, far)) is Tile.PARTIAL
    assert mask.allowed(range(far - 1, far), range(far - 257, far - 254)).tolist() == [[[[False, True, True]]]]


# --- the algebra --------------------------------------------------------------------------------------------------


@given(st.data())
def test_masks_are_a_boolean_algebra(data):
    grid = data.draw(grids())
    a, b, c = (data.draw(single_masks(grid)).mask for _ in range(3))
    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (~~a, a),
        (a & (b | c), (a & b) | (a & c)),
        (a | (b & c), (a | b) & (a | c)),
        (a & b, b & a),
        (a | b, b | a),
        (a & a, a),
        (a | a, a),
        (a & EVERYTHING, a),
        (a | EVERYTHING, EVERYTHING),
        (a & ~a, ~EVERYTHING),
        (a | ~a, EVERYTHING),
    ):
        assert_same_cells(whole(left, grid), whole(right, grid), f"{left!r} and {right!r}")


def test_binding_simplifies_where_that_is_free():
    grid = Grid(2, 3, 5, 7)
    assert Causal().bind(Grid(2, 3, 1, 7)) is EVERYTHING  # the last token of a cache sees all of it
    assert Window(7).bind(grid) is EVERYTHING
    assert Padding([7, 7]).bind(grid) is EVERYTHING
    assert (Causal() & Window(7)).bind(Grid(2, 3, 1, 7)) is EVERYTHING
    assert (Causal() | Prefix(7)).bind(grid) is EVERYTHING
    assert isinstance((Padding([7, 7]) & Causal()).bind(grid), Causal)
    assert repr((Causal() & Window(3)).bind(grid)) == "Band(2, 0, offset=2)"
    assert repr((~~Chunk(2)).bind(grid)) == "Chunk(2, offset=2)"
    assert repr((Causal(offset=[0, 1]) & Window(2)).bind(grid)) == "Causal(offset=[0, 1]) & Window(2, offset=2)"


def test_binding_leaves_the_mask_itself_alone():
    mask = Causal()
    mask.bind(Grid(1, 1, 2, 5))
    assert mask.offset is None
    assert repr(mask) == "Causal()"
    assert mask.draw(2, 2) == "# .\n# #"


def test_a_mask_joins_only_masks():
    for wrong in (None, True, 0, Window, "causal", torch.ones(2, 2, dtype=torch.bool), [True]):
        for join, sign in ((operator.and_, "&"), (operator.or_, r"\|")):
            for pair in ((Causal(), wrong), (wrong, Causal())):
                with pytest.raises(TypeError, match=f"^{sign}: both sides must be a regard mask such as Causal.*got"):
                    join(*pair)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a, lambda a, b: 1 if a else 0,
        lambda a, b: any([a, b]), lambda a, b: all([a, b]), lambda a, b: bool(~(a & b)), lambda a, b: 1 if a | b else 0,
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", fixed_masks())
def test_a_mask_is_neither_true_nor_false(name, wrong):
    mask = fixed_masks()[name].mask
    with pytest.raises(
        TypeError, match=r"a mask is neither true nor false. Write a & b, a \| b, ~a .*mask is not None"
    ):
        wrong(mask, Window(3))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: sum([a, b]), lambda a, b: 1 - a,
        lambda a, b: 0.5 * a, lambda a, b: a + torch.zeros(2, 2), lambda a, b: torch.zeros(2, 2) + a,
    ],
)  # fmt: skip
def test_masks_are_no_numbers(wrong):
    with pytest.raises(TypeError, match=r"masks are joined with & \| ~, not with \+ - \*; numbers .* bias"):
        wrong(Causal(), Window(3))


def test_masks_are_equal_that_are_the_same_expression_of_equal_numbers():
    def made():
        rule = torch.arange(25).reshape(5, 5) % 3 == 0
        return [
            Causal(), Causal(1), Causal([0, 1]), Window(3), Window(4), Band(2, 2), Prefix(3), Prefix([3]), Strided(3),
            Chunk(3), Document.from_lengths([2, 3]), Document.from_lengths([3, 2]), Padding([3]), Dense(rule),
            Dense(~rule), ~Causal(), Causal() & Window(3), Causal() | Window(3), Window(3) & Causal(), Everything(),
        ]  # fmt: skip

    for i, one in enumerate(made()):
        for j, other in enumerate(made()):
            assert (one == other) == (i == j) != (one != other), (one, other)
            assert i != j or hash(one) == hash(other)
    assert len({*made(), *made()}) == len(made())
    assert Causal() != "Causal()"
    assert Causal() in [None, Window(2), Causal()]


def test_a_mask_that_is_a_function_equals_only_itself():
    mask = Where(lambda batch, head, query, key: query == key)
    assert mask == mask
    assert mask != Where(mask.fn)
    assert len({mask, mask, Where(mask.fn)}) == 2
    meta = torch.ones(2, 2, dtype=torch.bool, device="meta")
    assert (Dense(meta) == Dense(meta)) is False  # what it holds cannot be known


def test_a_dense_mask_that_fits_a_call_in_two_ways_is_refused_until_it_says_which():
    grid = Grid(5, 3, 5, 7)
    keys = torch.rand(5, 7) > 0.5  # of each batch row, or of each query?
    both = r"Dense: mask \[5, 7\] may be \[query_len, key_len\] or \[batch, key_len\]: both fit .* which, {} or {}"
    ways = (r"Dense\(mask\[None, None\]\)", r"Padding\(mask\)")
    for wrong in (Dense(keys), Causal() & Dense(keys), ~Dense(keys), Dense(keys).for_batch(0) | Dense(keys)):
        with pytest.raises(ShapeError, match=both.format(*ways)):
            wrong.bind(grid)
    assert torch.equal(whole(Dense(keys[None, None]), grid), keys.expand(grid[:4]))
    assert torch.equal(whole(Padding(keys), grid), keys[:, None, None].expand(grid[:4]))

    square = Grid(3, 3, 5, 7)
    cells = torch.rand(3, 5, 7) > 0.5  # of each batch row, or of each head?
    both = r"\[heads, query_len, key_len\] or \[batch, query_len, key_len\]: both fit .* which, {} or {}"
    for one in (cells, cells[:, :1]):
        with pytest.raises(ShapeError, match=both.format(r"Dense\(mask\[None\]\)", r"Dense\(mask\[:, None\]\)")):
            Dense(one).bind(square)
    assert torch.equal(whole(Dense(cells[None]), square), cells.expand(square[:4]))
    assert torch.equal(whole(Dense(cells[:, None]), square), cells[:, None].expand(square[:4]))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((7,), Grid(7, 7, 7, 7)), ((1,), Grid(7, 7, 7, 7)), ((), Grid(7, 7, 7, 7)), ((5, 7), Grid(3, 5, 5, 7)),
        ((1, 7), Grid(1, 2, 1, 7)), ((5, 1), Grid(5, 2, 5, 7)), ((3, 5, 7), Grid(2, 3, 5, 7)),
        ((1, 5, 7), Grid(1, 1, 5, 7)), ((3, 5, 1), Grid(3, 3, 5, 7)), ((3, 3, 5, 7), Grid(3, 3, 5, 7)),
    ],
)  # fmt: skip
def test_a_dense_mask_that_fits_a_call_in_one_way_counts_from_the_right_also_once_it_is_bound(shape, grid):
    mask = torch.rand(shape) > 0.5
    bound = Dense(mask).bind(grid)
    assert torch.equal(whole(bound, grid), mask.expand(grid[:4]))
    assert torch.equal(whole(bound.bind(grid), grid), mask.expand(grid[:4]))


@pytest.mark.parametrize("name", fixed_masks())
def test_every_mask_lives_with_a_batch_of_none(name):
    grid = Grid(0, 6, 7, 11)
    mask = {
        "causal offset per row": Causal(torch.empty(0, dtype=torch.int64)),
        "window without any key": Window(2, torch.empty(0, dtype=torch.int64)),
        "prefix per row": Prefix(torch.empty(0, dtype=torch.int64)),
        "padding": Padding(torch.empty(0, dtype=torch.int64)),
        "padding of a whole row": Padding(torch.empty(0, dtype=torch.int64)),
        "padding on the left": Padding(torch.empty(0, 11, dtype=torch.bool)),
        "document": Document(torch.empty(0, 7, dtype=torch.int64), torch.empty(0, 11, dtype=torch.int64)),
        "dense per row and head": Dense(torch.empty(0, 6, 7, 11, dtype=torch.bool)),
        "dense keys": Dense(torch.empty(0, 1, 1, 11, dtype=torch.bool)),
    }.get(name, fixed_masks()[name].mask)
    bound = mask.bind(grid)
    assert isinstance(bound.tile(range(7), range(11)), Tile)
    assert bound.allowed(range(7), range(11)).expand(0, 6, 7, 11).numel() == 0


# --- wrong use ----------------------------------------------------------------------------------------------------

TEN = torch.zeros(2, 10, dtype=torch.int64)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Window(0), ValueError, "Window: w must be a whole number, 1 or more, got 0"),
        (lambda: Window(2.5), ValueError, "Window: w must be a whole number, 1 or more, got 2.5"),
        (lambda: Window(True), ValueError, "w must .*, got True; Window.1. sees only the query.s own position"),
        (lambda: Strided(0), ValueError, "Strided: step .* got 0"),
        (lambda: Chunk(-3), ValueError, "Chunk: size .* got -3"),
        (lambda: Band(1.0, 2), TypeError, "Band: before must be an int or None .*, got 1.0"),
        (lambda: Band(1, True), TypeError, "Band: after must be an int or None .*, got True"),
        (lambda: Prefix(-1), ValueError, "Prefix: n must be 0 or more, got -1"),
        (lambda: Prefix([2, -1]), ValueError, r"Prefix: n must be 0 or more, got \[2, -1\]"),
        (lambda: Prefix(2.0), TypeError, "Prefix: n must be an int, or one int per batch index, got 2.0"),
        (
            lambda: Causal(offset="left"),
            TypeError,
            "Causal: offset must be an int, or one int per batch index, got 'left'",
        ),
        (lambda: Causal(offset=True), TypeError, "Causal: offset .* got True"),
        (lambda: Causal(offset=[1.5]), TypeError, "Causal: offset .* got torch.float32"),
        (lambda: Causal(offset=TEN), TypeError, r"Causal: offset .* got torch.int64 \[2, 10\]"),
        (lambda: Causal(offset=[[1], [2, 3]]), TypeError, r"Causal: offset .* got \[\[1\], \[2, 3\]\]"),
        (lambda: Document([0, 1]), TypeError, "Document: query_ids must be an int tensor .*, got list"),
        (lambda: Document(TEN.float()), TypeError, r"Document: query_ids .* got torch.float32 \[2, 10\]"),
        (lambda: Document(TEN.bool()), TypeError, "Document: query_ids .* got torch.bool"),
        (lambda: Document(TEN[None]), TypeError, r"Document: query_ids .* got torch.int64 \[1, 2, 10\]"),
        (lambda: Document(TEN, TEN.float()), TypeError, "Document: key_ids .* got torch.float32"),
        (
            lambda: Document(TEN, TEN.to("meta")),
            ValueError,
            "query_ids and key_ids must be on one device, got cpu and meta",
        ),
        (lambda: Document.from_lengths([[2, 2], [2, 3]]), ValueError, r"same number of tokens, got \[4, 5\]"),
        (lambda: Document.from_lengths([2, -1]), ValueError, r"whole numbers, 0 or more, got \[2, -1\]"),
        (lambda: Document.from_lengths([]), ValueError, r"whole numbers, 0 or more, got \[\]"),
        (lambda: Document.from_lengths([2.5, 1]), ValueError, "whole numbers, 0 or more, got"),
        (lambda: Document.from_lengths(5), TypeError, "Document.from_lengths: lengths must be .*, got 5"),
        (lambda: Padding([3, -1]), ValueError, r"Padding: lengths must be 0 or more, got \[3, -1\]"),
        (lambda: Padding(TEN), TypeError, r"Padding: keys must be .* got torch.int64 tensor \[2, 10\]; use .bool\(\)"),
        (lambda: Padding(TEN.float()), TypeError, "Padding: keys must be .* got torch.float32"),
        (lambda: Padding(TEN[0].bool()), ShapeError, r"Padding: a bool mask must be \[batch, key_len\], got \[10\]"),
        (lambda: Padding(7), TypeError, "Padding: keys .* got 7"),
        (
            lambda: Dense(TEN),
            TypeError,
            r"Dense: mask must be a bool tensor .*, got torch.int64 tensor .* pass tensor.bool\(\); .*Padding",
        ),
        (lambda: Dense(TEN.float()), TypeError, "Dense: .* got torch.float32 .* go into bias; of 1 and 0"),
        (lambda: Dense(TEN.bool().numpy()), TypeError, r"Dense: .* got numpy.ndarray \[2, 10\]; pass torch.as_tensor"),
        (lambda: Dense(TEN.bool().to_sparse()), TypeError, r"Dense: .* got torch.bool sparse_coo tensor .*to_dense"),
        (lambda: Padding(TEN.bool().numpy()), TypeError, r"Padding: .* got numpy.ndarray \[2, 10\]; pass torch.as_te"),
        (lambda: Padding(TEN.bool()[:, None, None]), ShapeError, r"Padding: .* got \[2, 1, 1, 10\]; that is Dense"),
        (lambda: Dense([[True]]), TypeError, "Dense: mask must be a bool tensor .*, got list"),
        (
            lambda: Dense(TEN.bool()[None, None, None]),
            ShapeError,
            r"Dense: mask has more axes than .*: \[1, 1, 1, 2, 10\]",
        ),
        (lambda: Where(3), TypeError, "Where: fn must be a function of .*, got int"),
        (lambda: Where(lambda q, k: q >= k), TypeError, r"Where: .* got one of \(q, k\); .*rule\(query, key\)"),
        (lambda: Where(lambda: True), TypeError, r"Where: fn must be a function of .*, got one of \(\)"),
        (lambda: Where(lambda *, b, h, q, k: q >= k), TypeError, r"Where: fn must be a function of .*, got one of"),
    ],
)
def test_a_mask_that_cannot_be_is_refused_when_it_is_made(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("mask", "error", "says"),
    [
        (Causal(offset=[1, 2, 3]), ShapeError, "Causal: offset is for batch=3, the scores are .batch=2, heads=3"),
        (Prefix([1, 2, 3]), ShapeError, "Prefix: n is for batch=3"),
        (Padding([1, 2, 3]), ShapeError, "Padding: lengths is for batch=3"),
        (Padding([1, 8]), ShapeError, "Padding: a row has 8 real keys, but the scores are .*key_len=7"),
        (
            Padding(torch.ones(2, 6, dtype=torch.bool)),
            ShapeError,
            "Padding: keys is for .batch=2, key_len=6., the scores",
        ),
        (Padding(torch.ones(3, 7, dtype=torch.bool)), ShapeError, "Padding: keys is for .batch=3, key_len=7."),
        (Padding(torch.ones(2, 7, dtype=torch.bool, device="meta")), ValueError, "Padding: keys is on meta, .* cpu"),
        (Document(TEN[:, :5]), ShapeError, "Document: key_ids is for .batch=2, key_len=5., .*; give key_ids too"),
        (Document(TEN[:, :4], TEN[:, :7]), ShapeError, "Document: query_ids is for .batch=2, query_len=4."),
        (Document(TEN[:1, :5].expand(3, 5), TEN[:, :7]), ShapeError, "query_ids is for .batch=3, query_len=5."),
        (Document(TEN[:, :5].to("meta"), TEN[:, :7].to("meta")), ValueError, "Document: query_ids is on meta"),
        (Dense(torch.ones(5, 6, dtype=torch.bool)), ShapeError, r"Dense: mask \[5, 6\] does not broadcast"),
        (
            Dense(torch.ones(2, 5, 7, dtype=torch.bool)),
            ShapeError,
            r"mask \[2, 5, 7\] does not .*; if it is \[batch, query_len, key_len\]: Dense\(mask\[:, None\]\)",
        ),
        (
            Dense(torch.ones(2, 7, dtype=torch.bool)),
            ShapeError,
            r"Dense: mask \[2, 7\] does not broadcast .*; if it is \[batch, key_len\]: Padding\(mask\)",
        ),
        (Dense(torch.ones(5, 7, dtype=torch.bool, device="meta")), ValueError, "Dense: mask is on meta"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Mask) else "",
)
def test_a_mask_for_another_call_is_refused_when_it_is_bound_also_inside_others(mask, error, says):
    grid = Grid(2, 3, 5, 7)
    for wrong in (mask, ~mask, mask & Causal(), Causal() | mask):
        with pytest.raises(error, match=says):
            wrong.bind(grid)


@pytest.mark.parametrize(
    ("fn", "error", "says"),
    [
        (lambda b, h, i, j: i - j, TypeError, "Where: fn must return a bool tensor .*, got torch.int64"),
        (lambda b, h, i, j: True, TypeError, "Where: fn must return a bool tensor .*, got bool"),
        (lambda b, h, i, j: None, TypeError, "Where: fn must return a bool tensor .*, got NoneType"),
        (lambda b, h, i, j: torch.ones(4, 7).bool(), ShapeError, r"Where: fn returned \[4, 7\], .* \[2, 3, 5, 7\]"),
        (lambda b, h, i, j: torch.ones(1, 1, 1, 1, 1).bool(), ShapeError, r"Where: fn returned \[1, 1, 1, 1, 1\]"),
    ],
)
def test_where_says_what_its_function_should_have_returned(fn, error, says):
    with pytest.raises(error, match=says):
        Where(fn).bind(Grid(2, 3, 5, 7)).allowed(range(5), range(7))


def test_where_takes_any_answer_that_broadcasts():
    grid = Grid(2, 3, 5, 7)
    for shape in ((), (7,), (5, 1), (3, 5, 7), (2, 1, 1, 7), (1, 1, 1, 1)):
        mask = Where(lambda b, h, i, j, shape=shape: torch.ones(shape, dtype=torch.bool)).bind(grid)
        assert mask.allowed(range(5), range(7)).expand(grid[:4]).all()
        assert mask.tile(range(5), range(7)) is Tile.FULL


@pytest.mark.parametrize(
    "which", [slice(3, None), 5, None, torch.tensor([0.5]), torch.tensor([[1]]), torch.tensor([True])]
)
def test_queries_and_keys_are_ranges_slices_with_a_stop_or_integers(which):
    with pytest.raises(TypeError, match="got"):
        Causal().allowed(which, range(3))
    with pytest.raises(TypeError, match="got"):
        (Causal() & Window(2)).allowed(range(3), which)


def test_a_tile_has_no_gaps():
    with pytest.raises(ValueError, match="a rectangle has no gaps"):
        Causal().tile(range(0, 4, 2), range(3))


def test_everything_is_one_object():
    assert isinstance(EVERYTHING, Everything)
    assert EVERYTHING.bind(GRID) is EVERYTHING
    assert EVERYTHING.draw(2, 3) == "# # #\n# # #"


def test_the_keys_that_one_query_sees_in_a_band_are_those_of_its_cells():
    for before, after, offset in product((None, 0, 2, 20), (None, 0, 1, 20), (-3, 0, 4, 30)):
        grid = Grid(1, 1, 5, 11)
        band = Band(before, after, offset).bind(grid)
        cells = band.allowed(range(5), range(11)).expand(1, 1, 5, 11)[0, 0]
        for query, (start, stop) in product(range(5), ((0, 11), (3, 8), (4, 4))):
            seen = common_keys(band, range(query, query + 1), stop, start)
            assert seen is not None
            assert list(seen) == [key for key in range(start, stop) if cells[query, key]]


@settings(max_examples=300)
@given(
    st.none() | st.integers(-40, 40), st.none() | st.integers(-40, 40), st.integers(1, 12), st.integers(0, 30),
    st.sampled_from([1, 2, 3, 8]),
)  # fmt: skip
def test_queries_that_are_computed_together_skip_the_keys_that_none_of_them_sees(low, high, times, columns, together):
    apart = torch.arange(columns) - torch.arange(times * together)[:, None]
    after_first, before_last = apart >= (-100 if low is None else low), apart <= (100 if high is None else high)
    computed = (after_first[::together] & before_last[together - 1 :: together]).sum() * together
    assert cells_on((low, high), range(times * together), range(columns), together) == computed


@settings(max_examples=150)
@given(
    st.integers(2, 9), st.integers(1, 3), st.integers(-40, 40), st.none() | st.integers(-40, 40),
    st.none() | st.integers(-40, 40), *[st.integers(0, 30)] * 2, *[st.integers(1, 12)] * 2,
)  # fmt: skip
def test_diagonals_of_queries_and_keys_with_a_step_are_those_of_their_cells(
    divisor, times, offset, before, after, first_query, first_key, rows, columns
):
    step = divisor * times
    queries, keys = (range(at, at + n * step, step) for at, n in ((first_query, rows), (first_key, columns)))
    mask = Strided(divisor, offset=offset) & Band(before, after, offset=offset)
    found = diagonals_of(mask, queries, keys)
    cells = mask.allowed(torch.tensor(queries), torch.tensor(keys)).expand(1, 1, rows, columns)[0, 0]
    if found is None:
        assert (first_query + offset - first_key) % divisor
        return
    low, high = (end if end is not None else far for end, far in zip(found, (-(10**6), 10**6), strict=True))
    apart = torch.arange(columns) - torch.arange(rows)[:, None]
    assert_same_cells((apart >= low) & (apart <= high), cells)
