"""regard plan and regard bench: which kernel runs a call, and what it costs."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.status import Status

from regard.cli.console import open_console, print_plain, tell
from regard.cli.mask_expression import read_mask
from regard.cli.options import JsonOption


def plan(
    mask: Annotated[
        str | None,
        typer.Option(
            "--mask",
            metavar="MASK",
            help='Which keys a query may attend to, with & | ~: "Causal() & Window(256)". Default: all of them.',
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", metavar="N", min=1, help="Number of keys, and of queries.")] = 1024,
    query_len: Annotated[
        int | None,
        typer.Option(
            "--query-len", metavar="N", min=1, help="Number of queries, the last of the text. Default: length."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Sequences in the call.")] = 1,
    heads: Annotated[int, typer.Option("--heads", metavar="N", min=1, help="Query heads.")] = 12,
    kv_heads: Annotated[
        int | None,
        typer.Option("--kv-heads", metavar="N", min=1, help="Key and value heads. Default: as many as heads."),
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", metavar="N", min=1, help="Size of one query or key.")] = 64,
    value_dim: Annotated[
        int | None, typer.Option("--value-dim", metavar="N", min=1, help="Size of one value. Default: head-dim.")
    ] = None,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", metavar="DTYPE", help="float64, float32, bfloat16 or float16."),
    ] = "float32",
    softcap: Annotated[
        float | None, typer.Option("--softcap", help="Bound on the scores: c * tanh(score / c). Default: none.")
    ] = None,
    dropout: Annotated[float, typer.Option("--dropout", help="Share of the weights that is dropped.")] = 0.0,
    lse: Annotated[bool, typer.Option("--lse", help="The log-sum-exp is wanted too.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients are wanted too.")] = False,
    kernel: Annotated[str, typer.Option("--kernel", metavar="NAME", help="This kernel and no other.")] = "auto",
    tile_size: Annotated[
        int, typer.Option("--tile-size", metavar="N", min=1, help="Side of the squares that are counted as tiles.")
    ] = 128,
    as_json: JsonOption = False,
) -> None:
    """Which kernel a call of attention would take, why, and what it costs. Nothing is computed.

    Tiles are squares of the matrix of scores: an empty one is hidden by the mask and skipped, a full one needs no mask.

    [bold]Examples[/bold]

      regard plan --length 8192 --mask "Causal() & Window(256)"
      regard plan --length 4096 --mask "Document.from_lengths(\\[512] * 8)"
      regard plan --length 32768 --query-len 1 --heads 32 --kv-heads 8
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
        print_plain(str(answer), hang=8)


def bench(
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="PATTERN", help="Rows whose name contains this; * stands for anything."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="About a minute: an eighth of every length, no memory, nothing that has to be compiled first.",
        ),
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", metavar="N", min=1, help="Calls whose median is taken. Default: 15; 5 if --quick."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="CPU threads. Default: torch's choice.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu, or cuda: timed by CUDA events.")
    ] = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Keep the numbers as JSON, row by row.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time and memory of attention beside other ways to compute it, on this machine.

    All of them do the same work on the same tensors, in turn, and a result that differs is told. A row has the median
    time, how many times regard's time that is, the range of this in the middle half of the repeats, and the memory.
    Without --quick every row takes minutes. Ctrl-C stops; --output keeps the rows that are done, --json prints them.

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
    which = benchmark.chosen(rows, shrink, few=quick, device=benchmark.check_device(device))
    if output is not None and output.is_dir():
        raise ValueError(f"--output: {output} is a folder; give a file")
    console = open_console(stderr=True)
    kept: dict[str, Any] = {}
    if not as_json:
        tell(console, "median time, times regard's, range of that in the middle half of the repeats")
    try:
        # plain lines: a table as wide as a terminal would have to cut the reasons
        with console.status("") as status:
            benchmark.run(
                which,
                repeats=repeats or (benchmark.QUICK_REPEATS if quick else 15),
                shrink=shrink,
                quick=quick,
                output=output,
                show=lambda row: None if as_json else _beside(status, row),
                watch=status.update if console.is_terminal else _each_row(console),
                keep=kept.update,
            )
    finally:
        if as_json and kept:
            print(json.dumps(kept), flush=True)
        note = benchmark.busy(kept) if kept.get("rows") else None
        if note is not None:
            tell(console, f"note: {note}")
    if kept["failed"]:
        raise RuntimeError(f"bench: {len(kept['failed'])} of {len(which)} rows failed: {kept['failed'][0]['why']}")


def _beside(status: Status, row: str) -> None:
    """A row on standard output, which is not the status's while that runs: it takes all that is printed."""
    status.stop()
    print_plain(row, hang=25)
    status.start()


def _each_row(console: Console) -> Callable[[str], None]:
    """Without a terminal a line is not written over: one for each row."""
    last = ""

    def watch(doing: str) -> None:
        nonlocal last
        title = doing.rpartition("; ")[0]
        if title != last:
            tell(console, title)
        last = title

    return watch
