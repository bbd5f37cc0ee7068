"""What a head is called where there are no tokens to go by: in images, in sound, between two sequences; and tables of
models with several towers."""

import pytest
import torch
from torch import nn

import regard
from comparing import assert_close
from regard.masks import Causal, Padding
from regard.models import Decoder, EncoderDecoder
from regard.observation import observe
from regard.recording import load_recording, record
from regard.recording.kinds import LOCAL_DISTANCE, image
from regard.recording.summary import summarise
from small import VOCAB, config, looking_at

# --- by hand ----------------------------------------------------------------------------------------------------------


def test_heads_of_a_sequence_by_hand():
    n = 24
    heads = {
        "previous": [max(0, i - 1) for i in range(n)],
        "next": [min(n - 1, i + 1) for i in range(n)],
        "first": [0] * n,
        "same": list(range(n)),
        "local": [i - 3 if i >= 3 else i + 3 for i in range(n)],
        "mixed": [(i + 12) % n for i in range(n)],
        "even": [None] * n,
    }
    summary = summarise("a", looking_at(*heads.values()))
    assert [s.kind for s in summary] == list(heads)
    assert {s.reads for s in summary} == {"sequence"}
    previous, *_, even = summary
    # the first query has no key before it; the one after it looks at the first key, which is its previous one
    assert previous.shares["previous"] == pytest.approx(1)
    # the first query is on key 0 by itself; of 24 queries two are there, each beyond an even 1/24
    assert previous.shares["first"] == pytest.approx((2 - 1) / (24 - 1))
    assert even.shares == pytest.approx(dict.fromkeys(even.shares, 0), abs=1e-9)
    assert even.spread == pytest.approx(1)


def test_heads_of_an_image_by_hand():
    special, rows, columns = 3, 4, 5
    queries = range(special + rows * columns)
    at = {i: divmod(i - special, columns) for i in queries if i >= special}

    def patch(row, column):
        return special + row % rows * columns + column % columns

    heads = {
        "same": list(queries),
        "neighbour": [patch(at[i][0] + (1 if at[i][0] < 3 else -1), at[i][1]) if i in at else 0 for i in queries],
        "row": [patch(at[i][0], at[i][1] + 2) if i in at else 0 for i in queries],
        "column": [patch(at[i][0] + 2, at[i][1]) if i in at else 0 for i in queries],
        "CLS": [0 if i in at else 5 for i in queries],
        "registers": [1 + i % 2 for i in queries],
        "even": [None for _ in queries],
        "mixed": [patch(at[i][0] + 2, at[i][1] + 2) if i in at else 0 for i in queries],
    }
    summary = summarise("a", looking_at(*heads.values(), patches=(rows, columns)))
    assert [s.kind for s in summary] == list(heads)
    assert {s.reads for s in summary} == {"image 4 x 5 + 3"}
    assert set(image(4, 5, 1).rules) == {"same", "neighbour", "row", "column", "CLS"}
    assert set(image(4, 5, 0).rules) == {"same", "neighbour", "row", "column"}
    for name, s in zip(heads, summary, strict=True):
        assert s.shares.get(name, 1) == pytest.approx(1) or name in ("even", "mixed")


def test_heads_between_two_sequences_by_hand():
    heads = {
        "aligned": [round(i * 39 / 9) for i in range(10)],
        "first key": [0] * 10,
        "last key": [39] * 10,
        "mixed": [39 - round(i * 39 / 9) for i in range(10)],
        "even": [None] * 10,
    }
    summary = summarise("a", looking_at(*heads.values(), key_len=40, cross=True))
    assert [s.kind for s in summary] == list(heads)
    assert summary[0].distance < 0.5 < summary[3].distance
    (alone,) = summarise("a", looking_at([None], key_len=40, cross=True))
    assert set(alone.shares) == {"first key", "last key"}


def test_shares_beyond_even_counted_one_by_one():
    torch.manual_seed(2)
    query, key = torch.randn(2, 2, 3, 21, 5, dtype=torch.float64)
    seen = observe(query, key, mask=Causal() & Padding([21, 17]), scale=1.5)
    weights = seen.weights()
    allowed = (observe(0 * query, key, mask=Causal() & Padding([21, 17])).weights() > 0)[:, 0]
    rules = {
        "previous": lambda i, j: j == i - 1,
        "next": lambda i, j: j == i + 1,
        "first": lambda i, j: j == 0,
        "same": lambda i, j: j == i,
        "local": lambda i, j: abs(i - j) < LOCAL_DISTANCE,
    }
    for s in summarise("a", seen):
        for kind, rule in rules.items():
            above = below = 0.0
            for b in range(2):
                for i in range(21):
                    keys = [j for j in range(21) if allowed[b, i, j]]
                    of_kind = [j for j in keys if rule(i, j)]
                    even = len(of_kind) / max(1, len(keys))
                    if 0 < even < 1:
                        above += float(weights[b, s.head, i, of_kind].sum()) - even
                        below += 1 - even
            assert s.shares[kind] == pytest.approx(above / below if below else 0)


# --- models -----------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_has_three_tables_and_its_cross_attention_is_not_taken_for_a_text():
    model = EncoderDecoder(config(layers=2))
    source, target = torch.randint(VOCAB, (2, 2, 9))  # of one length, so that shapes tell nothing
    with torch.no_grad(), record(model) as recording:
        model(source, target)
    assert [seen.cross for seen in recording.values()] == [False, False, False, True, False, True]
    summary = recording.summary()
    assert {name: len(tower) for name, tower in summary.towers().items()} == {
        "encoder.layers.*: text": 12,
        "decoder.layers.*: text": 12,
        "decoder.layers.*.cross: another sequence": 12,
    }
    assert str(summary).count("layer  ") == 3
    assert "decoder.layers.*.cross: another sequence\nlayer" in str(summary)
    assert summary._repr_html_().count("<table>") == 3
    assert recording.summary(target) == summary  # a text of the decoder's shape is the encoder's too
    short = Decoder(config(layers=2))
    with torch.no_grad(), record(short) as alone:
        short(target)
    assert str(alone.summary()).startswith("layer  ")


class Writer(nn.Module):
    """Self-attention and cross-attention that read a text in pieces."""

    def __init__(self):
        super().__init__()
        self.model = Decoder(config(layers=2), cross=True)

    def forward(self, tokens, context, cache, context_cache):
        return self.model(tokens, context=context, cache=cache, context_cache=context_cache)


@pytest.mark.parametrize("layers", [None, ["model.layers.0.cross", "model.layers.1.cross"]])
def test_cross_attention_that_is_read_in_pieces_is_one_text(layers, tmp_path):
    writer, tokens, context = Writer().double().eval(), torch.randint(VOCAB, (2, 7)), torch.randn(2, 11, 24).double()

    def write(pieces):
        cache, context_cache = writer.model.cache(), writer.model.cache()
        for piece in tokens.split(pieces, dim=1):
            writer(piece, context, cache, context_cache)

    with torch.no_grad(), record(writer, layers=layers, values=True) as recording:
        write([3, 1, 2, 1])
        write([7])  # another text, on the same states
    with torch.no_grad(), record(writer, layers=layers, values=True) as expected:
        write([7])
    for name, seen in expected.items():
        assert [call.grid.query_len for call in recording.calls(name)] == [3, 1, 2, 1, 7]
        assert len(recording._texts[name]) == 2
        first = recording._texts[name][0].whole()
        assert_close(first.weights(), seen.weights())
        assert torch.equal(first.tokens, tokens)
    recording.save(tmp_path / "run")
    again = load_recording(tmp_path / "run")
    assert again.summary() == recording.summary()
    assert [seen.cross for seen in again.values()] == [seen.cross for seen in recording.values()]


def transformers_models():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 40, **sizes}
    picture = {**sizes, "image_size": 12, "patch_size": 4}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sound = {
        **sizes, "vocab_size": 30, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8),
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2,
    }  # fmt: skip
    ids, pixels = torch.randint(3, 29, (2, 7)), torch.randn(2, 3, 12, 12)
    both = torch.cat([ids, torch.full((2, 9), 39)], dim=1)
    kinds = torch.cat([torch.zeros(2, 7), torch.ones(2, 9)], dim=1).long()
    read = {"input_ids": ids}
    seen = {"pixel_values": pixels}
    written = {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    generated = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    whisper = {
        **heads, **layers, "vocab_size": 60, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32,
        "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
        "begin_suppress_tokens": None,
    }  # fmt: skip
    t5 = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    t5 |= {"decoder_start_token_id": 0}
    bart = {**heads, **layers, "vocab_size": 40, "max_position_embeddings": 32, "forced_eos_token_id": None}
    mel = {"input_features": torch.randn(2, 8, 40)}
    mixture = {"num_key_value_heads": 2, "num_local_experts": 2}
    whole, one = "image 3 x 3", "image 3 x 3 + 1"
    three = ["text", "text", "another sequence"]
    heard = ["sequence", "text", "another sequence"]
    qwen = {
        "text_config": {**text, "num_key_value_heads": 2,
                        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
                          "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2},
        "image_token_id": 39, "vision_start_token_id": 37, "vision_end_token_id": 38,
    }  # fmt: skip
    qwen_read = {
        "input_ids": torch.cat([ids[:1], torch.full((1, 1), 37), torch.full((1, 4), 39)], dim=1),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[0] * 8 + [1] * 4]),
    }  # fmt: skip
    gemma = {"text_config": {**text, "model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 2},
             "vision_config": {**picture, "model_type": "siglip_vision_model", "vision_use_head": False},
             "mm_tokens_per_image": 9, "image_token_index": 39, "boi_token_index": 37,
             "eoi_token_index": 38}  # fmt: skip
    llava = {"text_config": {**text, "model_type": "llama", "num_key_value_heads": 2}, "image_token_index": 39,
             "vision_config": {**picture, "model_type": "clip_vision_model"}, "image_seq_length": 9}  # fmt: skip
    two = {"text_config": {**text, "max_position_embeddings": 16, "eos_token_id": 2}, "vision_config": picture}
    return {
        "GPT2LMHeadModel": ({"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}, read, ["text"]),
        "LlamaForCausalLM": ({**text, "num_key_value_heads": 2}, read, ["text"]),
        "BertModel": (text, read, ["text"]),
        "MixtralForCausalLM": (text | mixture, read, ["text"]),
        "ViTModel": (picture, seen, [one]),
        "DeiTModel": (picture, seen, ["image 3 x 3 + 2"]),
        "Dinov2Model": (picture, seen, [one]),
        "Dinov2WithRegistersModel": (picture | {"num_register_tokens": 3}, seen, ["image 3 x 3 + 4"]),
        "BeitModel": (picture, seen, [one]),
        "SwinModel": (
            {"image_size": 16, "patch_size": 2, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 4],
             "window_size": 4},
            {"pixel_values": torch.randn(2, 3, 16, 16)}, ["image 4 x 4"],
        ),
        "CLIPModel": (two, read | seen, [one, "text"]),
        "SiglipModel": (two, read | seen, [whole, "text"]),
        "LlavaForConditionalGeneration": (llava, {"input_ids": both} | seen, [one, "text"]),
        "Gemma3ForConditionalGeneration": (
            gemma, {"input_ids": both, "token_type_ids": kinds} | seen, [whole, "text"]),
        "Qwen2VLForConditionalGeneration": (qwen, qwen_read, ["sequence", "text"]),
        "Wav2Vec2Model": (sound, {"input_values": torch.randn(2, 2000)}, ["sequence"]),
        "HubertModel": (sound, {"input_values": torch.randn(2, 2000)}, ["sequence"]),
        "WhisperForConditionalGeneration": (whisper, mel | {"decoder_input_ids": ids}, heard),
        "WhisperForConditionalGeneration, generate": (whisper, mel | generated, heard),
        "T5ForConditionalGeneration": (t5, written, three),
        "T5ForConditionalGeneration, generate": (t5, read | generated, three),
        "BartForConditionalGeneration": (bart, written, three),
        "BartForConditionalGeneration, generate": (bart, read | generated | {"num_beams": 1}, three),
    }  # fmt: skip


MODELS = transformers_models()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_table_for_each_of_its_towers(name):
    transformers = pytest.importorskip("transformers")
    regard.huggingface.register()
    sizes, read, reads = MODELS[name]
    kind, _, generates = name.partition(", ")
    made = getattr(transformers, kind)
    model = made(made.config_class(**sizes)).eval()
    model.set_attn_implementation("regard")
    with torch.no_grad(), record(model) as recording:
        model.generate(**read) if generates else model(**read)
    summary = recording.summary()
    towers = summary.towers()
    assert [tower.split(": ")[1] for tower in towers] == reads
    assert all(len(texts) == 1 for texts in recording._texts.values())
    for seen in recording.values():
        assert repr(seen).startswith("<Recorded ")
    assert len(summary) == sum(len(seen.heads) for seen in recording.values())
    assert all(torch.tensor([s.entropy, s.spread, s.distance, *s.shares.values()]).isfinite().all() for s in summary)
    shown = str(summary), summary._repr_html_()
    assert shown[0].count("layer ") == shown[1].count("<table>") == len(reads)
    if generates:  # what was written in pieces is one text, in cross-attention too
        last = list(recording)[-1]
        assert recording[last].cross
        assert recording[last].grid.query_len == sum(call.grid.query_len for call in recording.calls(last)) >= 5
        assert len(recording.calls(last)) >= 5
