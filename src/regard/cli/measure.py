"""regard plan and regard bench: which kernel runs a call, and what it costs."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from regard.cli.console import open_console
from regard.cli.mask_expression import read_mask
from regard.cli.options import JsonOption


def plan(
    mask: Annotated[
        str | None,
        typer.Option(
            "--mask",
            metavar="MASK",
            help='Who may attend to whom, with & | ~: "Causal() & Window(256)". Default: everybody to everybody.',
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", min=1, help="Keys, and queries.")] = 1024,
    query_len: Annotated[
        int | None, typer.Option("--query-len", min=1, help="Queries, where they are fewer: the last of the text.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1)] = 1,
    heads: Annotated[int, typer.Option("--heads", min=1)] = 12,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", min=1, help="Default: as many as heads.")] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1)] = 64,
    value_dim: Annotated[int | None, typer.Option("--value-dim", min=1, help="Default: head_dim.")] = None,
    dtype: Annotated[Literal["float64", "float32", "bfloat16", "float16"], typer.Option("--dtype")] = "float32",
    softcap: Annotated[float | None, typer.Option("--softcap", help="Default: none.")] = None,
    dropout: Annotated[float, typer.Option("--dropout", help="Probability that a weight is dropped.")] = 0.0,
    lse: Annotated[bool, typer.Option("--lse", help="Of attention_with_lse.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Of a call that wants gradients.")] = False,
    kernel: Annotated[str, typer.Option("--kernel", help="One that is asked for by name.")] = "auto",
    tile_size: Annotated[int, typer.Option("--tile-size", min=1, help="Of the tiles that are counted.")] = 128,
    as_json: JsonOption = False,
) -> None:
    """Which kernel a call of attention would take, why, and what it costs. Nothing is computed.

    [bold]Examples[/bold]

      regard plan --length 8192 --mask "Causal() & Window(256)"

      regard plan --length 4096 --mask "Causal() & Document.from_lengths(\\[512] * 8)" --backward

      regard plan --length 32768 --query-len 1 --heads 32 --kv-heads 8 --head-dim 128 --mask "Causal()" --dtype bfloat16
    """
    import torch

    from regard.functional import plan as planned

    read = None if mask is None else read_mask(mask)
    value_dim = head_dim if value_dim is None else value_dim
    kv_heads = heads if kv_heads is None else kv_heads
    shapes = (
        (batch, heads, length if query_len is None else query_len, head_dim),
        (batch, kv_heads, length, head_dim),
        (batch, kv_heads, length, value_dim),
    )
    try:  # nothing is written to them, so they take no memory, only addresses
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype), requires_grad=backward) for shape in shapes]
    except RuntimeError:
        raise ValueError(f"plan: query, key and value of {shapes[0]} are more than this machine can address") from None
    with torch.set_grad_enabled(backward):
        answer = planned(
            *tensors, mask=read, softcap=softcap, dropout=dropout, lse=lse, kernel=kernel, tile_size=tile_size
        )
    if as_json:
        print(json.dumps(asdict(answer) | {"tiles": {tile.value: count for tile, count in answer.tiles.items()}}))
    else:
        print(answer)


def bench(
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="PATTERN", help="Rows whose name contains this; * stands for anything."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="About a minute: an eighth of every length, no memory, nothing to compile."),
    ] = False,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Calls whose median is taken. Default: 15; 5 if --quick.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Processor threads; default: torch's.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Keep the numbers as JSON, row by row.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What attention costs beside the other ways to compute it, on this machine: time and memory.

    All of them do the same work on the same tensors, in turn, and a result that differs is told. The second number is
    how many times regard's time they take, the third between what this lay in half of the repeats. Ctrl-C stops;
    --output keeps the rows that are done, and --json prints them.

    [bold]Examples[/bold]

      regard bench --quick

      regard bench --rows "window*float32"

      regard bench --rows decode --threads 2 --output decode.json
    """
    import torch

    from regard import bench as benchmark

    if threads is not None:
        torch.set_num_threads(threads)
    shrink = benchmark.QUICK_SHRINK if quick else 1
    which = benchmark.chosen(rows, shrink, few=quick)
    if output is not None and output.is_dir():
        raise ValueError(f"--output: {output} is a folder; give a file")
    console = open_console(stderr=True)
    kept: dict[str, Any] = {}
    try:
        # plain lines: a table as wide as a terminal would have to cut the reasons
        with console.status("") as status:
            benchmark.run(
                which,
                repeats=repeats or (benchmark.QUICK_REPEATS if quick else 15),
                shrink=shrink,
                quick=quick,
                output=output,
                show=lambda row: None if as_json else print(row, flush=True),
                watch=status.update if console.is_terminal else _each_row(console),
                keep=kept.update,
            )
    finally:
        if as_json and kept:
            print(json.dumps(kept), flush=True)
        note = benchmark.busy(kept) if kept.get("rows") else None
        if note is not None:
            console.print(f"note: {note}", markup=False, soft_wrap=True)
    if kept["failed"]:
        raise RuntimeError(f"bench: {len(kept['failed'])} of {len(which)} rows failed: {kept['failed'][0]['why']}")


def _each_row(console: Console) -> Callable[[str], None]:
    """Without a terminal a line is not written over: one for each row."""
    last = ""

    def watch(doing: str) -> None:
        nonlocal last
        title = doing.rpartition("; ")[0]
        if title != last:
            console.print(title, markup=False, soft_wrap=True)
        last = title

    return watch
