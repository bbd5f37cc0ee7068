"""Whole models of transformers under regard, beside "sdpa" and "eager": generating, reading and learning.

    python benchmarks/models.py [--rows "gpt2*"] [--dtypes float32 bfloat16] [--repeats 5]
    python benchmarks/models.py --report       writes docs/whole-models.md; measures nothing

Small models with random weights: 6 layers of 384 features in 6 heads. In models this small what surrounds attention is
a good part of the time; in larger ones, less.

All three take turns, in an order that changes, after a turn in which they have to agree. What is told is sdpa's and
eager's time over regard's, the median of the ratios of one repeat: above 1, regard takes less. Short tasks are repeated
more often. Times are those of the clock: run it where nothing else runs.
"""

import argparse
import copy
import fnmatch
import functools
import json
import statistics
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kinds
import torch
import transformers
from torch import Tensor

import regard.huggingface
from regard.bench import in_turn, machine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "whole-models.md"
NAMES = ("regard", "sdpa", "eager")
SECONDS, MAX_TURNS = 4, 101
"""Short tasks take so many turns as this allows: of three, the median of their ratios is off by up to 5 %."""
VOCAB, DIM, HEADS, LAYERS = 5000, 384, 6, 6
PROMPT, NEW = 64, 32


class Row(NamedTuple):
    """One task of one model.

    Attributes:
        model: a class of transformers, or the word before "ForCausalLM" of its name. settings: its configuration.
        does: "generates" NEW tokens after PROMPT, "reads" or "learns" (forward and backward, with dropout).
        rows, length: of the input; padded: "left" or "right", up to half of a row. decoder: length of its input, if it
            has one of its own. cache: `cache_implementation`. compiled: by torch.compile.
        names: who takes part.
    """

    name: str
    model: str
    settings: dict[str, Any]
    does: str = "reads"
    rows: int = 1
    length: int = PROMPT
    padded: str | None = None
    decoder: int = 0
    cache: str | None = None
    compiled: bool = False
    names: tuple[str, ...] = NAMES


GPT2 = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2048}
LLAMA = {
    "hidden_size": DIM, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 8192,
}  # fmt: skip
PHI = LLAMA | {"hidden_size": 400, "num_attention_heads": 5, "num_key_value_heads": 5, "hidden_act": "gelu"}
BERT = {"hidden_size": DIM, "intermediate_size": 1536, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
T5 = {"d_model": DIM, "d_kv": 64, "d_ff": 1024, "num_layers": LAYERS, "num_heads": HEADS}
WHISPER = {
    "d_model": DIM, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "num_mel_bins": 80,
}  # fmt: skip
GEMMA2 = LLAMA | {"head_dim": 64, "sliding_window": 512, "query_pre_attn_scalar": 64}
GPT_OSS = LLAMA | {"head_dim": 64, "sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 1}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": HEADS, "q_lora_rank": 192, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": LAYERS, "moe_intermediate_size": 64,
    "n_routed_experts": 2, "num_local_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 64,
}  # fmt: skip
LONG = ("regard", "sdpa")
"""Where eager's scores would take gigabytes."""
NO_SDPA = ("regard", "eager")
"""Models whose attention torch's function cannot do; transformers refuses to try."""

ROWS = (
    Row("GPT-2 generates", "GPT2LMHeadModel", GPT2, "generates"),
    Row("GPT-2 generates, 8 rows padded left", "GPT2LMHeadModel", GPT2, "generates", 8, padded="left"),
    Row("Llama generates", "Llama", LLAMA, "generates"),
    Row("Llama generates, 8 rows padded left", "Llama", LLAMA, "generates", 8, padded="left"),
    Row("Llama generates, static cache", "Llama", LLAMA, "generates", cache="static"),
    Row("Llama generates, 4 rows padded left, static cache", "Llama", LLAMA, "generates", 4, padded="left",
        cache="static"),
    Row("Llama generates, static cache, compiled", "Llama", LLAMA, "generates", cache="static", compiled=True),
    Row("T5 writes 32 after 64", "T5ForConditionalGeneration", T5, "generates"),
    Row("T5 writes 32 after 64, 8 rows padded right", "T5ForConditionalGeneration", T5, "generates", 8, padded="right"),
    Row("Gemma 2 generates", "Gemma2", GEMMA2, "generates", names=NO_SDPA),
    Row("gpt-oss generates", "GptOss", GPT_OSS, "generates", names=NO_SDPA),
    Row("DeepSeek V3.2, 64 keys selected, generates", "DeepseekV32", DEEPSEEK, "generates"),
    Row("BERT reads a text of 32", "BertModel", BERT, length=32),
    Row("BERT reads 8 rows of 32 padded right", "BertModel", BERT, rows=8, length=32, padded="right"),
    Row("BERT reads 8 rows of 32 padded right, compiled", "BertModel", BERT, rows=8, length=32, padded="right",
        compiled=True),
    Row("T5 reads 8 rows of 32, writes 16", "T5ForConditionalGeneration", T5, rows=8, length=32, decoder=16),
    Row("GPT-2 reads 1,024", "GPT2LMHeadModel", GPT2, length=1024),
    Row("Llama reads 1,024", "Llama", LLAMA, length=1024),
    Row("Phi, heads of 80, reads 1,024", "Phi", PHI, length=1024),
    Row("Llama reads 8,192", "Llama", LLAMA, length=8192, names=LONG),
    Row("Mistral, window 512, reads 4,096", "Mistral", LLAMA | {"sliding_window": 512}, length=4096),
    Row("Gemma 2, softcap and windows, reads 2,048", "Gemma2", GEMMA2, length=2048, names=NO_SDPA),
    Row("gpt-oss, sinks and windows, reads 2,048", "GptOss", GPT_OSS, length=2048, names=NO_SDPA),
    Row("DeepSeek V3.2, 64 keys selected, reads 1,024", "DeepseekV32", DEEPSEEK, length=1024),
    Row("BERT reads 8 rows of 512 padded right", "BertModel", BERT, rows=8, length=512, padded="right"),
    Row("T5 reads 4 rows of 512, writes 128", "T5ForConditionalGeneration", T5, rows=4, length=512, decoder=128),
    Row("ViT reads 8 images", "ViTModel", BERT, rows=8),
    Row("Whisper reads 30 seconds, writes 128", "WhisperForConditionalGeneration", WHISPER, decoder=128),
    Row("BERT learns, 8 rows of 32", "BertForMaskedLM", BERT, "learns", 8, 32),
    Row("T5 learns, 8 rows of 32 and 16", "T5ForConditionalGeneration", T5, "learns", 8, 32, decoder=16),
    Row("GPT-2 learns, 4 rows of 512", "GPT2LMHeadModel", GPT2, "learns", 4, 512),
    Row("Llama learns, 4 rows of 512", "Llama", LLAMA, "learns", 4, 512),
    Row("Phi, heads of 80, learns, 4 rows of 512", "Phi", PHI, "learns", 4, 512),
    Row("Llama learns, 4 rows of 128, compiled", "Llama", LLAMA, "learns", 4, 128, compiled=True),
    Row("BERT learns, 4 rows of 512", "BertForMaskedLM", BERT, "learns", 4, 512),
    Row("T5 learns, 4 rows of 512 and 128", "T5ForConditionalGeneration", T5, "learns", 4, 512, decoder=128),
)  # fmt: skip


def make(row: Row, layers: int) -> Any:
    """The model of a row, with random weights."""
    kind = row.model if hasattr(transformers, row.model) else f"{row.model}ForCausalLM"
    settings = {key: min(value, layers) if "layer" in key else value for key, value in row.settings.items()}
    if row.model != "ViTModel":
        settings |= {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
        settings |= {"decoder_start_token_id": 1} if row.model.endswith("ForConditionalGeneration") else {}
    torch.manual_seed(0)
    made = getattr(transformers, kind)
    return made(made.config_class(**settings))


def apart(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same with code of its own: torch.compile looks for a graph among all that were made of one piece of code."""

    def run(*arguments: Any, **named: Any) -> Any:
        return forward(*arguments, **named)

    own = types.FunctionType(run.__code__.replace(), run.__globals__, "forward", closure=run.__closure__)
    return functools.wraps(forward)(own)


def batch(row: Row, length: int, decoder: int) -> dict[str, Tensor]:
    """What the model is given; tokens, and which of them are real."""
    torch.manual_seed(1)
    if row.model == "ViTModel":
        return {"pixel_values": torch.randn(row.rows, 3, 224, 224)}
    written = {"decoder_input_ids": torch.randint(3, VOCAB, (row.rows, decoder))} if decoder else {}
    if row.model.startswith("Whisper"):
        return {"input_features": torch.randn(row.rows, 80, 3000), **written}
    tokens = torch.randint(3, VOCAB, (row.rows, length))
    real = torch.ones_like(tokens)
    for number in range(row.rows if row.padded else 0):
        hidden = number * 5 * length // PROMPT % (length // 2)
        real[number, slice(length - hidden, None) if row.padded == "right" else slice(hidden)] = 0
    return {"input_ids": tokens * real, "attention_mask": real, **written}


def task(row: Row, dtype: torch.dtype, layers: int, length: int, new: int) -> Callable[[str, bool], Tensor]:
    """What each of them does under a name; gives tokens, states or logits of what is real, or a loss.

    With `surely` true, nothing is left to chance: a training step is without dropout.
    """
    made = make(row, layers).to(dtype)
    of_name = {name: copy.deepcopy(made) if row.compiled else made for name in row.names}
    if row.compiled:
        torch._dynamo.reset()
        for model in of_name.values():
            model.forward = torch.compile(apart(model.forward))
    given = batch(row, length, min(row.decoder, length))
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}

    @torch.inference_mode()
    def read(model: Any) -> Tensor:
        read = model(**given)
        states = read.last_hidden_state if hasattr(read, "last_hidden_state") else read.logits
        return states[given["attention_mask"] == 1] if row.padded else states

    @torch.inference_mode()
    def generate(model: Any) -> Tensor:
        options = {"max_new_tokens": new, "min_new_tokens": new, "cache_implementation": row.cache}
        return model.generate(**given, do_sample=False, **options)

    def learn(model: Any) -> Tensor:
        model.zero_grad()
        if row.decoder:
            labels = given["decoder_input_ids"]
            loss = model(input_ids=given["input_ids"], labels=labels).loss
        else:
            loss = model(**given, labels=given["input_ids"]).loss
        loss.backward()
        return loss.detach()

    def run(name: str, surely: bool = False) -> Tensor:
        model = of_name[name]
        model.set_attn_implementation(name)
        model.train(row.does == "learns" and not surely)
        return {"generates": generate, "reads": read, "learns": learn}[row.does](model)

    return run


def measure(
    row: Row,
    dtype: torch.dtype,
    repeats: int,
    layers: int = LAYERS,
    length: int | None = None,
    new: int = NEW,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """Times of all, after a turn in which they have to agree: of so many turns, and of more as long as these seconds
    are not over."""
    run = task(row, dtype, layers, length or row.length, new)
    ours, *theirs = (run(name, surely=True) for name in row.names)
    for name in row.names if row.compiled else ():  # once more as it is timed: a step with dropout is another graph
        run(name)
    for other in theirs:
        # a rounding may select another key, and in half precision another expert
        exact, selects = dtype == torch.float32, "index_topk" in row.settings
        if exact and not selects:
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
        elif row.does != "generates" and (exact or not (selects or "num_local_experts" in row.settings)):
            difference = (ours.double() - other.double()).norm() / other.double().norm()
            assert difference < 0.03, f"{row.name}: {dtype} differs by {difference:.3f}"
    times: dict[str, list[float]] = {name: [] for name in row.names}
    begin = time.perf_counter()
    for repeat in range(MAX_TURNS):
        if repeat >= repeats and time.perf_counter() - begin >= seconds:
            break
        for name in in_turn(list(row.names), repeat):
            start = time.perf_counter()
            run(name)
            times[name].append(time.perf_counter() - start)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["regard"], strict=True))
        for name in row.names[1:]
    }
    return {
        "task": row.name,
        "dtype": str(dtype).removeprefix("torch."),
        "ms": {name: round(statistics.median(values) * 1e3, 1) for name, values in times.items()},
        "ratio": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }


def report(kinds_of_processors: Sequence[dict[str, Any]]) -> str:
    """docs/whole-models.md."""
    versions = " and ".join(dict.fromkeys(data["machine"]["transformers"] for data in kinds_of_processors))
    lines = [
        "# Whole models",
        "",
        "Written by `python benchmarks/models.py --report` from `benchmarks/results/models-*.json`; `make bench`",
        f"measures anew. Models of transformers {versions} with random weights, {LAYERS} layers of {DIM}",
        f'features in {HEADS} heads, under regard and under transformers\' own "sdpa" and "eager". Generation writes',
        f"{NEW} tokens after {PROMPT}; learning is a forward and a backward pass, with dropout as the model has it.",
        "Above 1, regard takes less time.",
    ]
    for data in kinds_of_processors:
        lines += [*kinds.heading(data["machine"]), *_tables(data)]
    return "\n".join(lines) + "\n"


def _tables(data: dict[str, Any]) -> list[str]:
    lines = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        lines += ["", f"### {dtype}", "", "| model and task | regard, ms | sdpa / regard | eager / regard |"]
        lines += ["| --- | ---: | ---: | ---: |"]
        for row in data["rows"]:
            if row["dtype"] == dtype:
                ratios = " | ".join(f"{row['ratio'][n]:.2f}" if n in row["ratio"] else "" for n in NAMES[1:])
                lines.append(f"| {row['task']} | {row['ms']['regard']:,.0f} | {ratios} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names of rows, with * and ?")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5, help="at least; short tasks take more turns")
    parser.add_argument("--output", type=Path, help="where results go; a whole run goes to benchmarks/results")
    parser.add_argument("--report", action="store_true", help="write the page from the results, and measure nothing")
    options = parser.parse_args()
    if options.report:
        PAGE.write_text(report(kinds.every("models")), encoding="utf-8")
        return
    regard.huggingface.register()
    transformers.logging.set_verbosity_error()
    whole = options.rows == "*" and len(options.dtypes) == 2
    about = {**machine(), "transformers": transformers.__version__}
    output = options.output or (kinds.file("models", about) if whole else None)
    data: dict[str, Any] = {"machine": about, "repeats": options.repeats, "rows": []}
    for dtype in options.dtypes:
        for row in (row for row in ROWS if fnmatch.fnmatch(row.name, options.rows)):
            found = measure(row, getattr(torch, dtype), options.repeats, seconds=SECONDS)
            data["rows"].append(found)
            ratios = "   ".join(f"{name} {ratio:.2f}" for name, ratio in found["ratio"].items())
            print(f"{dtype:9} {row.name:<52}{found['ms']['regard']:>9.1f} ms   {ratios}", flush=True)
            if output:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if output is None:
        print("not kept: only a part of the rows")


if __name__ == "__main__":
    main()
