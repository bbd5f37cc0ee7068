"""A recording's file, changed in any way, is loaded and answers, or is refused in words; never something else."""

import copy
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from regard.masks import Chunk, Document, Padding, Prefix, Strided, Where, Window
from regard.models import Decoder
from regard.recording import load_recording, record
from small import VOCAB, config

TOKENS = torch.randint(VOCAB, (2, 7))


def decoder(**parts):
    return Decoder(config(layers=2, **parts))


def in_pieces(model):
    cache = model.cache()
    for start, stop, lengths in ((0, 4, [4, 3]), (4, 5, [5, 4]), (5, 7, [7, 6])):
        model(TOKENS[:, start:stop], cache=cache, mask=Padding(lengths))


RECORDED = {
    "values": (decoder, {"values": True}, lambda model: model(TOKENS)),
    "some heads": (
        lambda: decoder(positions="alibi", window=3, kv_heads=2),
        {"heads": [4, 1], "values": True},
        lambda model: model(TOKENS, mask=Document.from_lengths([[3, 4], [7, 0]])),
    ),
    "in pieces": (lambda: decoder(softcap=2.0), {}, in_pieces),
    "rules": (
        decoder,
        {},
        lambda model: model(
            TOKENS, mask=Prefix(2) | Where(lambda b, h, q, k: q > k) | Strided(2) | Chunk(3) | ~Window(2)
        ),
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Header and tensors of some recordings."""
    found = {}
    for name, (make, options, run) in RECORDED.items():
        model = make()
        with torch.no_grad(), record(model, **options) as recording:
            run(model)
        path = tmp_path_factory.mktemp("recorded") / "run"
        recording.save(path)
        with safe_open(path, "pt") as file:
            found[name] = dict(file.metadata()), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return found


def places(data, place=()):
    """Every place in plain data."""
    yield place
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield from places(data[key], (*place, key))


def at(data, place):
    for key in place:
        data = data[key]
    return data


JUNK = [
    None, 0, 1, -1, 2, 7, 13, 10**30, 1e9, 0.5, float("nan"), float("inf"), True, False, "", "0", "x", [], [0], [1, 2],
    {}, [[1, 2, 3]], {"tensor": "0"}, {"tensor": "3"}, {"kind": "Causal", "offset": None},
    {"kind": "Band", "before": None, "after": 0, "offset": None}, {"kind": "HiddenKey", "head": 3, "key": 1},
    {"kind": "HeadsMask", "mask": {"kind": "Causal", "offset": None}, "heads": [9], "of": 3},
    {"kind": "HeadsMask", "mask": {"kind": "HiddenKey", "head": 0, "key": 1}, "heads": [9, 1], "of": 3},
    {"kind": "Dense", "allowed": {"tensor": "0"}}, {"kind": "Prefix", "n": "x"},
    {"kind": "Given", "numbers": {"tensor": "0"}}, {"kind": "Alibi", "slopes": {"tensor": "1"}, "offset": None},
]  # fmt: skip


@st.composite
def mutations(draw, files):
    """A recording with one or two things changed in its header or its tensors."""
    metadata, tensors = files[draw(st.sampled_from(sorted(files)))]
    header, tensors = json.loads(metadata["recording"]), dict(tensors)
    for _ in range(draw(st.integers(1, 2))):
        change = draw(st.sampled_from(["delete", "replace", "copy", "nudge", "retype", "shorten", "turn", "drop"]))
        if change in ("delete", "replace", "copy", "nudge"):
            every = [place for place in places(header) if place]
            if not every:
                continue
            place = draw(st.sampled_from(every))
            inside, last = at(header, place[:-1]), place[-1]
            if change == "delete":
                del inside[last]
            elif change == "copy":
                inside[last] = copy.deepcopy(at(header, draw(st.sampled_from(every))))
            elif change == "nudge" and isinstance(inside[last], (int, float)):
                inside[last] += draw(st.sampled_from([-2, -1, 1, 0.5]))
            elif change == "nudge" and isinstance(inside[last], list) and inside[last]:
                inside[last].append(copy.deepcopy(inside[last][0]))
            else:
                inside[last] = copy.deepcopy(draw(st.sampled_from(JUNK)))
        elif tensors:
            name = draw(st.sampled_from(sorted(tensors)))
            tensor = tensors.pop(name)
            if change == "retype":
                kinds = [torch.int64, torch.float16, torch.float64, torch.bool, torch.uint8]
                tensors[name] = tensor.to(draw(st.sampled_from(kinds)))
            elif change == "shorten":
                tensors[name] = tensor.flatten()[: -draw(st.integers(1, 40))].clone()
            elif change == "turn":
                tensors[name] = tensor.transpose(0, -1).contiguous()
    return metadata | {"recording": json.dumps(header)}, tensors


def ask(recording, path):
    """Everything that a recording can be asked."""
    assert len(recording) > 0
    assert repr(recording)
    assert recording._repr_html_()
    for name, whole in recording.items():
        for seen in (whole, *recording.calls(name)):
            assert repr(seen)
            assert seen.weights().shape == seen.scores().shape
            for asked in (seen.entropy, seen.received, seen.distance, seen.max_score, seen.sink_mass, seen.visible):
                assert isinstance(asked(), torch.Tensor)
            assert seen.top(1).keys.shape[-1] == 1
            assert seen.steps()
            assert [seen.head(head).entropy().shape[1] for head in seen.heads] == [1] * len(seen.heads)
    recording.save(path)


@settings(max_examples=60)
@given(data=st.data())
def test_a_changed_file_answers_or_is_refused(data, files, tmp_path_factory):
    metadata, tensors = data.draw(mutations(files))
    path = tmp_path_factory.mktemp("changed") / "run"
    save_file(tensors, path, metadata)
    try:
        recording = load_recording(path)
    except ValueError as refused:
        said = str(refused)
    else:
        said = str(path)
        ask(recording, path.with_name("again"))
    assert str(path) in said


def changed(files, change, name="values"):
    metadata, tensors = files[name]
    header = json.loads(metadata["recording"])
    tensors = {key: tensor.clone() for key, tensor in tensors.items()}
    change(header, header["layers"]["layers.1"][0], tensors)
    return metadata | {"recording": json.dumps(header)}, tensors


def lse_in_another_precision(header, text, tensors):
    tensors[text["lse"]] = tensors[text["lse"]].double()


def tokens_as_numbers_with_fractions(header, text, tensors):
    tensors["t"] = torch.zeros(2, 7)
    text["pieces"][0]["tokens"] = "t"


def a_bias_that_is_bool(header, text, tensors):
    tensors["b"] = torch.ones(7, 7, dtype=torch.bool)
    text["pieces"][0]["bias"] = {"kind": "Given", "numbers": {"tensor": "b"}}


def a_head_that_a_mask_has_not(header, text, tensors):
    tensors["m"] = torch.ones(3, 7, 7, dtype=torch.bool)
    mask = {"kind": "Dense", "mask": {"tensor": "m"}}
    text["pieces"][0]["mask"] = {"kind": "HeadsMask", "mask": mask, "heads": [9] * 6, "of": 3}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda header, text, tensors: header["layers"].update({"layers.1": []}), "a layer has no calls"),
        (lambda header, text, tensors: header.update(layers={}), "it has no layers"),
        (lambda header, text, tensors: text.update(heads=[0, 1, 2, 3, 4, [5]]), "damaged"),
        (lambda header, text, tensors: text.update(heads=[0, 1, 2, 3, 4, 4]), "heads must be numbers, each of them"),
        (lambda header, text, tensors: text.update(heads=[0, 1, 2, 3, 4, "x"]), "heads must be numbers, each of them"),
        (lambda header, text, tensors: text.update(lse=None), "lse is missing"),
        (lambda header, text, tensors: text["pieces"][0].update(first=1, key_len=6), "call 0 cannot begin at key 1"),
        (lse_in_another_precision, "lse must be torch.float32, got torch.float64"),
        (tokens_as_numbers_with_fractions, "tokens must be whole numbers"),
        (a_bias_that_is_bool, "damaged"),
        (a_head_that_a_mask_has_not, "damaged"),
    ],
)
def test_what_would_fail_when_it_is_asked_is_refused_when_it_is_loaded(change, says, files, tmp_path):
    metadata, tensors = changed(files, change)
    save_file(tensors, tmp_path / "run", metadata)
    with pytest.raises(ValueError, match="run: a damaged recording") as refused:
        load_recording(tmp_path / "run")
    assert says in str(refused.value)
