"""The command line: regard look | explain | generate | train | plan | bench.

Output that is piped is plain text, and ``--json`` gives numbers. Whatever is wrong with the input is one message and
exit code 2.
"""

import ast
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

try:
    import typer
    from rich.console import Console
except ImportError:  # pragma: no cover
    sys.exit("regard: the command line needs typer and rich: pip install regard[cli]")

if TYPE_CHECKING:
    from regard.masks import Mask
    from regard.terminal import Look
    from regard.training.checkpoint import Loaded
    from regard.training.data import Corpus

app = typer.Typer(
    name="regard",
    help="Look into attention: what each head of a language model attends to, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

TextArgument = Annotated[
    str, typer.Argument(metavar='FILE|"TEXT"', help="A text file, the text itself in quotes, or - for standard input.")
]
ModelOption = Annotated[
    str,
    typer.Option("--model", metavar="NAME|PATH", help="A model in the package, or a folder that regard train wrote."),
]
LayerOption = Annotated[
    int | None, typer.Option("--layer", help="Layer, 0 for the first. Default: where most is to be seen.")
]
HeadOption = Annotated[int | None, typer.Option("--head", help="Head, 0 for the first.")]
QueryOption = Annotated[
    int | None, typer.Option("--query", help="The token that looks; 0 is the one that opens the text.")
]
StartOption = Annotated[int, typer.Option("--start", help="Show the text from this token on.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Numbers instead of a picture.")]


@app.command()
def look(
    text: TextArgument,
    model: ModelOption = "stdlib",
    layer: LayerOption = None,
    head: HeadOption = None,
    query: QueryOption = None,
    start: StartOption = 0,
    as_json: JsonOption = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Show it here, in the terminal (the default).")] = True,
) -> None:
    """What each head of a language model attends to in a text.

    [bold]Examples[/bold]

      regard look examples/library_desk.py

      regard look "the cat sat on the mat because the cat was tired" --query 11

      regard look notes.txt --layer 3 --head 1 --query 200

      cat notes.txt | regard look - --json
    """
    from regard.terminal import look_as_data, print_look

    del terminal  # the only view so far
    view = _view(text, model, layer, head, query, start)
    if as_json:
        print(json.dumps(look_as_data(view), ensure_ascii=False))
    else:
        print_look(_console(), view)


@app.command()
def explain(
    text: Annotated[
        str | None, typer.Argument(metavar='[FILE|"TEXT"]', help="As in regard look; or --example.", show_default=False)
    ] = None,
    example: Annotated[
        Literal["three-tokens"] | None,
        typer.Option("--example", help="A worked example: three tokens, every number of every step."),
    ] = None,
    model: ModelOption = "stdlib",
    layer: LayerOption = None,
    head: HeadOption = None,
    query: QueryOption = None,
    start: StartOption = 0,
    as_json: JsonOption = False,
) -> None:
    """How one head comes to its output, step by step, with the real numbers.

    [bold]Examples[/bold]

      regard explain --example three-tokens

      regard explain examples/library_desk.py --layer 3 --head 1 --query 200
    """
    from regard.terminal import explain_token, print_explained, print_three_tokens, steps_as_data, three_tokens_as_data

    if (text is None) == (example is None):
        raise ValueError("explain: give a text or --example three-tokens, one of the two")
    if text is None:
        if as_json:
            print(json.dumps(three_tokens_as_data()))
        else:
            print_three_tokens(_console())
        return
    loaded = _load(model)
    view = _view(text, loaded, layer, head, query, start)
    shown = explain_token(loaded.model, view)
    if as_json:
        print(json.dumps(steps_as_data(view, shown), ensure_ascii=False))
    else:
        print_explained(_console(), view, shown)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(metavar='"TEXT"', help="What the text begins with.")] = "",
    model: ModelOption = "stdlib",
    count: Annotated[int, typer.Option("--count", min=1, help="Tokens to write.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Only from the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Only from the likeliest p of the probability.")
    ] = 0.95,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed writes the same text.")] = None,
) -> None:
    """Text from a language model.

    [bold]Examples[/bold]

      regard generate "def main():" --count 60 --seed 1
    """
    import torch

    from regard.generation import generate as tokens

    loaded = _load(model)
    tokenizer = loaded.tokenizer
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    ids = tokenizer.encode(prompt)
    written = ""
    stream = tokens(
        loaded.model,
        [tokenizer.end_id, *ids],
        count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        end_id=tokenizer.end_id,
        generator=generator,
    )
    first = next(stream, None)  # what is wrong with the arguments shows here, before anything is printed
    print(prompt, end="", flush=True)
    new: list[int] = []
    for token in () if first is None else chain([first], stream):
        new.append(token)
        text = tokenizer.decode(new)
        if not text.endswith("\ufffd"):  # a character of several tokens is not whole yet
            print(text[len(written) :], end="", flush=True)
            written = text
    print()


@app.command()
def train(
    folder: Annotated[Path, typer.Argument(help="Where the model is written.")],
    data: Annotated[
        str,
        typer.Option("--data", metavar="stdlib|FOLDER|FILE", help="Python's standard library, or texts of your own."),
    ] = "stdlib",
    pattern: Annotated[str, typer.Option("--pattern", help="Which files of a folder.")] = "**/*.txt",
    steps: Annotated[int, typer.Option("--steps", min=1, help="How often the weights change.")] = 5000,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows of a step.")] = 8,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="At its highest.")] = 3e-3,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="NAME|FOLDER", help="Go on from a model's weights, vocabulary and sizes."),
    ] = None,
    vocab_size: Annotated[int | None, typer.Option("--vocab-size", min=257, help="Default: 4096.")] = None,
    context_length: Annotated[
        int | None, typer.Option("--context-length", min=8, help="Default: 512, or that of --from.")
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", min=8, help="Default: 192.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Default: 6.")] = None,
    heads: Annotated[int | None, typer.Option("--heads", min=1, help="Default: 6.")] = None,
    hidden_dim: Annotated[int | None, typer.Option("--hidden-dim", help="Default: 8/3 of dim.")] = None,
    repeats: Annotated[float, typer.Option("--repeats", help="Share of rows of repeated random tokens.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    precision: Annotated[Literal["auto", "bf16", "no"], typer.Option("--precision")] = "auto",
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Processor threads; default: torch's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in FOLDER.")] = False,
) -> None:
    """Train a language model on Python's standard library, or on texts of your own.

    Ctrl-C saves; --resume goes on, with the same command or with more --steps. Held-out files tell how good the model
    is: about one file in twenty, never trained on, against what xz -9e needs for them.

    [bold]Examples[/bold]

      regard train runs/mine --steps 200

      regard train runs/mine --steps 200 --resume

      regard train runs/letters --data letters/ --pattern "*.md" --layers 4 --dim 128

      regard train runs/longer --from stdlib --context-length 1024 --steps 200
    """
    import torch

    from regard.models import Decoder, ModelConfig
    from regard.training import checkpoint, loop
    from regard.training.data import Packed
    from regard.training.text import Tokenizer, train_tokenizer

    if threads is not None:
        torch.set_num_threads(threads)
    if resume and not (folder / "progress.safetensors").is_file():
        raise ValueError(f"--resume: there is no {folder / 'progress.safetensors'}; without --resume a new run begins")
    if not resume and (folder / "progress.safetensors").is_file():
        raise ValueError(f"{folder}: holds a run already; --resume goes on with it, another folder begins anew")
    settings = loop.Settings(
        steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed, precision=precision
    )
    sizes = {"vocab_size": vocab_size, "dim": dim, "layers": layers, "heads": heads, "hidden_dim": hidden_dim}
    given = {name: size for name, size in sizes.items() if size is not None}
    beginning = None if begin is None else _load(begin)
    if beginning is None:
        width = given.get("dim", 192)
        plain = {"vocab_size": 4096, "dim": width, "layers": 6, "heads": 6, "hidden_dim": -(-8 * width // 3 // 8) * 8}
        config = ModelConfig.from_dict({"context_length": context_length or 512, **plain, **given})
    else:
        config = beginning.model.config
        for name, size in given.items():
            if size != getattr(config, name):
                raise ValueError(
                    f"--{name.replace('_', '-')}: --from {begin} decides it, {getattr(config, name)}; got {size}"
                )
        if config.positions == "learned" and context_length not in (None, config.context_length):
            raise ValueError(
                f"--context-length: {begin} has learned a vector for each of {config.context_length} positions and no "
                f"more; got {context_length}"
            )
        config = replace(config, context_length=context_length or config.context_length)
    console = _console(stderr=True)
    corpus = _corpus(data, pattern)
    if not corpus.held_out:
        raise ValueError(f"--data: {data} is too little to hold some of it out; give more than one line")
    texts = [file.text for file in corpus.training]
    size = sum(len(text.encode()) for text in texts)
    console.print(f"{len(texts):,} files, {size / 1e6:.1f} MB to train on; {len(corpus.held_out)} files held out")
    if resume:
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
    else:
        if beginning is None:
            with console.status("learning the vocabulary"):
                tokenizer = Tokenizer(train_tokenizer(texts, config.vocab_size))
        else:
            tokenizer = beginning.tokenizer
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder / "tokenizer.json")
    if beginning is None:
        config = replace(config, vocab_size=tokenizer.vocab_size)  # few texts may have fewer tokens than asked for
    with _progress(console) as bar:
        task = bar.add_task("cutting into tokens", total=len(texts))
        rows = Packed.from_texts(
            texts,
            tokenizer,
            context_length=config.context_length,
            seed=seed,
            repeats=repeats,
            progress=lambda done, all: bar.update(task, completed=done, total=all),
        )
    torch.manual_seed(seed)
    model = Decoder(config)
    if beginning is not None:
        model.load_state_dict(beginning.model.state_dict())
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"{parameters:,} parameters, {rows.size:,} tokens in an epoch; {steps:,} steps of "
        f"{batch_size * rows.context_length:,} tokens are "
        f"{steps * batch_size * rows.context_length / rows.size:.2f} epochs"
    )
    try:
        with _progress(console, "{task.fields[note]}") as bar:
            task = bar.add_task("training", total=steps, note="")
            smooth = Smooth()
            watch = _watcher(console, steps)

            def report(r: loop.Report) -> None:
                loss = smooth(r.loss)
                bar.update(task, completed=r.step, note=f"loss {loss:.3f}  {r.tokens_per_second:,.0f} tokens/s")
                watch(r, loss)

            seconds = loop.train(model, rows, settings, folder, resume=resume, report=report)
    except KeyboardInterrupt:
        console.print(f"stopped and saved; go on with the same command and --resume (in {folder})")
        raise
    checkpoint.save_model(folder, model, dtype=torch.float16)
    model = checkpoint.load(folder).model  # measured as stored
    with _progress(console) as bar:
        task = bar.add_task("measuring on held-out files", total=None)
        measures = loop.measure(
            model,
            tokenizer,
            corpus,
            progress=lambda done, all: bar.update(task, completed=done, total=all),
        )
    card = loop.card(
        measures,
        model,
        rows,
        settings,
        corpus,
        command="regard " + " ".join(sys.argv[1:]).replace(" --resume", ""),
        seconds=seconds,
        begun_from=beginning.folder if beginning else None,
    )
    (folder / "card.md").write_text(card, encoding="utf-8")
    console.print(
        f"held out: {measures.bits_per_byte:.3f} bits per byte (xz -9e: {measures.xz_each:.3f} file by file, "
        f"{measures.xz_joined:.3f} joined)\n"
        f"random tokens, then again: loss {measures.copy_first:.2f}, then {measures.copy_second:.2f}"
    )
    console.print(f"written: {folder}; look at it: regard look FILE --model {folder}")


@app.command()
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


@app.command()
def bench(
    rows: Annotated[
        str | None,
        typer.Option("--rows", metavar="PATTERN", help="Rows whose name contains this; * stands for anything."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="An eighth of every length, once each: to see that it runs.")
    ] = False,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Calls whose median is taken.")] = 15,
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
    how many times regard's time they take. Ctrl-C stops; --output keeps the rows that are done.

    [bold]Examples[/bold]

      regard bench --quick

      regard bench --rows "window*float32"

      regard bench --rows decode --threads 2 --output decode.json
    """
    import torch

    from regard import bench as benchmark

    if threads is not None:
        torch.set_num_threads(threads)
    shrink = benchmark.QUICK if quick else 1
    which = benchmark.chosen(rows, shrink)
    if output is not None and output.is_dir():
        raise ValueError(f"--output: {output} is a folder; give a file")
    console = _console(stderr=True)
    # plain lines: a table as wide as a terminal would have to cut the reasons
    with console.status("") as status:
        data = benchmark.run(
            which,
            repeats=1 if quick else repeats,
            shrink=shrink,
            output=output,
            show=lambda row: None if as_json else print(row, flush=True),
            watch=status.update,
        )
    if as_json:
        print(json.dumps(data))


MASKS = ("Band", "Causal", "Chunk", "Document", "Padding", "Prefix", "Strided", "Window")
"""Masks that can be written down; `Dense` and `Where` need a tensor and a function."""

LONGEST_LIST = 1 << 20
"""Numbers in a list of a written mask."""


def read_mask(text: str) -> "Mask":
    """The mask that an expression means: names of masks with numbers, joined by ``&``, ``|``, ``~``. Nothing is run.

    Raises:
        ValueError: anything else.

    >>> read_mask("Causal() & (Window(256) | Prefix(4))")
    Causal() & (Window(256) | Prefix(4))
    >>> read_mask("Causal() & open('x')")
    Traceback (most recent call last):
        ...
    ValueError: mask: 'open' is no mask; there are: Band, Causal, Chunk, Document, Padding, Prefix, Strided, Window
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _mask(tree)
    except SyntaxError as error:
        where = f", at character {error.offset}" if error.offset else ""
        raise ValueError(f"mask: {text[:80]!r} cannot be read{where}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError("mask: too deeply nested") from None


def _mask(node: ast.expr) -> "Mask":
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _mask(node.left), _mask(node.right)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand)
    if isinstance(node, ast.Call):
        return _made(node)
    written = ast.unparse(node)
    hint = f"; write {written}(...)" if written in MASKS else ""
    raise ValueError(f"mask: expected masks joined by & | ~, got {written!r}{hint}")


def _made(node: ast.Call) -> "Mask":
    """One mask, made from its name and numbers."""
    import torch

    from regard import masks

    name = ast.unparse(node.func)
    if name in ("Dense", "Where"):
        raise ValueError(f"mask: {name} cannot be written down; there are: {', '.join(MASKS)}")
    if name not in (*MASKS, "Document.from_lengths"):
        close = get_close_matches(name, MASKS, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(MASKS)}"
        raise ValueError(f"mask: {name!r} is no mask{hint}")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"mask: {name}: expected numbers and lists of numbers, got {ast.unparse(node)!r}")
    values = [_value(argument, name) for argument in node.args]
    named = {str(keyword.arg): _value(keyword.value, name) for keyword in node.keywords}
    make: Callable[..., Mask] = masks.Document.from_lengths if name == "Document.from_lengths" else getattr(masks, name)
    try:
        if name == "Document":  # its ids are a tensor
            values = [torch.tensor(value) for value in values]
            named = {key: torch.tensor(value) for key, value in named.items()}
        return make(*values, **named)
    except TypeError as error:
        raise ValueError(f"mask: {ast.unparse(node)}: {error}") from None


def _value(node: ast.expr, name: str) -> Any:
    """A whole number, None, or a list of these, which may be repeated: ``[512] * 8``."""
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) is int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand, name)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List):
        return [_value(element, name) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _value(node.left, name), _value(node.right, name)
        if isinstance(left, list) and isinstance(right, int):
            if sum(len(part) if isinstance(part, list) else 1 for part in left) * right > LONGEST_LIST:
                raise ValueError(f"mask: {name}: a list of more than {LONGEST_LIST:,} numbers")
            return left * right
    raise ValueError(f"mask: {name}: expected numbers and lists of numbers, got {ast.unparse(node)!r}")


class Smooth:
    """A running mean of the loss, over about fifty steps."""

    def __init__(self) -> None:
        self.value: float | None = None

    def __call__(self, loss: float) -> float:
        self.value = loss if self.value is None else 0.98 * self.value + 0.02 * loss
        return self.value


def main() -> None:
    """Runs the command line; bad input is one message and exit code 2."""
    console = Console(stderr=True, highlight=False)
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader, head or less, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (ValueError, TypeError, ImportError, RuntimeError, OSError) as error:
        console.print(f"regard: {error}", style="red", markup=False)
        sys.exit(2)
    except Exception as error:
        show: Callable[[], None] | None = getattr(error, "show", None)  # usage errors of the command line library
        if show is None:
            raise
        show()
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)


def _view(
    text: str, model: "str | Loaded", layer: int | None, head: int | None, query: int | None, start: int
) -> "Look":
    from regard.terminal import look as view

    loaded = _load(model) if isinstance(model, str) else model
    words, source = _read(text)
    with _console(stderr=True).status("reading"):
        return view(
            loaded.model,
            loaded.tokenizer,
            words,
            name=loaded.folder.name,
            source=source,
            start=start,
            query=query,
            layer=layer,
            head=head,
        )


def _read(text: str) -> tuple[str, str]:
    """The words to look at, and what to call them: a file's, standard input's, or the argument itself."""
    from regard.training.text import LARGEST_FILE, read_text

    if text == "-":
        data = sys.stdin.buffer.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ValueError(f"standard input: more than {LARGEST_FILE:,} bytes")
        try:
            words = data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input: not UTF-8 text ({error.reason} at byte {error.start:,})") from None
        if not words or "\0" in words:
            raise ValueError("standard input: empty" if not words else "standard input: a binary file, not text")
        return words, "standard input"
    if _names_a_file(text):
        return read_text(text), text
    if not text.strip():
        raise ValueError('text: empty; give a file or a text in quotes, as in regard look "the cat sat"')
    return text, "your text"


def _names_a_file(text: str) -> bool:
    """A path that exists, or one word that looks like a path."""
    try:
        if Path(text).exists():
            return True
    except OSError:  # too long for a name
        return False
    return not any(c.isspace() for c in text) and ("/" in text or "\\" in text or bool(Path(text).suffix))


def _load(name: str) -> "Loaded":
    from regard.training.checkpoint import load

    return load(name)


def _corpus(data: str, pattern: str) -> "Corpus":
    from regard.training import data as sources

    if data == "stdlib":
        return sources.standard_library()
    return sources.folder(data, pattern) if Path(data).is_dir() else sources.files([data])


def _console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    # piped text has no width of its own; wide enough for the map of a dozen heads
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 160, soft_wrap=False)


def _progress(console: Console, *extra: str) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    return Progress(*columns, *(TextColumn(text) for text in extra), console=console, disable=not console.is_terminal)


def _watcher(console: Console, steps: int) -> Callable[[Any, float], None]:
    """Without a terminal there is no bar: a line every half minute, and at the end."""
    last = time.monotonic()

    def watch(r: Any, loss: float) -> None:
        nonlocal last
        if not console.is_terminal and (time.monotonic() - last > 30 or r.step in (1, steps)):
            last = time.monotonic()
            console.print(f"step {r.step:,} of {steps:,}  loss {loss:.3f}  {r.tokens_per_second:,.0f} tokens/s")

    return watch
