"""What a small call of `regard.attention` costs beyond `torch.nn.functional.scaled_dot_product_attention`.

    python benchmarks/small_calls.py [--repeats 2000] [--output benchmarks/results/small_calls.json]

Small calls are where a library's own checking and choosing shows. Both functions are called in turn, pair by pair, on
the same tensors, and the medians of all pairs are compared; the difference is the price of regard's gate and choice.
They are timed twice: one right after the other, and each after other work, as between the layers of a model, when code
and objects have left the processor's caches. Where something learns, the backward pass is timed with the call.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from regard import Alibi, Causal, Document, Padding, Prefix, Where, Window, bench
from regard.shapes import Grid

Shape = tuple[int, int, int, int]


def cases() -> list[tuple[str, Shape, torch.dtype, Callable[..., Tensor], Callable[..., Tensor]]]:
    """Name, shape [batch, heads, length, head_dim], dtype, torch's call and regard's."""
    small: Shape = (1, 12, 128, 64)

    def torch_causal(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, is_causal=True)

    def ours(mask: regard.Mask) -> Callable[..., Tensor]:
        return lambda *tensors: regard.attention(*tensors, mask=mask)

    def growing(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """One query, and one key more in every call, as in writing token by token."""
        lengths = itertools.cycle(range(300, 900))

        def one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            length = next(lengths)
            return call(query[:, :, -1:], key[:, :, :length], value[:, :, :length])

        return one

    def learning(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same with its backward pass, of tensors that need gradients."""

        def one(*tensors: Tensor) -> Tensor:
            output = call(*tensors)
            torch.autograd.grad(output, tensors, output.detach())
            return output

        return one

    def torch_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key[:, :, -256:], value[:, :, -256:])

    places, same_places = itertools.cycle(range(300, 900)), itertools.cycle(range(300, 900))

    def at_its_place(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query[:, :, -1:], key, value, mask=Causal(offset=next(places)))

    def torch_until(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        stop = next(same_places) + 1
        return F.scaled_dot_product_attention(query[:, :, -1:], key[:, :, :stop], value[:, :, :stop])

    real = torch.arange(900)[None] >= 7

    def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=Causal() & Padding(real[:, : key.shape[2]]))

    def torch_padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=real[:, None, None, : key.shape[2]])

    slopes = Alibi(8)
    table = slopes.bind(Grid(1, 8, 1, 900)).values(range(1), range(900))

    def torch_alibi(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=table[..., -key.shape[2] :])

    def torch_ends(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ends = (torch.cat([tensor[:, :, :4], tensor[:, :, -256:]], 2) for tensor in (key, value))
        return F.scaled_dot_product_attention(query, *ends)

    def ours_alibi(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return regard.attention(query, key, value, bias=table[..., -key.shape[2] :])

    cache: Shape = (1, 8, 900, 64)
    last, ends = Causal() & Window(256), Causal() & (Window(256) | Prefix(4))
    return [
        ("causal", small, torch.float32, torch_causal, ours(Causal())),
        ("causal", small, torch.bfloat16, torch_causal, ours(Causal())),
        ("full", small, torch.float32, F.scaled_dot_product_attention, regard.attention),
        ("causal, window wider than the text", small, torch.float32, torch_causal, ours(Causal() & Window(4096))),
        ("padding without any", small, torch.float32, F.scaled_dot_product_attention, ours(Padding([128]))),
        ("causal, tiny", (1, 2, 8, 16), torch.float32, torch_causal, ours(Causal())),
        (
            "1 query, growing cache, causal",
            cache,
            torch.float32,
            growing(F.scaled_dot_product_attention),
            growing(ours(Causal())),
        ),
        ("1 query, growing cache, window 256", cache, torch.float32, growing(torch_last), growing(ours(last))),
        (
            "1 query, growing cache, window 256 or prefix 4",
            cache,
            torch.float32,
            growing(torch_ends),
            growing(ours(ends)),
        ),
        ("1 query, growing cache, padding", cache, torch.float32, growing(torch_padded), growing(padded)),
        ("1 query, growing cache, bias tensor", cache, torch.float32, growing(torch_alibi), growing(ours_alibi)),
        (
            "1 query, growing cache, ALiBi",
            cache,
            torch.float32,
            growing(torch_alibi),
            growing(lambda *tensors: regard.attention(*tensors, mask=Causal(), bias=slopes)),
        ),
        ("1 query, static cache, its offset", cache, torch.float32, torch_until, at_its_place),
        *any_length(),
        ("causal, tiny, learns", (1, 2, 8, 16), torch.float32, learning(torch_causal), learning(ours(Causal()))),
        ("causal, 64 tokens, learns", (1, 12, 64, 64), torch.float32, learning(torch_causal), learning(ours(Causal()))),
    ]


def any_length() -> list[tuple[str, Shape, torch.dtype, Callable[..., Tensor], Callable[..., Tensor]]]:
    """Calls of another length each, from 128 to 255 tokens, with padding and documents of their own; some in graphs of
    torch.compile that are for any length."""
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randperm(128, generator=draw) + 128).tolist()
    ids = [(torch.rand(1, length, generator=draw) < 0.03).cumsum(1) for length in lengths]
    real = [torch.arange(length)[None] < length - length % 16 for length in lengths]
    slopes = Alibi(8)
    later = torch.ones(255, 255, dtype=torch.bool).triu(1)
    table = slopes.bind(Grid(1, 8, 255, 255)).values(range(255), range(255)).masked_fill(later, -torch.inf)
    ends = Causal() & (Window(64) | Prefix(4))
    cells = ends.bind(Grid(1, 8, 255, 255)).allowed(range(255), range(255))

    def another(call: Callable[..., Tensor], *data: list[Tensor]) -> Callable[..., Tensor]:
        texts = itertools.cycle(zip(lengths, *data, strict=True))

        def of_next(*tensors: Tensor) -> Tensor:
            length, *of_text = next(texts)
            return call(*(tensor[:, :, :length] for tensor in tensors), *of_text)

        return of_next

    def torch_alibi(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=table[..., :length, :length])

    def torch_ends(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=cells[..., :length, :length])

    early = torch.arange(255) < 8

    def torch_prefix(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
        seen = (ids.mT == ids) | early[: key.shape[2]]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen)

    def by_function(ids: Tensor) -> Where:
        return Where(lambda batch, head, query, key: ids[batch, query] == ids[batch, key])

    pairs: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "causal": (
            another(partial(F.scaled_dot_product_attention, is_causal=True)),
            another(lambda *three: regard.attention(*three, mask=Causal())),
        ),
        "ALiBi, causal": (
            another(torch_alibi),
            another(lambda *three: regard.attention(*three, mask=Causal(), bias=slopes)),
        ),
        "window 64 or prefix 4": (
            another(torch_ends),
            another(lambda *three: regard.attention(*three, mask=ends)),
        ),
        "padding": (
            another(lambda q, k, v, real: F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None]), real),
            another(lambda q, k, v, real: regard.attention(q, k, v, mask=Padding(real)), real),
        ),
        "documents": (
            another(lambda q, k, v, ids: F.scaled_dot_product_attention(q, k, v, attn_mask=ids.mT == ids), ids),
            another(lambda q, k, v, ids: regard.attention(q, k, v, mask=Document(ids)), ids),
        ),
        "documents or a prefix": (
            another(torch_prefix, ids),
            another(lambda q, k, v, ids: regard.attention(q, k, v, mask=Document(ids) | Prefix(8)), ids),
        ),
        "documents by a function": (
            another(lambda q, k, v, ids: F.scaled_dot_product_attention(q, k, v, attn_mask=ids.mT == ids), ids),
            another(lambda q, k, v, ids: regard.attention(q, k, v, mask=by_function(ids)), ids),
        ),
    }
    of_graphs = {"ALiBi, causal": (torch_alibi, partial(regard.attention, mask=Causal(), bias=slopes))}
    of_graphs["padding"] = (
        lambda q, k, v, real: F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None]),
        lambda q, k, v, real: regard.attention(q, k, v, mask=Padding(real)),
    )
    for name, both in of_graphs.items():
        data = [real] if name == "padding" else []
        theirs, ours = (another(torch.compile(call, dynamic=True), *data) for call in both)
        pairs[f"{name}, compiled"] = theirs, ours
    shape: Shape = (1, 8, 255, 64)
    return [(f"any length, {name}", shape, torch.float32, *pair) for name, pair in pairs.items()]


def other_work(queries: int) -> Callable[[], object]:
    """A function that does what lies between two calls of attention: a feed-forward layer of 768 features over as many
    tokens, whose weights take 19 MB."""
    tokens = torch.randn(queries, 768)
    widen, narrow = torch.nn.Linear(768, 3072), torch.nn.Linear(3072, 768)
    return lambda: narrow(F.gelu(widen(tokens)))


def measure(
    ours: Callable[[], Tensor],
    theirs: Callable[[], Tensor],
    repeats: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Medians in microseconds of calls made in turn, and the median of the differences pair by pair.

    Args:
        before: what is done before each of them.
    """
    times: dict[str, list[float]] = {"regard": [], "torch": []}
    for repeat in range(repeats + 50):
        for name, call in (("torch", theirs), ("regard", ours)):
            before()
            start = time.perf_counter()
            call()
            if repeat >= 50:  # the first ones warm up
                times[name].append((time.perf_counter() - start) * 1e6)
    pairs = [ours - theirs for ours, theirs in zip(times["regard"], times["torch"], strict=True)]
    return {
        "torch_us": round(statistics.median(times["torch"]), 2),
        "regard_us": round(statistics.median(times["regard"]), 2),
        "extra_us": round(statistics.median(pairs), 2),
    }


def compare(ours: Tensor, theirs: Tensor) -> None:
    """Raises an error if they differ by more than their dtype rounds."""
    within = 0.02 if ours.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, theirs, atol=within, rtol=within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000, help="of calls one after the other; a quarter with work")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "small_calls.json")
    options = parser.parse_args()
    rows = []
    for name, shape, dtype, theirs, ours in cases():
        learns = "learns" in name
        tensors = [torch.randn(shape, dtype=dtype).requires_grad_(learns) for _ in range(3)]
        with torch.inference_mode(not learns):
            # another kernel than torch's may round elsewhere
            compare(ours(*tensors), theirs(*tensors))
            row = {"case": name, "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
            queries = 1 if "1 query" in name else shape[2]
            both = partial(ours, *tensors), partial(theirs, *tensors)
            row |= measure(*both, options.repeats)
            row["between_layers"] = between = measure(*both, options.repeats // 4, before=other_work(queries))
            rows.append(row)
            told = f"{row['torch_us']:>9} us{row['extra_us']:>+10.2f} us"
            told += f"   between layers {between['torch_us']:>9} us{between['extra_us']:>+10.2f} us"
            print(f"{name:<48}{row['dtype']:<10}{told}", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(
        json.dumps({"machine": bench.machine(), "repeats": options.repeats, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
