"""What an encoder learns: hidden tokens, labels of texts; and what its states are good for: vectors, near texts."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from comparing import assert_close
from regard.configuration import ModelConfig
from regard.embedding import embed, nearest
from regard.models import Classifier, Decoder, Encoder, MaskedLanguageModel
from regard.training.checkpoint import load
from regard.training.classifying import Confusion, split
from regard.training.data import Packed
from regard.training.loss import IGNORED
from regard.training.masked import Masked
from regard.training.report import Listener
from regard.training.run import begin, resume
from regard.training.settings import Recipe
from test_cli import Run

SIZES = {"dim": 32, "layers": 1, "heads": 2, "vocab_size": 320, "context_length": 32, "precision": "no"}
WORDS = {"pets": "cat dog leash", "food": "bread soup spoon", "sky, above": "cloud rain wind"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts whose words tell their labels."""
    chance = random.Random(3)
    lines = []
    for _ in range(240):
        label = chance.choice(list(WORDS))
        words = [chance.choice(WORDS[label].split()) for _ in range(3)] + chance.choices(["the", "a", "is", "of"], k=4)
        lines.append({"id": len(lines), "label": label, "text": " ".join(chance.sample(words, len(words)))})
    path = tmp_path_factory.mktemp("labelled") / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def classifier(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "classifier"
    begin(folder, Recipe.of("classify", data=str(table), steps=60, batch_size=16, learning_rate=0.01, **SIZES))
    return folder


# --- hidden tokens ----------------------------------------------------------------------------------------------------


def packed(**changes: int) -> Packed:
    documents = [torch.randint(1, 50, (length,)).tolist() for length in (70, 3, 200, 41)]
    return Packed(documents, **{"context_length": 40, "vocab_size": 50, "seed": 1} | changes)


def test_of_each_row_15_percent_are_asked_for_and_most_of_them_are_hidden() -> None:
    rows = packed()
    asked = hidden = same = 0
    for place in range(120):
        plain, batch = rows.batch(place, 1), Masked(rows).batch(place, 1)
        chosen = batch.targets != IGNORED
        assert int(chosen.sum()) == round(0.15 * int((plain.tokens != 0).sum()))
        assert torch.equal(batch.targets[chosen], plain.tokens[chosen])
        assert torch.equal(batch.tokens[~chosen], plain.tokens[~chosen])
        assert not (chosen & (plain.tokens == 0)).any()
        asked += int(chosen.sum())
        hidden += int((batch.tokens[chosen] == 0).sum())
        same += int((batch.tokens[chosen] == plain.tokens[chosen]).sum())
    assert abs(hidden / asked - 0.8) < 0.06
    assert abs(same / asked - 0.1) < 0.06


def test_what_is_hidden_follows_from_the_seed_and_the_place_alone() -> None:
    documents = [[3, 4, 5] * 30]
    rows = [Masked(Packed(documents, context_length=9, vocab_size=9, seed=seed)) for seed in (1, 1, 2)]
    whole = rows[0].batch(6, 4)
    for part, single in zip(whole, rows[1].batch(8, 1), strict=True):
        assert torch.equal(part[2:3], single)
    assert not torch.equal(whole.targets, rows[2].batch(6, 4).targets)


def test_the_loss_asks_for_the_logits_of_hidden_tokens_alone_and_they_are_those_of_all() -> None:
    model = MaskedLanguageModel(ModelConfig(vocab_size=50, context_length=40, dim=8, layers=1, heads=2))
    batch = Masked(packed()).batch(0, 3)
    where = batch.targets != IGNORED
    assert_close(model(batch.tokens, where=where), model(batch.tokens)[where])


def test_an_encoder_that_learned_hidden_tokens_is_where_a_classifier_starts(table: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one two three four five six seven eight nine ten\n" * 150)
    measures = begin(
        tmp_path / "masked",
        Recipe.of("masked", data=str(texts), steps=100, batch_size=8, learning_rate=0.03, **SIZES),
    )
    assert measures.exact > 0.8 > 2 * measures.usual
    assert isinstance(load(tmp_path / "masked").model, MaskedLanguageModel)
    run = Recipe.of(
        "classify", data=str(table), steps=1, learning_rate=1e-9, start_from=str(tmp_path / "masked"), precision="no"
    )
    begin(tmp_path / "then", run)
    first, then = (load(tmp_path / name).model.encoder.state_dict() for name in ("masked", "then"))
    for name in first:
        assert_close(first[name], then[name], tolerance=1e-3)
    with pytest.raises(ValueError, match=r"--from: .* is a model of another kind: masked language model"):
        begin(tmp_path / "other", Recipe(data=str(texts), start_from=str(tmp_path / "masked")))


def test_hidden_tokens_are_learned_in_bfloat16_without_a_word_from_torch() -> None:
    model = MaskedLanguageModel(ModelConfig(vocab_size=29, context_length=8, dim=12, layers=1, heads=2, norm="rms"))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randint(29, (2, 7)))
    assert logits.isfinite().all()


# --- labels -----------------------------------------------------------------------------------------------------------


def test_a_classifier_learns_from_a_table_and_says_how_well(
    classifier: Path, table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = (classifier / "card.md").read_text()
    assert "Classifier of" in card
    assert "label right" in card
    assert "true / told" in card
    model = load(classifier).model
    assert isinstance(model, Classifier)
    assert model.config.labels == ("food", "pets", "sky, above")
    run = Run(capsys, "classify", "the dog of a leash", "is soup bread", "--model", classifier, "--json")
    told = [json.loads(line) for line in run.out.splitlines()]
    assert [row["label"] for row in told] == ["pets", "food"]
    assert sum(told[0]["probabilities"].values()) == pytest.approx(1)
    plain = Run(capsys, "classify", "--data", table, "--model", classifier).out.splitlines()
    assert len(plain) == 240
    wrong = Run(capsys, "generate", "the dog", "--model", classifier)
    assert wrong.code == 2
    assert "expected a model of the kind decoder" in " ".join(wrong.err.split())
    assert "is of the kind classifier: regard classify tells" in " ".join(wrong.err.split())
    assert Run(capsys, "look", "the dog", "--model", classifier).code == 2


def test_a_classifier_that_was_interrupted_ends_with_the_weights_of_one_that_was_not(
    classifier: Path, table: Path, tmp_path: Path
) -> None:
    class Interrupting(Listener):
        def step(self, report, settings) -> None:  # type: ignore[no-untyped-def]
            if report.step == 7:
                raise KeyboardInterrupt

    recipe = Recipe.of("classify", data=str(table), steps=60, batch_size=16, learning_rate=0.01, **SIZES)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "run", recipe, listener=Interrupting())
    resume(tmp_path / "run")
    first, then = (load(folder).model.state_dict() for folder in (classifier, tmp_path / "run"))
    assert all(torch.equal(first[name], then[name]) for name in first)


def test_no_text_is_on_both_sides_and_every_label_is_on_each() -> None:
    rows = [(f"text {number % 37}", f"label {number % 5}") for number in range(200)]
    training, held_out = split(rows, "a table")
    assert not {text for text, _ in training} & {text for text, _ in held_out}
    assert {label for _, label in training} == {label for _, label in held_out} == {f"label {n}" for n in range(5)}
    assert sorted({*training, *held_out}) == sorted(set(rows))


def test_a_confusion_tells_accuracy_f1_and_a_table() -> None:
    confusion = Confusion(("a", "bb"), torch.tensor([[3, 1], [2, 4]]))
    assert (confusion.accuracy, confusion.usual) == (0.7, 0.6)
    assert confusion.f1 == pytest.approx((6 / 9 + 8 / 11) / 2)
    assert confusion.table().splitlines() == ["true / told  a  bb", "a            3   1", "bb           2   4"]
    many = torch.eye(30, dtype=torch.int64)
    many[4, 7] = 5
    assert Confusion(tuple(f"l{n}" for n in range(30)), many).table() == "     5  l4 told as l7"


BAD = {
    "empty.csv": ("", "the file is empty"),
    "one_line.csv": ("text,label\n", "expected rows with text and label, found none"),
    "no_label.csv": ("text,kind\na,b\n", "expected a column 'label', the file has text, kind"),
    "label_once.csv": ("text,label\na,x\nb,x\nc,y\n", "there is one of 'y'"),
    "one_label.csv": ("text,label\na,x\nb,x\n", "expected two labels or more, got 'x' alone"),
    "table.xml": ("<a/>", "expected a table, a file in .csv, .tsv, .jsonl, got .xml"),
    "no_rows.jsonl": ("\n\n", "expected rows with names, found none"),
    "broken.jsonl": ('{"text": "a", "label": "b"}\n{"text"', "line 2 is no JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_table_that_cannot_be_learned_from_is_one_message_and_leaves_no_folder(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, says = BAD[name]
    (tmp_path / name).write_text(text)
    run = Run(capsys, "train", tmp_path / "run", "--task", "classify", "--data", tmp_path / name, "--steps", 2)
    assert run.code == 2
    assert says in " ".join(run.err.split())
    assert not (tmp_path / "run").exists()


# --- vectors ----------------------------------------------------------------------------------------------------------

CONFIG = ModelConfig(vocab_size=29, context_length=8, dim=12, layers=2, heads=2)
MODELS = {
    "encoder": lambda: Encoder(CONFIG),
    "masked language model": lambda: MaskedLanguageModel(CONFIG),
    "classifier": lambda: Classifier(CONFIG, 3),
    "decoder": lambda: Decoder(CONFIG),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_vector_is_the_mean_of_a_texts_states_whatever_stands_beside_it(kind: str) -> None:
    model = MODELS[kind]()
    stack = getattr(model, "encoder", model)
    texts = [torch.randint(29, (length,)).tolist() for length in (3, 8, 1, 21)]

    def states(tokens: list[int]) -> torch.Tensor:
        given = torch.tensor([tokens])
        found: torch.Tensor = (stack.states(given) if isinstance(stack, Decoder) else stack(given))[0]
        return found

    pieces = [[text[at : at + 8] for at in range(0, len(text), 8)] for text in texts]
    expected = torch.stack([torch.cat([states(piece) for piece in text]).mean(0) for text in pieces])
    assert_close(embed(model, texts), expected, tolerance=1e-5)
    assert model.training


def test_what_cannot_be_embedded_is_refused() -> None:
    with pytest.raises(ValueError, match="none of them empty"):
        embed(Encoder(CONFIG), [[1], []])
    with pytest.raises(TypeError, match="embed: model must be an Encoder"):
        embed(torch.nn.Linear(2, 2), [[1]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vectors have 3 features, query has 2"):
        nearest(torch.zeros(2, 3), torch.zeros(1, 2))


def test_vectors_are_written_and_the_nearest_texts_are_found(
    classifier: Path, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("embed", "--data", table, "--model", classifier)
    text = json.loads(table.read_text().splitlines()[5])["text"]
    for name in ("v.safetensors", "v.jsonl"):
        run = Run(capsys, *arguments, "--output", tmp_path / name, "--nearest", text, "--count", 2)
        assert run.code == 0, run.err
        assert run.out.splitlines()[0].split(maxsplit=1) == ["1.000", text]
        assert len(run.out.splitlines()) == 2
    with safe_open(tmp_path / "v.safetensors", "pt") as file:
        vectors, texts = file.get_tensor("vectors"), json.loads(file.metadata()["texts"])
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == texts
    assert_close(torch.tensor([line["vector"] for line in lines]), vectors, tolerance=1e-6)
    assert vectors.shape == (240, 32)
    printed = Run(capsys, "embed", "the cat", "--model", classifier)
    assert len(json.loads(printed.out)["vector"]) == 32
    for wrong in (("embed",), ("embed", ""), ("embed", "a", "--output", "v.txt"), ("embed", "--data", "no.csv")):
        assert Run(capsys, *wrong).code == 2
