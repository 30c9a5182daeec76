"""A folder of CTranslate2's Whisper opens as it is: what is computed of it is what transformers computes of the same
numbers."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from triolet.core.errors import CheckpointError, InvalidRequest, UnsupportedModel
from triolet.models.blueprints.read import read_blueprint
from triolet.models.checkpoints.ctranslate2_tokenizer import read_backend
from triolet.models.checkpoints.ctranslate2_whisper import Converted
from triolet.models.checkpoints.files import find_weights, is_mapped, local_folder, read_config, resolve
from triolet.models.checkpoints.weights import open_weights
from triolet.models.checkpoints.whisper_checkpoint import read_checkpoint
from triolet.models.linear.modules import QuantizedLinear

from ..checkpoints.checkpoints import rewrite
from ..checkpoints.ctranslate2 import convert, dequantized, packed

REAL = os.environ.get("TRIOLET_REAL", "")
SAME = ("shape", "encoder_inner", "decoder_inner", "activation", "tied", "features", "alignment", "eos_token_ids")
SAME += ("suppress_token_ids", "begin_suppress_token_ids", "architecture")
NAMED = (
    "start_id",
    "no_timestamps_id",
    "timestamp_begin_id",
    "previous_id",
    "no_speech_id",
    "language_ids",
    "task_ids",
)


@pytest.fixture
def converted(checkpoint, tmp_path):
    """``converted(quantization)`` gives the folder, and a model of transformers with its numbers."""

    def make(quantization):
        folder = convert(checkpoint, tmp_path / "ct2", quantization)
        model = WhisperForConditionalGeneration.from_pretrained(
            dequantized(checkpoint, tmp_path / "plain", quantization), dtype=torch.float32
        )
        return folder, model.eval()

    return make


def check_tokens(driver, model, features, audio, ids, job, near=1e-4, sure=1e-3):
    """The encoder's output, the tokens, and their chances."""
    driver.encode(a=audio(1))
    with torch.inference_mode():
        expected = model.model.encoder(features(audio(1))).last_hidden_state[0]
    found = driver.executor._open.outputs.get("a").float()
    assert float((found - expected).abs().max()) <= near
    prompt = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    outcome = driver.run(job(key="a", prompt=prompt, max_tokens=12, chunk=3))[0]
    with torch.inference_mode():
        fed = torch.tensor([[*prompt, *outcome.tokens[:-1]]])
        logits = model(features(audio(1)), decoder_input_ids=fed).logits[0, len(prompt) - 1 :].log_softmax(-1)
    assert list(outcome.tokens) == logits.argmax(-1).tolist()
    told = [float(row[token]) for row, token in zip(logits, outcome.tokens, strict=True)]
    assert outcome.logprobs == pytest.approx(told, abs=sure)


@pytest.mark.parametrize("quantization", ["float16", "bfloat16", "int16"])
def test_it_computes_what_transformers_does(open_driver, converted, features, audio, ids, job, quantization):
    folder, model = converted(quantization)
    check_tokens(open_driver(folder), model, features, audio, ids, job)


def test_in_int8_torch_computes_what_transformers_does(
    open_driver, converted, features, audio, ids, job, without_native, monkeypatch
):
    """Of the rounded weights, with the inputs as they are."""
    monkeypatch.setattr(QuantizedLinear, "exact", True)
    folder, model = converted("int8_float16")
    check_tokens(open_driver(folder), model, features, audio, ids, job)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_int8_stays_as_it_is_stored(open_driver, converted, audio, ids, job, quantization):
    """Also where int8 is asked for: nothing is rounded twice. The same bits alone and beside others."""
    folder, model = converted("int8")
    driver, theirs = open_driver(folder, quantization=quantization), dict(model.named_modules())
    ours = driver.executor._open.parts.model.module
    joined = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for name in ("encoder.layers.1.fc1", "decoder.layers.0.fc2", "decoder.layers.1.encoder_attn.out_proj"):
        expected = theirs[f"model.{name}"].weight
        assert ours.get_submodule(name).panels().in_int8
        assert torch.allclose(ours.get_submodule(name).panels().part(0, len(expected)), expected, rtol=1e-6, atol=0)
    for index, name in enumerate(joined):
        panels, expected = ours.decoder.layers[1].self_attn.q_proj.panels(), theirs[f"model.decoder.layers.1.{name}"]
        scaled = expected.weight * (0.25 if index == 0 else 1.0)  # queries, heads of 16
        assert torch.allclose(panels.part(48 * index, 48 * index + 48), scaled, rtol=1e-6, atol=0)
    words = theirs["model.decoder.embed_tokens"].weight
    assert torch.allclose(ours.proj_out.panels().part(0, len(words)), words, rtol=1e-6, atol=0)
    assert ours.proj_out.packed.data_ptr() == ours.decoder.embed_tokens.weight.data_ptr()

    driver.encode(a=audio(1), b=audio(2))
    prompt = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    jobs = [job(key=key, prompt=prompt, max_tokens=12) for key in "ab"]
    together, alone = driver.run(*jobs), [driver.run(one)[0] for one in jobs]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.logprobs for one in together] == [one.logprobs for one in alone]


def test_a_head_of_its_own_stays_apart(open_driver, make, save, features, audio, ids, job, tmp_path):
    model = make(tie_word_embeddings=False)
    folder = convert(save(tmp_path / "plain", model), tmp_path / "ct2", "float32")
    assert "proj_out.weight" in open_weights(folder / "model.bin")
    check_tokens(open_driver(folder), model, features, audio, ids, job)


def test_int8_is_refused_on_a_device_that_does_not_compute_it(checkpoint, tmp_path, config, monkeypatch):
    folder = convert(checkpoint, tmp_path / "ct2", "int8")
    monkeypatch.setattr("triolet.models.blueprints.read.find_device", lambda _: torch.device("cuda"))
    with pytest.raises(InvalidRequest, match=r"ct2 has quantized weights, and device='cuda'; allowed: device='cpu'"):
        read_blueprint(folder, config(device="cuda"))


@pytest.mark.parametrize("vocabulary", ["", "vocabulary.json", "vocabulary.txt"])
def test_settings_and_tokenizer_are_those_of_the_source(checkpoint, tmp_path, vocabulary):
    source = read_checkpoint(checkpoint)
    found = read_checkpoint(folder := convert(checkpoint, tmp_path / "ct2", vocabulary=vocabulary))
    for name in SAME:
        assert getattr(found, name) == getattr(source, name), name
    for name in NAMED:
        assert getattr(found.tokens, name) == getattr(source.tokens, name), name
    assert found.tokens.max_initial_timestamp == 50
    assert not found.quantized
    assert found.tokenizer.get_vocab() == source.tokenizer.get_vocab() == found.tokenizer.whole.get_vocab()
    text = "don't <|en|> \u00e9 <|0.02|>"
    told = source.tokenizer.encode(text, add_special_tokens=False)
    assert found.tokenizer.encode(text, add_special_tokens=False) == told
    assert found.tokenizer.decode(told, skip_special_tokens=True) == source.tokenizer.whole.decode(
        told, skip_special_tokens=True
    )
    assert (find_weights(folder), is_mapped(folder)) == ((folder / "model.bin",), False)
    (folder / (vocabulary or "tokenizer.json")).write_text("[]")
    assert found.changed_files() == (vocabulary or "tokenizer.json",)


def test_the_hub_is_asked_for_each_file(checkpoint, tmp_path, monkeypatch):
    folder, asked = convert(checkpoint, tmp_path / "ct2", vocabulary="vocabulary.txt"), list[str]()

    def download(name, allow_patterns):
        asked.extend(allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("Systran/faster-whisper-small") == folder
    assert [path.name for path in folder.iterdir() if not any(map(path.match, asked))] == []


def test_languages_are_those_of_the_model(checkpoint, tmp_path):
    """A model may know fewer than its vocabulary names."""
    folder = convert(checkpoint, tmp_path / "ct2")
    told = json.loads((folder / "config.json").read_text())
    rewrite(folder / "config.json", lang_ids=told["lang_ids"][:2])
    assert list(read_checkpoint(folder).tokens.language_ids) == ["de", "en"]
    rewrite(folder / "config.json", lang_ids=["en"])
    with pytest.raises(CheckpointError, match=r"config.json has lang_ids=\['en'\]; allowed: a list of token ids"):
        read_checkpoint(folder)


@pytest.fixture(scope="module")
def demo_merges():
    """A vocabulary with merges of merges, in the order in which they were learned."""
    alphabet = [chr(number) for number in range(33, 127)]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("in", "g"), ("a", "n"), ("h", "e"), ("an", "d"), ("the", "ing")]
    return alphabet, merges


def test_merges_are_found_again(demo_merges, tmp_path):
    alphabet, merges = demo_merges
    tokens = [*alphabet, *(first + second for first, second in merges), "", "<|endoftext|>", "<|en|>", "<|0.00|>"]
    (tmp_path / "vocabulary.json").write_text(json.dumps(tokens))
    made = json.loads(read_backend(tmp_path).to_str())
    assert [tuple(pair) for pair in made["model"]["merges"]] == merges
    assert [(one["content"], one["special"]) for one in made["added_tokens"]] == [
        ("<|endoftext|>", True),
        ("<|en|>", True),
        ("<|0.00|>", False),
    ]


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("{}", "vocabulary.json has no list of texts with <|endoftext|>"),
        ('["a", 1, "<|endoftext|>"]', "vocabulary.json has no list of texts"),
        ('["a", "b", "a", "<|endoftext|>"]', "the vocabulary has 'a' twice"),
        ("[", "Expecting value"),
        (None, "has neither tokenizer.json nor vocabulary.json or vocabulary.txt"),
    ],
)
def test_a_damaged_vocabulary_is_told(tokens, told, tmp_path):
    if tokens is not None:
        (tmp_path / "vocabulary.json").write_text(tokens)
    with pytest.raises(CheckpointError) as error:
        read_backend(tmp_path)
    assert told in str(error.value)


# -- damaged files -----------------------------------------------------------------------------------------------------

SCALAR = torch.tensor(1, dtype=torch.int16)


def small():
    """The variables of the smallest Whisper, of width 4, in int8."""

    def matrix(*shape):
        return torch.ones(shape, dtype=torch.int8)

    found = {"encoder/num_heads": SCALAR, "decoder/num_heads": SCALAR, "decoder/embeddings/weight": matrix(5, 4)}
    found |= {"encoder/conv1/weight": matrix(4, 2, 3), "encoder/conv2/weight": matrix(4, 4, 3)}
    for side, attentions in (("encoder", ("self_attention",)), ("decoder", ("self_attention", "attention"))):
        found[f"{side}/position_encodings/encodings"] = torch.ones(3, 4, dtype=torch.float16)
        for attention in attentions:
            found[f"{side}/layer_0/{attention}/linear_0/weight"] = matrix(12, 4)
        found[f"{side}/layer_0/ffn/linear_0/weight"] = matrix(4, 4)
    scales = {f"{name}_scale": torch.ones(len(one)) for name, one in found.items() if one.dtype == torch.int8}
    return found | scales


def read(folder):
    """Reads all that is read of a folder."""
    read_config(folder)
    for one in open_weights(folder / "model.bin").values():
        for _ in one.pieces():
            pass


@pytest.fixture
def written(tmp_path):
    """``written(content)`` gives a folder with that model.bin."""
    (tmp_path / "config.json").write_text("{}")

    def write(content):
        (tmp_path / "model.bin").write_bytes(content)
        return tmp_path

    return write


def changed(**changes):
    found = {name.replace("/", "_"): name for name in small()}
    variables = {name: one for name, one in small().items() if changes.get(name.replace("/", "_"), one) is not None}
    return variables | {found.get(name, name): one for name, one in changes.items() if one is not None}


WORDS = "decoder_embeddings_weight"
F32 = torch.ones(12)
BROKEN = {
    "has no variable 'decoder/embeddings/weight'": packed(changed(**{WORDS: None}), {}),
    "of shape (4,); allowed: 2 dimensions": packed(changed(**{WORDS: torch.ones(4)}), {}),
    "in I8 without scales of shape (5,)": packed(changed(decoder_embeddings_weight_scale=torch.ones(4)), {}),
    "that are not finite, or not positive": packed(changed(decoder_embeddings_weight_scale=torch.zeros(5)), {}),
    "'strange/weight' of shape (2, 2), which Whisper does not have": packed(
        small() | {"strange/weight": F32[:4].view(2, 2)}, {}
    ),
    "'encoder/layer_0/self_attention/linear_0/bias' of shape (4,), which": packed(
        small() | {"encoder/layer_0/self_attention/linear_0/bias": F32[:4]}, {}
    ),
    "has the name 'a' for 'b'; allowed: new names of variables": packed(small(), {"a": "b"}),
    "has the name 'encoder/num_heads' for 'encoder/num_heads'; allowed: new": packed(
        small(), {"encoder/num_heads": "encoder/num_heads"}
    ),
    "'x/weight' of shape (1, 1, 1, 1, 1), which Whisper does": packed(
        small() | {"x/weight": F32[:1].view([1] * 5)}, {}
    ),
    "has 1 bytes after its last name": packed(small(), {}) + b"x",
    "ends within its version": b"\6\0",
    "ends within the number of its other names": packed(small(), {})[:-1],
    "begins with 1179993927; allowed: 5 or 6": b"GGUF\3\0\0\0",
    "has the variable 'decoder/num_heads' twice": packed(small(), {}).replace(
        b"encoder/num_heads", b"decoder/num_heads"
    ),
    "has a Wav2Vec2Spec of CTranslate2; allowed of its models: WhisperSpec": packed({}, {}, spec="Wav2Vec2Spec"),
    "another decoder/activation than Whisper; allowed: 3": packed(small() | {"decoder/activation": SCALAR}, {}),
}


@pytest.mark.parametrize("told", BROKEN)
def test_what_is_wrong_with_a_file_is_told(told, written):
    kind = (
        UnsupportedModel if "; allowed: 5" in told or "of its models" in told or "another" in told else CheckpointError
    )
    with pytest.raises(CheckpointError) as error:
        read(written(BROKEN[told]))
    assert told in str(error.value)
    assert isinstance(error.value, kind)


def test_numbers_of_a_file_are_compared_with_its_size(written):
    """Of shapes, of bytes, of variables and of names, each of which would be too much to hold."""
    whole = packed(small(), {"decoder/projection/weight": "decoder/embeddings/weight"})
    read(written(whole))
    name = b"decoder/embeddings/weight\0"
    behind = whole.index(name) + len(name)
    most = b"\xff\xff\xff\xff"
    count = whole.index(b"WhisperSpec") + 16
    places = {"in 20 bytes": behind + 1, "I8 in 4294967295": behind + 10, "dtype 26": count}
    for told, place in places.items():
        with pytest.raises(CheckpointError, match=told):
            read(written(whole[:place] + most + whole[place + 4 :]))
    both = struct.pack("<II", 1 << 30, 4) + b"\1" + struct.pack("<I", (1 << 32) - 4)
    with pytest.raises(CheckpointError, match=r"\(1073741824, 4\) and I8 in 4294967292"):
        read(written(whole[: behind + 1] + both + whole[behind + 14 :]))


def test_damaged_files_are_refused_or_read(written):
    """300 files: none raises another error, and the first 50 allocate little."""
    dice, whole = random.Random(42), packed(small(), {"decoder/projection/weight": "decoder/embeddings/weight"})
    read(written(whole))
    refused = list[str]()
    tracemalloc.start()
    try:
        for number in range(300):
            if number == 50:
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
                tracemalloc.stop()
            made = bytearray(whole)
            if number % 3 == 0:
                del made[dice.randrange(len(made)) :]
            else:
                place = dice.randrange(len(made))
                some = bytes(
                    dice.choice((0, 1, 127, 128, 255, dice.randrange(256))) for _ in range(dice.choice((1, 4)))
                )
                made[place : place + (len(some) if number % 3 == 1 else 0)] = some
            try:
                read(written(made))
            except CheckpointError as error:
                refused.append(str(error))
    finally:
        tracemalloc.stop()
    assert len(refused) > 200
    folder = str(written(whole))
    assert all(folder in one for one in refused)


def test_the_file_itself_is_no_model(written):
    with pytest.raises(CheckpointError, match=r"model.bin is a file; .*; give its folder, /"):
        local_folder(written(b"") / "model.bin")


def test_other_names_have_the_scales_of_what_they_mean(written):
    """The converter stores equal matrices once."""
    variables = small()
    other = "encoder/layer_0/ffn/linear_0/weight"
    del variables[other], variables[f"{other}_scale"]
    folder = written(packed(variables, {other: "decoder/layer_0/ffn/linear_0/weight"}))
    found = open_weights(folder / "model.bin")
    assert torch.equal(found["model.encoder.layers.0.fc1.scales"].read(torch.float32), torch.ones(4))
    assert "proj_out.weight" not in found


def test_a_model_of_english_alone_knows_no_other_language(written):
    """Its converter lists the languages of the tokenizer, which names all."""
    for rows, told in ((51_864, False), (51_865, None)):
        variables = changed(**{WORDS: torch.ones(rows, 4, dtype=torch.int8)})
        folder = written(packed(variables | {"decoder/embeddings/weight_scale": torch.ones(rows)}, {}))
        rewrite(folder / "config.json", lang_ids=[1])
        made = Converted.open(folder).generation({"<|en|>": 1, "<|de|>": 2})
        assert (made.get("is_multilingual"), made.get("lang_to_id")) == (told, {"<|en|>": 1})


# -- the real model ----------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.skipif(not REAL, reason="set TRIOLET_REAL to a folder with real weights")
def test_the_real_folder_has_the_weights_and_settings_of_the_checkpoint():
    ours, theirs = Path(REAL) / "whisper-base-ct2", Path(REAL) / "whisper-base"
    found, expected = open_weights(ours / "model.bin"), open_weights(theirs / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert torch.equal(one.read(torch.float32), expected[name].read(torch.float32)), name
    found, expected = read_checkpoint(ours), read_checkpoint(theirs)
    for name in (*SAME, "tokens"):
        assert getattr(found, name) == getattr(expected, name), name
