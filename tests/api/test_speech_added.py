"""Speech models that add audio to their tokens: each text is the one that transformers generates for the model's own
prompt, whoever else asks."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from triolet import CheckpointError, Completion, Engine, EngineConfig, InvalidRequest, UnsupportedModel
from triolet.api.inputs.audio import Samples
from triolet.testing.families import make_checkpoint

from .scarcity import ask_until_preempted, settled

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)
GREEDY: dict[str, Any] = {"temperature": 0.0, "voice_activity": "off"}
STEP, SILENCE, DELAY = 1280, 3, 2  # of the tiny checkpoint: samples of a position, and positions


def heard(seed: int) -> Samples:
    """Up to four seconds of noise that is now loud and now quiet."""
    numbers = np.random.default_rng(seed)
    loud = np.repeat(numbers.uniform(0.0, 2.0, 64) ** 3, 1000)
    return (numbers.normal(0.0, 0.1, 64_000) * loud)[: 64_000 - 4321 * seed].astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("voxtral_realtime", tmp_path_factory.mktemp("realtime"))


@pytest.fixture(scope="module")
def generated(folder: Path) -> Any:
    """What transformers generates of a sound, up to the end of text."""
    module: Any = transformers.VoxtralRealtimeForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
    pads = [tokenizer.convert_tokens_to_ids("[STREAMING_PAD]")] * (SILENCE + DELAY)
    prompt = torch.tensor([[tokenizer.bos_token_id, *pads]])

    @cache
    def generate(seed: int) -> tuple[int, ...]:
        samples = heard(seed)
        padded = np.pad(samples, (SILENCE * STEP, -len(samples) % STEP + (DELAY + 11) * STEP))
        inputs = extractor(padded, sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            found = module.generate(
                input_ids=prompt, **inputs, num_delay_tokens=DELAY, max_new_tokens=999, do_sample=False
            )  # it cuts off by itself after the audio
        tokens = found[0, prompt.shape[1] :].tolist()
        ends = tokenizer.eos_token_id
        return tuple(tokens[: tokens.index(ends)] if ends in tokens else tokens)

    return generate


async def test_each_window_has_the_tokens_of_generate(folder: Path, generated: Any) -> None:
    async with Engine(folder, config=CONFIG) as engine:
        special = set(engine.model.tokenizer.all_special_ids)
        for seed in (0, 1, 5):
            expected = tuple(token for token in generated(seed) if token not in special)
            transcript = await engine.transcribe(heard(seed), **GREEDY)
            assert tuple(token for one in transcript.segments for token in one.token_ids) == expected
            async with engine.stream_transcription(heard(seed), **GREEDY) as stream:
                assert tuple([token async for one in stream for token in one.token_ids]) == expected
            completion = await engine.generate(audio=(heard(seed), 16_000), temperature=0.0)
            assert completion.token_ids == generated(seed)
        assert engine.statistics().encoder_cache.encoded == 3, "all requests of a sound share its encoding"
    assert len(set(generated(1))) > 5, "the audio decides"


async def test_requests_beside_each_other_with_little_room_get_the_tokens_of_generate(
    folder: Path, generated: Any
) -> None:
    """Pages for less than two long sequences, steps shorter than prompts, and room for two encodings."""
    page = 2 * 2 * 2 * 12 * 4 * 4
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        verify=True,
        page_size=4,
        self_kv_bytes=34 * page,
        max_positions=128,
        encoder_cache_bytes=2 * 70 * 48 * 4,
        max_step_tokens=5,
        max_running=6,
    )

    async def ask(engine: Engine, seed: int) -> Completion:
        return await engine.generate(audio=(heard(seed), 16_000), temperature=0.0, priority=seed % 3)

    asks = [seed % 7 for seed in range(16)]
    async with Engine(folder, config=config) as engine:
        await ask_until_preempted(engine, asks, partial(ask, engine), generated, at_once=8)
        books = await settled(engine)
    assert books.requests.preemptions, "pages were never short"
    assert books.requests.tokens_cached, "no prefix was shared"
    assert books.encoder_cache.hits, "no encoding was shared"
    assert books.encoder_cache.held == 0
    assert books.requests.pages_free == books.requests.pages


async def test_what_cannot_be_read_in_step_with_audio_is_refused(folder: Path) -> None:
    sound = (heard(0)[:1000], 16_000)
    async with Engine(folder, config=CONFIG) as engine:
        for query, told in (
            ({"prompt": "[STREAMING_PAD]" * 2, "audio": [sound, sound]}, "2 pieces of audio"),
            (
                {"prompt": "[STREAMING_PAD]" + "a cat " * 9, "audio": sound},
                "allowed: one piece, longer than the prompt",
            ),
            ({"prompt": "a cat"}, "0 pieces of audio"),
            ({"audio": (np.zeros(16_000 * 121, np.float32), 16_000)}, "samples; allowed: 1 to "),
            ({"audio": sound, "max_tokens": 100}, "allowed: up to 11"),
        ):
            with pytest.raises(InvalidRequest, match=told):
                await engine.generate(**query)
        for option in ({"prefix": "a cat"}, {"hotwords": "Anna"}, {"language": "en"}, {"timestamps": "word"}):
            with pytest.raises(InvalidRequest, match=next(iter(option))):
                await engine.transcribe(heard(0), **option)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (None, "has no tekken.json"),
        ({"frame_rate": 0}, "frame_rate=0"),
        ({"frame_rate": 25}, "positions of 640 samples"),
        ({"transcription_delay_ms": 170}, "a multiple of 80"),
        ({"streaming_n_left_pad_tokens": "many"}, "streaming_n_left_pad_tokens='many'"),
    ],
)
async def test_a_wrong_pace_is_refused_at_open(changes: dict[str, Any] | None, told: str, tmp_path: Path) -> None:
    path = make_checkpoint("voxtral_realtime", tmp_path) / "tekken.json"
    audio = json.loads(path.read_text())["audio"]
    path.unlink()
    if changes is not None:
        path.write_text(json.dumps({"audio": {**audio, **changes}}))
    with pytest.raises(CheckpointError, match=told):
        async with Engine(tmp_path, config=CONFIG):
            pass


async def test_a_model_that_reads_codes_of_a_codec_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path)
    names = {"architectures": ["KyutaiSpeechToTextForConditionalGeneration"]}
    transformers.KyutaiSpeechToTextConfig(**names).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="'kyutai_speech_to_text' reads codec_config"):
        async with Engine(tmp_path, config=CONFIG):
            pass
