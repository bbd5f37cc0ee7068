"""What the page can ask: its numbers are those of the library, whatever makes a score."""

import pytest
import torch

from regard import Alibi, Causal, Dense, Document, Padding, Prefix, Window
from regard.viewer.codes import ONE, PER_OCTAVE, decode, encode
from viewing import ask, observed_session

LENGTH = 600
IDS = torch.arange(LENGTH) // 97


def given(**scoring):
    return scoring


CALLS = {
    "causal": given(),
    "window": given(mask=Causal() & Window(50)),
    "documents": given(mask=Causal() & Document(IDS)),
    "padding": given(mask=Padding(torch.tensor([500]))),
    "random": given(mask=Dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)) > 0.5)),
    "softcap": given(softcap=2.0),
    "sink": given(sink=torch.tensor([1.5, -0.5])),
    "alibi": given(bias=Alibi(2)),
    "table": given(bias=torch.randn(2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(4))),
    "everything": given(mask=None, scale=0.1),
    "grouped": given(heads=4, kv_heads=2),
    "cross": given(mask=None, key_len=300),
}


@pytest.fixture(scope="module", params=CALLS)
def session_and_weights(request):
    session, exact = observed_session(LENGTH, **CALLS[request.param])
    return session, exact.weights()[0]


def codes_of(meta, data):
    side = int((len(data) // 2) ** 0.5)
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint16).view(side, side)
    assert not whole[meta["rows"] :].to(torch.int32).any()
    return whole[: meta["rows"], : meta["columns"]]


def pooled(weights, step, pool):
    """Cells of weights [queries, keys], written out."""
    rows, columns = weights.shape
    cells = torch.nn.functional.pad(weights, (0, -columns % step, 0, -rows % step)).unflatten(1, (-1, step))
    cells = cells.unflatten(0, (-1, step))  # [cells, queries, cells, keys]
    if pool == "max":
        return cells.amax((1, 3))
    queries = torch.tensor([min(step, rows - start) for start in range(0, rows, step)])
    return cells.sum((1, 3)) / queries[:, None]


def test_a_tile_is_the_codes_of_the_weights_at_every_level(session_and_weights):
    session, weights = session_and_weights
    for head, whole in enumerate(weights):
        for level, row, column, pool in ((0, 1, 0, "max"), (0, 2, 1, "mean"), (1, 0, 0, "max"), (2, 0, 0, "mean")):
            if column * 256 << level >= whole.shape[1]:
                continue
            meta, data = ask(session, "tile", layer=0, head=head, level=level, row=row, column=column, pool=pool)
            codes, side = codes_of(meta, data), 256 << level
            part = whole[row * side :, column * side :][:side, :side]
            expected = pooled(part, 1 << level, pool)
            assert meta["exact"]
            assert torch.equal(codes.to(torch.int32) > 0, expected > 0)
            assert_codes_are(codes, expected)


def assert_codes_are(codes, weights):
    """Within one code, as float32 may round to the next."""
    seen = weights > 2.0**-31
    exact = ONE + PER_OCTAVE * weights[seen].log2()
    assert float((codes.to(torch.float64)[seen] - exact).abs().max()) <= 1.1


def test_a_wrong_code_is_seen():
    weights = torch.rand(5, 7, dtype=torch.float64)
    assert_codes_are(encode(weights.log2()), weights)
    with pytest.raises(AssertionError):
        assert_codes_are(encode(weights.log2() + 0.01), weights)
    torch.testing.assert_close(decode(encode(weights.log2())), weights, rtol=1.8e-4, atol=0)


def test_rows_of_mass_sum_to_one_less_the_sink(session_and_weights):
    session, weights = session_and_weights
    for head, whole in enumerate(weights):
        codes = codes_of(*ask(session, "tile", layer=0, head=head, level=2, row=0, column=0, pool="mean"))
        expected = torch.stack([part.sum(-1).mean() for part in whole.split(4)])
        torch.testing.assert_close(decode(codes).sum(-1), expected, rtol=2e-4, atol=1e-6)


def test_rows_columns_rectangles_and_single_weights_are_those_of_the_observation(session_and_weights):
    session, weights = session_and_weights
    heads, query_len, key_len = weights.shape
    meta, data = ask(session, "row", query=333)
    assert meta["heads"] == [[0, head] for head in range(heads)]
    rows = torch.frombuffer(bytearray(data), dtype=torch.float32).view(heads, key_len)
    torch.testing.assert_close(rows.double(), weights[:, 333], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(torch.tensor(meta["sink"]).double(), 1 - weights[:, 333].sum(-1), rtol=0, atol=1e-5)
    _, data = ask(session, "column", key=200, heads=[[0, 1]])
    column = torch.frombuffer(bytearray(data), dtype=torch.float32)
    torch.testing.assert_close(column.double(), weights[1, :, 200], rtol=1e-4, atol=1e-7)
    meta, data = ask(session, "sel", queries=[100, 110], keys=[90, 107], heads=[[0, 0]])
    part = torch.frombuffer(bytearray(data), dtype=torch.float32).view(meta["rows"], meta["columns"])
    torch.testing.assert_close(part.double(), weights[0, 100:110, 90:107], rtol=1e-4, atol=1e-7)
    for query, key in ((333, 290), (333, 40), (10, 250)):
        cell, _ = ask(session, "cell", layer=0, head=1, query=query, key=key)
        assert cell["weight"] == pytest.approx(float(weights[1, query, key]), rel=1e-12)
        assert cell["hidden"] == (float(weights[1, query, key]) == 0)
    assert query_len == LENGTH


def test_a_larger_cell_says_where_its_largest_weight_is(session_and_weights):
    session, weights = session_and_weights
    cell, _ = ask(session, "cell", layer=0, head=0, queries=[320, 352], keys=[288, 296])
    part = weights[0, 320:352, 288:296]
    assert cell["max"] == pytest.approx(float(part.max()), rel=1e-4)
    assert cell["mass"] == pytest.approx(float(part.sum()) / 32, rel=1e-4)
    assert float(weights[0, cell["query"], cell["key"]]) == float(part.max())


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (Causal() & Window(30), "window 30"),
        (Causal() & (Window(20) | Prefix(3)), "window 20 and the first 3"),
        (Causal() & (Prefix(torch.tensor([3])) | Window(20)), "window 20 and the first keys"),
        (Causal() | Prefix(3), None),
        (Causal() & (Window(20) | Document(torch.zeros(60, dtype=torch.int64))), None),
    ],
)
def test_a_window_is_named_with_the_first_keys_that_are_seen_besides(mask, words):
    session, _ = observed_session(60, mask=mask)
    (layer,) = ask(session, "info")[0]["layers"]
    assert [trait for trait in layer["traits"] if "window" in trait] == ([] if words is None else [words])
