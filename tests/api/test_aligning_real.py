"""Tiny checkpoints of aligners through the whole engine: words and times are those of transformers."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
from attrs import evolve

from triolet import ContextLengthExceeded, Engine, EngineConfig, InvalidRequest, SamplingParams, SyncEngine, Transcript
from triolet.models.networks.ctc_path import best_path

TEXTS = (
    " Turn the heating off, please; it's 22 degrees.",
    "你好，世界 and more.",
    "One",
    " ".join(f"word{number}" for number in range(30)),
)


def sound(seconds: float, seed: int) -> Any:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, round(16_000 * seconds)).astype(np.float32)


def reference(folder: Path, samples: Any, text: str, language: str | None) -> list[tuple[str, float, float]]:
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.Qwen3ASRForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    inputs, words = processor.prepare_forced_aligner_inputs(audio=samples, transcript=text, language=language)
    inputs.pop("num_audio_tokens", None)
    with torch.no_grad():
        logits = model(**inputs).logits
    (found,) = processor.decode_forced_alignment(logits, inputs["input_ids"], words, model.config.timestamp_token_id)
    return [(one["text"], one["start_time"], one["end_time"]) for one in found]


@pytest.fixture(scope="module")
def folder(made: Callable[[str], Path]) -> Path:
    return made("qwen3_aligner")


@pytest.mark.parametrize("native", [True, False])
async def test_words_and_times_are_those_of_transformers_alone_and_together(
    folder: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with shared encoder outputs, and with pages that other texts of the same audio have filled."""
    if not native:
        monkeypatch.setattr("triolet.models.native.library.Library.load", lambda: None)
    asked = [(sound(3.4 + 0.7 * (index % 3), index % 3), text) for index, text in enumerate(TEXTS * 2)]
    config = EngineConfig(dtype="float32", device="cpu", verify=True, max_step_tokens=24, max_running=4)
    found: dict[int, Any] = {}

    async def ask(engine: Engine, index: int) -> None:
        found[index] = await engine.align(*asked[index], "en")

    async with Engine(folder, config=config) as engine:
        async with trio.open_nursery() as nursery:
            for index in range(len(asked)):
                nursery.start_soon(ask, engine, index)
        statistics = engine.statistics()
    assert statistics.encoder_cache.encoded == 3
    assert statistics.requests.tokens_cached > 0
    assert len({word.start for words in found.values() for word in words}) > 3
    for index, (samples, text) in enumerate(asked):
        expected = reference(folder, samples, text, "en")
        words, seconds = found[index], len(samples) / 16_000
        assert "".join(word.text for word in words) == text
        assert [word.text.strip(" .,;，") for word in words] == [one for one, _, _ in expected]
        within = [tuple(min(time, round(seconds, 3)) for time in times) for _, *times in expected]
        assert [(word.start, word.end) for word in words] == within
        assert all(0 < word.probability <= 1 for word in words)


@pytest.mark.real_time
def test_a_transcription_takes_its_words_from_the_engine_of_an_aligner(
    folder: Path, made: Callable[[str], Path]
) -> None:
    """On trio, on asyncio, and in threads."""
    speech, samples = made("qwen3_asr"), sound(4, 3)
    options: dict[str, Any] = {"timestamps": "word", "voice_activity": "off", "max_new_tokens": 24}
    config = EngineConfig(dtype="float32", device="cpu", verify=True)

    async def ask() -> Transcript:
        async with Engine(speech, config=config) as engine, Engine(folder, config=config) as aligner:
            found = await engine.transcribe(samples, aligner=aligner, **options)
            with pytest.raises(InvalidRequest, match=r"Allowed: .* an aligner"):
                await engine.transcribe(samples, **options)
            (whole,) = (await engine.transcribe(samples, **options | {"timestamps": "segment"})).segments
            words = await aligner.align(samples, whole.text)
            assert found.segments == (evolve(whole, words=words, start=words[0].start, end=words[-1].end),)
        return found

    with SyncEngine(speech, config=config) as engine, SyncEngine(folder, config=config) as aligner:
        found = engine.transcribe(samples, aligner=aligner, **options)
    assert found.word_times == "aligner"
    assert not found.warnings
    assert trio.run(ask) == asyncio.run(ask()) == found


async def test_what_it_cannot_do_is_refused_by_name(folder: Path) -> None:
    samples = sound(1, 0)
    async with Engine(folder, config=EngineConfig(dtype="float32", device="cpu")) as engine:
        with pytest.raises(InvalidRequest, match=r"use engine\.align"):
            await engine.generate("hello", sampling=SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequest, match="no vectors"):
            await engine.embed("hello")
        with pytest.raises(InvalidRequest, match=r"language='ar'; allowed: de, en, .*, zh, or None"):
            await engine.align(samples, "hello", "ar")
        with pytest.raises(InvalidRequest, match="nagisa"):
            await engine.align(samples, "こんにちは", "ja")
        with pytest.raises(InvalidRequest, match=r"5\.50 s; allowed: up to 5\.12 s"):
            await engine.align(sound(5.5, 0), "hello")
        with pytest.raises(ContextLengthExceeded, match="positions"):
            await engine.align(samples, "a " * 300)
        assert [word.probability for word in await engine.align(samples, "!?")] == [0.0]


async def test_words_of_japanese_are_those_of_nagisa(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which writes some characters in another way; such a text is refused."""
    nagisa = SimpleNamespace(tagging=lambda text: SimpleNamespace(words=["アイ", "う"]))
    monkeypatch.setitem(sys.modules, "nagisa", nagisa)
    monkeypatch.setattr("transformers.models.qwen3_asr.processing_qwen3_asr.is_nagisa_available", lambda: True)
    async with Engine(folder, config=EngineConfig(dtype="float32", device="cpu")) as engine:
        assert [word.text for word in await engine.align(sound(1, 0), "アイ、う。", "ja")] == ["アイ、", "う。"]
        with pytest.raises(InvalidRequest, match="allowed: a text in the form NFKC"):
            await engine.align(sound(1, 0), "ｱｲう", "ja")


# -- CTC -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ctc(made: Callable[[str], Path]) -> Path:
    return made("parakeet_ctc")


def likeliest(folder: Path, samples: Any, words: list[str]) -> list[tuple[float, float]]:
    """The times of words on the likeliest path through what transformers' model computes."""
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.ParakeetForCTC.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        inputs = processor([samples], sampling_rate=16_000)
        logits = model(**inputs).logits[0, : int(model._get_output_attention_mask(inputs["attention_mask"]).sum())]
    tokens = [processor.tokenizer(word, add_special_tokens=False)["input_ids"] for word in words]
    path = best_path(logits.log_softmax(-1).numpy(), list(itertools.chain(*tokens)), model.config.pad_token_id)
    stops = list(itertools.accumulate(map(len, tokens)))
    places = [(path.frames[first], path.ends[stop - 1]) for first, stop in itertools.pairwise([0, *stops])]
    return [(round(0.08 * start, 3), round(min(0.08 * end, len(samples) / 16_000), 3)) for start, end in places]


async def test_words_of_a_ctc_model_have_the_times_of_the_likeliest_path(ctc: Path) -> None:
    """In chunks and together; marks are left out, and belong to the words beside them. The tokens are those of the
    whole text: a word begins with its blank."""
    asked = [(sound(4, 0), " Turn it off, now!"), (sound(2, 1), "aab bb"), (sound(4, 0), "你好 ok")] * 2
    spoken = [["Turn", " it", " off", " now"], ["aab", " bb"], ["你", "好", " ok"]] * 2
    found: dict[int, Any] = {}

    async def ask(engine: Engine, index: int) -> None:
        found[index] = await engine.align(*asked[index])

    config = EngineConfig(dtype="float32", device="cpu", verify=True, max_step_tokens=8, max_running=4)
    async with Engine(ctc, config=config) as engine:
        async with trio.open_nursery() as nursery:
            for index in range(len(asked)):
                nursery.start_soon(ask, engine, index)
        assert engine.statistics().encoder_cache.encoded == 2
        with pytest.raises(InvalidRequest, match=r"25 tokens, which take 49 frames or more; allowed: up to 25"):
            await engine.align(sound(2, 0), "a" * 25)
    for index, (samples, text) in enumerate(asked):
        assert "".join(word.text for word in found[index]) == text
        assert [(word.start, word.end) for word in found[index]] == likeliest(ctc, samples, spoken[index])
        assert all(0 < word.probability < 1 for word in found[index])


async def test_a_letter_that_the_vocabulary_lacks_is_written_small_or_left_out(ctc: Path, tmp_path: Path) -> None:
    """A tokenizer of small letters alone; a number lies between its neighbours."""
    shutil.copytree(ctc, tmp_path, dirs_exist_ok=True)
    letters = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz'")}
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    added = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    tokenizer["model"] = {"type": "WordLevel", "vocab": {**letters, **added}, "unk_token": "<unk>"}
    tokenizer["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    tokenizer |= {"decoder": {"type": "Fuse"}, "post_processor": None, "normalizer": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with Engine(tmp_path, config=EngineConfig(dtype="float32", device="cpu")) as engine:
        upper = await engine.align(sound(4, 0), "It’S 42 ÉONS")
        lower = await engine.align(sound(4, 0), "it's ons")
    first, number, last = upper
    assert [(one.start, one.end, one.probability) for one in (first, last)] == [
        (one.start, one.end, one.probability) for one in lower
    ]
    assert (number.start, number.end, number.probability) == (first.end, last.start, 0.0)
