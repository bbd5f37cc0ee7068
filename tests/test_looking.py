"""Statistics by the compiled library against dense weights in float64, for generated calls of any form."""

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import regard
from cases import needs_library
from comparing import assert_close
from regard import Alibi, Causal, Dense, Document, Padding, Prefix, Strided, Where, Window, observe
from regard.kernels.strips import tuning
from regard.observation import Entropy, Image, Pyramid, Received, Top, Visible, compiled

pytestmark = [needs_library, pytest.mark.usefixtures("sorts_few")]

MASKS = {
    "nothing": lambda some: None,
    "causal": lambda some: Causal(),
    "window": lambda some: Causal() & Window(some.choice([1, 7, 40])),
    "window and first keys": lambda some: Causal() & (Window(some.choice([3, 33])) | Prefix(some.choice([1, 5]))),
    "every third key": lambda some: Causal() & Strided(3),
    "window or stride": lambda some: Causal() & (Window(some.choice([4, 20])) | Strided(some.choice([5, 11]))),
    "window or stride, padded": lambda some: (Window(9) | Strided(9)) & Padding([some.randrange(LENGTH), LENGTH - 3]),
    "documents": lambda some: Causal() & Document.from_lengths(_lengths(some)),
    "documents apart or a prefix": lambda some: (
        Causal() & (Document(torch.randint(0, 4, (1, LENGTH), generator=_draw(some))) | Prefix(9))
    ),
    "documents, tokens apart": lambda some: Document(torch.randint(0, 4, (1, LENGTH), generator=_draw(some))),
    "documents, tokens apart in windows": lambda some: (
        Causal() & Window(some.choice([9, 70])) & Document(torch.randint(0, 4, (2, LENGTH), generator=_draw(some)))
    ),
    "padding": lambda some: Padding([some.randrange(LENGTH), LENGTH - 3]),
    "any cells": lambda some: Dense(torch.rand(2, 1, LENGTH, LENGTH, generator=_draw(some)) < 0.4),
    "a rule": lambda some: Where(lambda batch, head, query, key: (query + key) % (2 + batch) == 0),
}
LENGTH = 150


def _draw(some: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(some.randrange(1 << 30))


def _lengths(some: random.Random) -> list[int]:
    lengths: list[int] = []
    while sum(lengths) < LENGTH:
        lengths.append(min(some.randint(1, 60), LENGTH - sum(lengths)))
    return lengths


def dense(query: Tensor, key: Tensor, scoring: regard.scores.Scoring) -> tuple[Tensor, Tensor]:
    """Weights and lse in float64, by the reference's formula; 0 and -inf where nothing is seen."""
    length = [range(size) for size in scoring.grid[2:4]]
    scores = scoring.tile(query.double(), key.double(), *length)
    sink = None if scoring.sink is None else scoring.sink.double()[:, None, None].expand(*scores.shape[:3], 1)
    lse = torch.logsumexp(scores if sink is None else torch.cat([scores, sink], dim=-1), dim=-1)
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp(), lse


def pooled(weights: Tensor, size: int, pool: str) -> Tensor:
    down, right = (max(1, -(-length // size)) for length in weights.shape[-2:])
    if pool == "max":
        rows = torch.stack([part.amax(-2) for part in weights.split(down, -2)], -2)
        return torch.stack([part.amax(-1) for part in rows.split(right, -1)], -1)
    columns = torch.stack([part.sum(-1) for part in weights.split(right, -1)], -1)
    return torch.stack([part.mean(-2) for part in columns.split(down, -2)], -2)


def check(name: str, seed: int) -> None:
    """All statistics of one generated call."""
    some = random.Random(f"{name} {seed}")
    kv_heads, group = some.choice([(1, 1), (2, 1), (1, 4), (2, 2)])
    dtype = some.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    few = name in ("nothing", "causal", "window") and some.random() < 0.3
    query_len, size = some.choice([1, 5, 16]) if few else LENGTH, some.choice([3, 16, 40])
    query = torch.randn(2, kv_heads * group, query_len, size, generator=_draw(some)).to(dtype)
    key = torch.randn(2, kv_heads, LENGTH, size, generator=_draw(some)).to(dtype)
    given = {
        "mask": MASKS[name](some),
        "bias": some.choice([None, Alibi(kv_heads * group), torch.randn(query_len, LENGTH, generator=_draw(some))]),
        "softcap": some.choice([None, 3.0]),
        "sink": some.choice([None, torch.linspace(-2, 1, kv_heads * group)]),
    }
    seen, other = observe(query, key, **given), observe(query, key, **given)
    assert compiled.supports(seen.call)
    weights, lse = dense(query, key, seen.scoring)
    size = some.choice([1, 7, 64, 150])
    asked = Entropy(), Received(), Top(5), Image(size), Image(size, "mean"), Pyramid(size), Visible()
    entropy, received, top, most, mean, pyramid, visible = seen.gather(*asked)
    scale = float(weights.sum(-2).amax())
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5

    def close(actual: Tensor, expected: Tensor, what: str, by: float = 1.0) -> None:
        assert_close(actual.double() / by, expected / by, f"{what}: {name} {seed}", tolerance=tolerance)

    close(seen.lse.masked_fill(seen.lse == -math.inf, -1e3), lse.masked_fill(lse == -math.inf, -1e3), "lse", 10.0)
    of_sink = 0.0 if given["sink"] is None else (given["sink"].double()[:, None] - lse).exp()
    spread = torch.special.entr(weights).sum(-1) + torch.special.entr(torch.as_tensor(of_sink))
    close(entropy, spread.expand_as(lse), "entropy", 5.0)
    close(received, weights.sum(-2), "received", scale)
    expected = weights.topk(5).values
    close(top.weights, expected, "top")
    assert bool(((top.keys == -1) == (top.weights == 0)).all())
    close(weights.gather(-1, top.keys.clamp(min=0)) * (top.keys >= 0), top.weights.double(), "the keys of top")
    close(most, pooled(weights, size, "max"), "image, max")
    close(mean, pooled(weights, size, "mean"), "image, mean")
    close(pyramid[0], pooled(weights, size, "max"), "pyramid")
    assert torch.equal(visible, (seen.scores() > -math.inf).sum(-1))
    # with lse known, alone and together, the same bits
    again = observe(query, key, **given, lse=seen.lse)
    assert torch.equal(again.entropy(), entropy)
    assert torch.equal(again.received(), received)
    assert torch.equal(again.image(size, "mean"), mean)
    assert torch.equal(other.top(5).keys, top.keys)
    start = some.randrange(query_len)
    close(observe(query, key, **given).weights(slice(start, start + 3)), weights[:, :, start : start + 3], "rows")


@pytest.mark.parametrize("name", MASKS)
def test_generated_calls(name, monkeypatch):
    monkeypatch.setattr(tuning, "KEYS_WORTH_MERGING", 0)  # unions are parted, short as they are
    for seed in range(12):
        check(name, seed)


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_as_there_are_and_as_many_reports_give_the_same(threads, monkeypatch):
    query, key = torch.randn(1, 1, 700, 16), torch.randn(1, 1, 700, 16)
    whole = observe(query, key, mask=Causal()).gather(Entropy(), Received(), Image(9, "mean"), Top(4))
    monkeypatch.setattr(tuning, "SCORES_BETWEEN_REPORTS", 1 << 13)
    reports, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = observe(query, key, mask=Causal())
        parts = seen.gather(Entropy(), Received(), Image(9, "mean"), Top(4), progress=lambda *of: reports.append(of))
    finally:
        torch.set_num_threads(before)
    assert len(reports) > 3
    assert reports[-1] == (700, 700)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})
    (*whole, largest), (*parts, too) = whole, parts
    for one, other in zip((*whole, *largest), (*parts, *too), strict=True):
        assert_close(one.double(), other.double(), tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 21])
def test_any_number_of_the_largest_weights_is_found(n, dtype):
    """Eight places of a list are held in registers; what they have no place for goes on to the next eight."""
    query, key = torch.randn(2, 1, 3, 300, 8, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    seen = observe(query, key, mask=Causal())
    expected = seen.weights().topk(n, dim=3)
    found = seen.top(n)
    first = torch.arange(300) >= n  # with as many keys
    assert_close(found.weights, expected.values)
    assert torch.equal(found.keys[:, :, first], expected.indices[:, :, first])


def test_of_equal_weights_the_first_keys_are_told():
    top = observe(torch.zeros(1, 1, 40, 4), torch.zeros(1, 1, 300, 4)).top(3)
    assert bool((top.keys == torch.arange(3)).all())


@pytest.mark.parametrize("low", [-1e9, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & (Window(4) | Strided(5))], ids=repr)
def test_weights_are_found_where_all_biases_are_so_low_that_lse_does_not_tell_them(low, mask):
    query, key = torch.zeros(1, 2, LENGTH, 8), torch.randn(1, 2, LENGTH, 8)
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    bias[..., 7, :] = low
    every = range(LENGTH)
    allowed = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool) if mask is None else mask.allowed(every, every)
    weights = (allowed / allowed.sum(-1, keepdim=True)).expand(1, 2, LENGTH, LENGTH)
    lse = observe(query, key, mask=mask, bias=bias).lse
    for known in (None, lse):
        entropy, received, top = observe(query, key, mask=mask, bias=bias, lse=known).gather(
            Entropy(), Received(), Top(3)
        )
        assert_close(entropy, torch.special.entr(weights).sum(-1))
        assert_close(received, weights.sum(-2))
        assert_close(top.weights, weights.topk(3).values)


def test_nan_that_is_hidden_reaches_nothing_and_nan_that_is_seen_is_told():
    query, key = torch.randn(2, 1, 2, 80, 8)
    key[:, :, 60:] = math.nan
    seen = observe(query, key, mask=Padding([60]))
    for numbers in (*seen.gather(Entropy(), Received(), Image(8), Image(8, "mean")), *seen.top(3)):
        assert bool(numbers.isfinite().all())
    query[0, 1, 7] = math.nan
    seen = observe(query, key, mask=Padding([60]))
    entropy, received, most, top = seen.gather(Entropy(), Received(), Image(80), Top(3))
    assert bool(entropy[0, 1, 7].isnan())
    assert int(entropy.isnan().sum()) == 1
    assert bool(received[0, 1, :60].isnan().all())
    assert bool(received[0, 1, 60:].eq(0).all() and received[0, 0].isfinite().all())
    assert bool(most[0, 1, 7, :60].isnan().all())
    assert bool(top.weights[0, 1, 7].isnan().all())


def test_what_the_library_does_not_compute_is_computed_by_tiles(monkeypatch):
    monkeypatch.setattr(compiled, "look", lambda *given, **more: pytest.fail("it was called"))
    query = torch.randn(1, 2, 30, 4)

    class Squares(Entropy):
        def of(self, tile):
            return tile.weights.square().sum(-1)

        def finish(self):
            return self.total

    seen = observe(query, query, mask=Causal(), lse=torch.zeros(1, 2, 30))
    seen.ask(Squares())
    seen.image(4, queries=slice(3, 20))
    seen.distance()
    observe(query, torch.randn(1, 2, 90, 4), lse=torch.zeros(1, 2, 30)).top(60)
    observe(query.clone().requires_grad_(), query, mask=Causal()).entropy().sum().backward()
    with pytest.raises(pytest.fail.Exception):
        seen.entropy()


def test_interrupted_between_two_reports_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(tuning, "SCORES_BETWEEN_REPORTS", 1 << 13)
    query = torch.randn(1, 1, 700, 16)
    seen = observe(query, query, mask=Causal())

    def stop(done, all):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        seen.gather(Entropy(), progress=stop)
    assert seen.call.lse is None
    assert_close(seen.entropy(), observe(query, query, mask=Causal()).entropy())


def test_with_avx2_alone_it_computes_the_same():
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, test_looking
from regard.kernels.strips import binding
assert binding.name() == "x86-64-v3"
for name in test_looking.MASKS:
    for seed in range(2):
        test_looking.check(name, seed)
print("done")
"""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "done", done.stderr
