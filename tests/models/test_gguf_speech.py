"""A file of transcribe.cpp opens as it is: what is computed of it is what transformers computes of the same numbers."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from attrs import evolve
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from triolet.api.inputs.audio import load_audio
from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, UnsupportedModel
from triolet.core.request import Alignment
from triolet.models.checkpoints.files import resolve
from triolet.models.checkpoints.loading import read_tokenizer
from triolet.models.checkpoints.weights import open_weights
from triolet.models.checkpoints.whisper_checkpoint import read_checkpoint
from triolet.models.executor import TorchExecutor
from triolet.models.native.library import Library
from triolet.models.native.parts import PackedLinear

from ..checkpoints.checkpoints import random_model
from ..checkpoints.gguf_speech import write_speech
from .test_alignment import run_alignments
from .test_ctranslate2 import SAME, check_tokens
from .texts import Driver, Job

REAL = os.environ.get("TRIOLET_REAL", "")
ROUNDED = {"near": 3e-4, "sure": 3e-3}  # the inputs of products with blocks, to 16 bits
TEXTS = ("Hello world, it's 2024!", "Grüße — 你好, 日本語 naïve café", " a b  c")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# -- Whisper -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whisper(make, save, tmp_path_factory):
    """A model whose rows are whole blocks, and its checkpoint."""
    model = make(d_model=64, encoder_attention_heads=4, decoder_attention_heads=4)
    return model, save(tmp_path_factory.mktemp("whisper"), model)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_whisper_computes_what_transformers_does(kind, whisper, tmp_path, open_driver, features, audio, ids, job):
    """With matrices of each kind. The same bits come out alone and beside others."""
    made = copy.deepcopy(whisper[0])
    driver = open_driver(write_speech(tmp_path / "whisper.gguf", whisper[1], made, kind), dtype="float32")
    check_tokens(driver, made, features, audio, ids, job, **({} if kind == "F32" else ROUNDED))
    check_held(driver.executor, kind)
    asked = job(key="a", prompt=(ids.start, ids.en, ids.transcribe, ids.no_timestamps), max_tokens=6)
    other = job(key="a", prompt=(ids.start, ids.en, ids.translate), chunk=1, max_tokens=4)
    (alone,), (beside, _) = driver.run(asked), driver.run(asked, other)
    assert (alone.tokens, alone.logprobs) == (beside.tokens, beside.logprobs)


def check_held(executor: TorchExecutor, kind: str) -> None:
    """Linear layers are held in the blocks of the file."""
    packed = [one for one in executor._open.parts.model.module.modules() if isinstance(one, PackedLinear)]
    assert packed
    assert {section.kind for one in packed for section in one.sections} == {kind} - {"F32"}


def test_whisper_finds_the_words_of_decoded_blocks(whisper, tmp_path, open_driver, audio, ids, monkeypatch):
    """The queries of blocks are scaled by attention, not by their weights."""
    made = copy.deepcopy(whisper[0])
    for layer in made.model.decoder.layers:  # attention neither even nor all on one frame
        for one in layer.encoder_attn.q_proj.parameters():
            one.detach().mul_(0.1)
    path, found = write_speech(tmp_path / "whisper.gguf", whisper[1], made, "Q8_0"), []
    tokens = (ids.start, ids.en, ids.transcribe, ids.no_timestamps, *b"one two three four five six seven")
    for _ in range(2):
        driver = open_driver(path, dtype="float32")
        driver.encode(a=audio(1))
        found += run_alignments(driver, [("a", tokens, Alignment(start=4, frames=100))])
        monkeypatch.setattr(Library, "load", classmethod(lambda _: None))  # torch computes with decoded blocks
    assert max(abs(a - b) for a, b in zip(found[0].frames, found[1].frames, strict=True)) <= 1
    assert len(set(found[1].frames)) > 5, "they prove too little"
    assert found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-3)


def check_settings(path: Path, folder: Path) -> None:
    ours, theirs = read_checkpoint(resolve(path)), read_checkpoint(folder)
    for name in set(SAME) - {"alignment"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.tokens == evolve(theirs.tokens, max_initial_timestamp=50)  # which no file tells
    for text in (*TEXTS, "<|de|>x"):
        encoded = [one.tokenizer.encode(text, add_special_tokens=False) for one in (ours, theirs)]
        assert encoded[0] == encoded[1]
        assert ours.tokenizer.decode(encoded[0], skip_special_tokens=True) == theirs.tokenizer.decode(
            encoded[0], skip_special_tokens=True
        )


def test_whisper_has_the_settings_of_its_checkpoint(whisper, tmp_path):
    check_settings(write_speech(tmp_path / "whisper.gguf", whisper[1], copy.deepcopy(whisper[0])), whisper[1])


# -- Moonshine ---------------------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "vocab_size": 280,
    "pad_head_dim_to_multiple_of": 8,
    "pad_token_id": 2,
}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
CONFIGS = {
    "Moonshine": {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in HEADS.items()}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.62}},
    "MoonshineStreaming": {
        **HEADS,
        "encoder_config": {**HEADS, "hidden_size": 32, "intermediate_size": 64, "sliding_windows": [[16, 4], [16, 0]]},
        "tie_word_embeddings": False,
    },
}


def words() -> Any:
    """A vocabulary of the kind that Moonshine has: pieces, bytes for what has no piece, and marks."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    made = Tokenizer(
        models.BPE(
            {text: place for place, text in enumerate(texts)},
            [("a", "b"), ("▁", "a")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fused = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(fused)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marks = [f"<<ST_{number}>>" for number in range(280 - len(texts))]
    made.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>", *marks)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **named)


@pytest.fixture(scope="module", params=CONFIGS)
def moonshine(request, tmp_path_factory):
    """A random model, and its checkpoint."""
    config = getattr(transformers, f"{request.param}Config")(**SIZES | CONFIGS[request.param])
    folder = tmp_path_factory.mktemp("moonshine")
    model = random_model(getattr(transformers, f"{request.param}ForConditionalGeneration"), config, 0)
    ids = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    model.generation_config = transformers.GenerationConfig(**ids)
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    extractor.save_pretrained(folder)
    return model, folder


def check_speech(opens: Any, path: Path, model: Any, samples: Any, *, kind: str, count: int) -> None:
    """The encoder's output, and the tokens. Linear layers are held in the blocks of the file."""
    executor, description = opens(path, EngineConfig(dtype="float32", device="cpu"))
    check_held(executor, kind)
    sound = description.speech.hear(samples)
    executor.encode((sound.item,))
    found = executor._open.outputs.get(sound.item.key)
    heard = sound.item.payload["input_values"][None]
    values = {"input_values": heard, "attention_mask": torch.ones_like(heard, dtype=torch.int64)}
    expected = model.get_encoder()(**values).last_hidden_state[0]
    assert float((found - expected).abs().max()) <= (1e-4 if kind == "F32" else 1e-3)
    (outcome,) = Driver(executor, description).run(Job(key=sound.item.key, prompt=sound.heard, max_tokens=count))
    made = model.generate(**values, max_new_tokens=count, do_sample=False)[0, 1:].tolist()
    assert outcome.tokens == made
    assert len(set(made)) > 3, "they prove too little"


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_moonshine_computes_what_transformers_does(kind, moonshine, opens, tmp_path):
    """With matrices of each kind."""
    made = copy.deepcopy(moonshine[0])
    path = write_speech(tmp_path / "moonshine.gguf", moonshine[1], made, kind)
    samples = (np.random.default_rng(2).standard_normal(16_000) * 0.3).astype(np.float32)
    with torch.inference_mode():
        check_speech(opens, path, made, samples, kind=kind, count=16)


def check_tokenizer(path: Path, folder: Path) -> None:
    ours, theirs = read_tokenizer(resolve(path)), read_tokenizer(folder)
    for text in (*TEXTS, "ab aab", "a<<ST_3>>b", "<s>"):
        assert ours(text).input_ids == theirs(text).input_ids, text
        decoded = [one.decode(theirs(text).input_ids, skip_special_tokens=True) for one in (ours, theirs)]
        assert decoded[0] == decoded[1]


def test_moonshine_reads_texts_as_its_checkpoint(moonshine, tmp_path):
    check_tokenizer(write_speech(tmp_path / "a.gguf", moonshine[1], copy.deepcopy(moonshine[0])), moonshine[1])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(whisper, tmp_path_factory):
    """A right file, as bytes."""
    path = tmp_path_factory.mktemp("whole") / "whisper.gguf"
    return write_speech(path, whisper[1], copy.deepcopy(whisper[0])).read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"\7" + bytes(7) + b"whisper", b"\7" + bytes(7) + b"citrine", "'citrine'; .*transcribe.cpp whisper, moon"),
        (b"stt.variant", b"sst.variant", "the architecture 'whisper'; .*the same name without -GGUF"),
        (b"whisper_logmel", b"whisper_logmol", "normalize='whisper_logmol'; allowed: whisper_logmel"),
        (b"enc.final_norm.bias", b"enc.fatal_norm.bias", "has the tensor enc.fatal_norm.bias, which WhisperFor"),
        (b"dec.blocks.1.ffn.fc2.bias", b"dec.blocks.2.ffn.fc2.bias", "decoder.n_layers=2; allowed: 3, as its"),
        (b"whisper.encoder.ffn_dim", b"whisper.encoder.fff_dim", "encoder.ffn_dim=None; allowed: a whole number"),
        (b"ggml.eos_token_id", b"ggml.eas_token_id", "eos_token_id=None; allowed: a whole number"),
        (b"<|endoftext|>", b"<|endoftaxt|>", "the vocabulary of .*whisper.gguf is damaged"),
        (b"stt.whisper.decoder.d_model", b"stt.whisper.decoder.e_model", "decoder.d_model=None; allowed: 64, as its"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused(old, new, told, whole, tmp_path):
    path = tmp_path / "whisper.gguf"
    path.write_bytes(whole.replace(old, new))
    with pytest.raises((CheckpointError, UnsupportedModel), match=told):
        open_weights(resolve(path) / "gguf.json")


@pytest.mark.parametrize("base", ["", "https://huggingface.co/nvidia/parakeet-tdt-0.6b-v3"])
def test_a_refusal_names_the_checkpoint_that_the_file_was_made_of(base, tmp_path):
    """Not who quantized it."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "parakeet")
    writer.add_string("stt.variant", "tdt-0.6b-v3")
    writer.add_string("general.repo_url", "https://huggingface.co/" + ("someone" if base else "nvidia/parakeet"))
    if base:
        writer.add_string("general.base_model.0.repo_url", base)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"'parakeet'.*converted from \(https://huggingface.co/nvidia/parakeet"):
        resolve(tmp_path / "a.gguf")


# -- real weights ------------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(not REAL, reason="TRIOLET_REAL names no folder")


def speech() -> Any:
    """Ten seconds of a book."""
    return load_audio(next((Path(REAL) / "speech").glob("librivox*0870.wav")))[:160_000]


@pytest.mark.real
@real
def test_a_real_whisper_computes_what_transformers_does(tmp_path, open_driver, job):
    folder = Path(REAL) / "whisper-base"
    made = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    path = write_speech(tmp_path / "whisper-base-Q8_0.gguf", folder, made, "Q8_0")
    check_settings(path, folder)
    extractor, driver = transformers.WhisperFeatureExtractor.from_pretrained(folder), open_driver(path, dtype="float32")
    tokens = read_checkpoint(folder).tokens
    ids = {"start": tokens.start_id, "en": tokens.language_ids["en"], "transcribe": tokens.task_ids["transcribe"]}
    samples = np.pad(speech(), (0, 320_000))
    check_tokens(
        driver,
        made,
        lambda one: extractor(one, sampling_rate=16_000, return_tensors="pt").input_features,
        lambda _: samples,
        SimpleNamespace(**ids, no_timestamps=tokens.no_timestamps_id),
        job,
        near=0.05,  # of numbers up to 24
        sure=1e-2,
    )


@pytest.mark.real
@real
def test_a_real_moonshine_computes_what_transformers_does(tmp_path, opens):
    folder = Path(REAL) / "moonshine-base"
    made = transformers.MoonshineForConditionalGeneration.from_pretrained(folder).eval()
    path = write_speech(tmp_path / "moonshine-base-Q8_0.gguf", folder, made, "Q8_0")
    check_tokenizer(path, folder)
    with torch.inference_mode():
        check_speech(opens, path, made, speech(), kind="Q8_0", count=40)
