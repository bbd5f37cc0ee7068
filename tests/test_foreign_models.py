"""Folders of transformers: as regard's own models where the parts suffice, else run by transformers; look, explain and
generate take both."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from comparing import assert_close
from regard.models import Decoder, Encoder
from regard.training.text import Tokenizer, train_tokenizer
from test_cli import Run
from viewing import bundled_session, finished

transformers = pytest.importorskip("transformers")

from regard.huggingface.models import ForeignModel, from_folder, read_tensors  # noqa: E402
from regard.huggingface.vocabulary import ForeignTokenizer  # noqa: E402

TEXT = "the cat sat on the mat, and the dog sat on the cat; naïve 🙂"
SMALL: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
MADE = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=0, eos_token_id=0
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL, sliding_window=7)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)),
    "qwen3, tied": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, tie_word_embeddings=True)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, sliding_window=7, query_pre_attn_scalar=20)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **SMALL, sliding_window=7, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=20
        )
    ),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SMALL, num_local_experts=2, num_experts_per_tok=1, sliding_window=7, rope_parameters=None
        )
    ),
}
OWN = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "qwen3, tied", "gemma", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = train_tokenizer([TEXT * 3], 300)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, tuple[Path, Any]]:
    """Tiny random models on disk, some of them in shards, and the models themselves."""
    found = {}
    for number, (name, make) in enumerate(MADE.items()):
        folder = tmp_path_factory.mktemp("models") / name.replace(", ", "-")
        torch.manual_seed(number)
        model = make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(folder, **({"max_shard_size": "20KB"} if number % 2 else {}))
        tokenizer.save_pretrained(folder)
        found[name] = folder, model
    return found


@pytest.mark.parametrize("name", MADE)
def test_a_folder_gives_the_logits_of_transformers(name: str, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = folders[name]
    loaded = regard.load(folder)
    assert isinstance(loaded.model, Decoder if name in OWN else ForeignModel)
    assert (loaded.foreign is None) == (name in OWN)
    tokens = torch.randint(300, (2, 23))
    with torch.no_grad():
        assert_close(loaded.model(tokens), theirs(tokens).logits, name, tolerance=2e-5)


@pytest.mark.parametrize("name", MADE)
def test_text_goes_on_as_transformers_goes_on_with_it(name: str, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, theirs = folders[name]
    model = regard.load(folder).model
    prompts = [torch.randint(1, 300, (length,)).tolist() for length in (5, 9)]
    steps = list(regard.generate_batch(model, prompts, 12, temperature=0, repetition_penalty=1.3))
    for row, prompt in enumerate(prompts):
        out = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, repetition_penalty=1.3, eos_token_id=None
        )
        assert [step[row] for step in steps] == out[0, len(prompt) :].tolist()


def test_a_model_that_transformers_runs_goes_on_from_half_its_context_too(
    folders: dict[str, tuple[Path, Any]],
) -> None:
    folder, theirs = folders["llama"]
    own, foreign = regard.load(folder).model, ForeignModel(theirs)
    prompt = torch.randint(300, (50,)).tolist()
    assert list(regard.generate(foreign, prompt, 60, temperature=0)) == list(
        regard.generate(own, prompt, 60, temperature=0)
    )


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss"])
def test_look_explain_and_generate_take_a_folder_of_transformers(
    name: str, folders: dict[str, tuple[Path, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = folders[name]
    look = Run(capsys, "look", TEXT, "--model", folder, "--layer", 1, "--head", 3, "--query", 6, "--json")
    assert look.code == 0, look.err
    assert json.loads(look.out)
    explain = Run(capsys, "explain", TEXT, "--model", folder, "--layer", 1, "--head", 3, "--query", 6, "--json")
    assert explain.code == 0, explain.err
    assert ("run by transformers" in explain.err) == (name not in OWN)
    plain = Run(capsys, "explain", TEXT, "--model", folder, "--layer", 1, "--head", 3, "--query", 6)
    assert "softmax" in plain.out
    assert ("project output" in plain.out) == (name in OWN)
    written = Run(capsys, "generate", "the cat", "--model", folder, "--count", 5, "--temperature", 0)
    assert written.code == 0, written.err
    assert written.out.startswith("the cat")


def test_the_weights_that_look_shows_are_those_of_transformers(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, theirs = folders["gemma3"]
    theirs.set_attn_implementation("eager")
    tokens = torch.randint(300, (1, 20))
    loaded = regard.load(folder)
    with torch.no_grad(), regard.record(loaded.model) as recording:
        loaded.model(tokens)
        expected = theirs(tokens, output_attentions=True).attentions
    for layer, weights in enumerate(expected):
        assert_close(recording[layer].weights(), weights, tolerance=1e-5)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def test_a_tokenizer_of_transformers_does_as_regards_own(tokenizer: Any) -> None:
    ours, theirs = Tokenizer(tokenizer.backend_tokenizer), ForeignTokenizer(tokenizer)
    ids = ours.encode(TEXT)
    assert theirs.encode(TEXT) == ids
    assert theirs.encode_batch([TEXT, "a"]) == ours.encode_batch([TEXT, "a"])
    assert theirs.spans(TEXT) == ours.spans(TEXT)
    assert theirs.decode(ids) == TEXT
    assert theirs.pieces(ids) == ours.pieces(ids)
    assert (theirs.end_id, theirs.vocab_size) == (ours.end_id, ours.vocab_size)


def test_pieces_with_spaces_in_front_and_bytes_by_number_are_read_as_the_bytes_they_are() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<s>", "</s>", "▁the", "▁c", "at", "<0xC3>", "<0xA9>", "▁"]
    model = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True)
    )
    steps = tokenizers.decoders
    model.decoder = steps.Sequence([steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse()])
    theirs = ForeignTokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    )
    assert theirs.decode([0, 2, 3, 4, 5, 6, 1]) == " the caté"
    assert theirs.pieces([0, 2, 5, 99]) == ["<s>", " the", "\\xc3", "<99>"]
    assert (theirs.end_id, theirs.stop_ids) == (0, {0, 1})


# --- what cannot be opened --------------------------------------------------------------------------------------------


def without_a_shard(folder: Path) -> None:
    next(folder.glob("model-00002*")).unlink()


def with_a_broken_shard(folder: Path) -> None:
    next(folder.glob("model-00001*")).write_bytes(b"nonsense")


def with_a_broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def with_a_broken_configuration(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def with_code_of_its_own(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('it was run')")


def without_tensors(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def an_encoder(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "bert", "architectures": ["BertForMaskedLM"]})
    )


DAMAGE = {
    without_a_shard: "there is no such file, though the index names it",
    with_a_broken_shard: "not a whole safetensors file",
    with_a_broken_index: "not a table of shards",
    with_a_broken_configuration: "transformers cannot open",
    with_code_of_its_own: "needs code of its own, which regard never runs",
    without_tensors: "expected model.safetensors, or model.safetensors.index.json and its shards; it has files in .bin",
    without_a_tokenizer: "transformers cannot open",
    an_encoder: "is no language model that foretells the next token (BertForMaskedLM)",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_cannot_be_opened_is_one_message(
    damage: Any, folders: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["llama"][0], folder)
    damage(folder)
    run = Run(capsys, "generate", "the cat", "--model", folder)
    assert run.code == 2
    assert DAMAGE[damage] in " ".join(run.err.split())
    assert "Traceback" not in run.err


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model that reads one text and writes another."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    config = transformers.T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_of_transformers_that_writes_one_text_for_another_is_refused_alike_by_every_command(
    t5: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("look", "explain", "generate", "translate", "embed", "classify"):
        run = Run(capsys, command, "the cat sat", "--model", t5)
        assert run.code == 2, command
        says = (
            f"regard: model: {t5} reads a text and writes another (T5ForConditionalGeneration); of such models regard"
        )
        assert says in " ".join(run.err.split()), command
        assert len(run.err.splitlines()) == 1


def test_what_opens_for_one_command_opens_for_look_and_what_does_not_is_said_in_the_same_words(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for damage in (with_a_broken_configuration, with_code_of_its_own, without_a_tokenizer):
        folder = tmp_path / damage.__name__
        shutil.copytree(folders["llama"][0], folder)
        damage(folder)
        said = []
        for command in ("look", "generate"):
            run = Run(capsys, command, "the cat", "--model", folder)
            assert run.code == 2
            said.append(run.err)
        assert DAMAGE[damage] in " ".join(said[0].split())
        assert said[0] == said[1]
    # what reads no text is said, though a tokenizer lies beside it
    vision = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    transformers.ViTModel(vision).save_pretrained(tmp_path / "vit")
    tokenizer.save_pretrained(tmp_path / "vit")
    run = Run(capsys, "look", "the cat", "--model", tmp_path / "vit")
    assert run.code == 2
    assert "vit reads pixel_values, and not a text (ViTModel)" in " ".join(run.err.split())
    # an encoder cannot go on with a text, but it can be looked into
    sizes = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    bert = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48))
    bert.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    run = Run(capsys, "look", "the cat", "--model", tmp_path / "bert", "--json")
    assert run.code == 0, run.err
    assert len(json.loads(run.out)["heads"]) == 2 * 4


def test_a_model_of_regard_that_does_not_foretell_is_not_looked_into_but_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from regard.configuration import ModelConfig
    from regard.models import MaskedLanguageModel
    from regard.training.checkpoint import save_model

    made = Tokenizer(train_tokenizer([TEXT * 3], 300))
    save_model(tmp_path, MaskedLanguageModel(ModelConfig(vocab_size=300, context_length=8, dim=8, layers=1, heads=2)))
    made.save(tmp_path / "tokenizer.json")
    run = Run(capsys, "look", "the cat", "--model", tmp_path)
    assert run.code == 2
    assert f"{tmp_path} is of the kind masked language model" in " ".join(run.err.split())


def test_a_model_in_the_cache_of_transformers_goes_by_its_name(
    folders: dict[str, tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "models--somebody--small"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("abc")
    shutil.copytree(folders["qwen2"][0], place / "snapshots" / "abc")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert isinstance(regard.load("somebody/small").model, Decoder)
    with pytest.raises(ValueError, match="no model 'somebody/else'; expected a name"):
        regard.load("somebody/else")
    (tmp_path / "models--somebody--pictures" / "snapshots" / "abc").mkdir(parents=True)  # no tokenizer
    session = bundled_session("the cat")
    assert session.handle("info", {})[0]["models"] == ["stdlib", "somebody/small"]
    meta, _ = finished(session, what="read", text="the cat sat", model="somebody/small")
    assert session.handle("info", meta["result"])[0]["model"] == "somebody/small"


def test_an_encoder_comes_over_from_its_folder(tmp_path: Path) -> None:
    sizes = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    theirs = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=48)).eval()
    theirs.save_pretrained(tmp_path)
    ours = from_folder(tmp_path)
    assert isinstance(ours, Encoder)
    tokens = torch.randint(1, 300, (2, 11))
    with torch.no_grad():
        assert_close(ours(tokens), theirs(tokens).last_hidden_state, tolerance=2e-5)
    assert set(read_tensors(tmp_path)) == set(theirs.state_dict()) - {"embeddings.position_ids"}


def test_the_part_that_is_missing_is_named(folders: dict[str, tuple[Path, Any]]) -> None:
    assert regard.load(folders["gpt-oss"][0]).foreign == (
        "regard has no model like GptOssForCausalLM, for lack of a choice among several feed-forward networks for each "
        "token"
    )


def test_a_model_that_transformers_runs_is_in_training_when_what_it_holds_is(
    folders: dict[str, tuple[Path, Any]],
) -> None:
    model = regard.load(folders["gpt-oss"][0]).model
    list(regard.generate(model, [3], 2))
    assert not any(part.training for part in model.modules())
    assert ForeignModel(folders["llama"][1]).training is folders["llama"][1].training


def test_a_model_without_attention_or_without_a_cache_is_refused_in_words(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    mamba = transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=1)
    sizes = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")}
    griffin = transformers.RecurrentGemmaConfig(
        **sizes, num_hidden_layers=3, intermediate_size=48, num_key_value_heads=1, lru_width=32
    )
    for model, commands, says in (
        (transformers.MambaForCausalLM(mamba), ("generate", "explain", "look"), "has no attention heads (MambaFor"),
        (transformers.RecurrentGemmaForCausalLM(griffin), ("generate",), "does not give back what it has read"),
    ):
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        for command in commands:
            run = Run(capsys, command, "the cat", "--model", tmp_path / "model")
            assert run.code == 2, command
            assert says in " ".join(run.err.split())


def test_layers_with_windows_have_their_own_mask_and_rotation(folders: dict[str, tuple[Path, Any]]) -> None:
    model = regard.load(folders["gemma3"][0]).model
    sliding, full = (layer.attention for layer in model.layers)
    assert (sliding.mask, full.mask) == (regard.Causal() & regard.Window(7), regard.Causal())
    assert (sliding.rotary.theta, full.rotary.theta) == (10_000.0, 1_000_000.0)
    assert (model.config.window, model.config.widest, model.config.endless) == ((7, None), None, False)
