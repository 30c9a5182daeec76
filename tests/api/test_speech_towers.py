"""Speech models whose processors need further packages, through `Engine.transcribe`: each text is the one that
transformers generates for the model's own request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from triolet import Engine, EngineConfig, InvalidRequest

from ..checkpoints.families import make_checkpoint
from ..models.media import Checkpoint, sound
from ..models.towers import REQUESTS, TOWERS

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)
TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": TOKENS, "voice_activity": "off"}
NAMES = {"prompt": "initial_prompt"}  # of an option, where it has another name than in `Ask`


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``made(name)`` gives the folder of a tiny checkpoint. Nobody changes it."""
    return cache(lambda name: make_checkpoint(name, tmp_path_factory.mktemp(name)))


def generated(checkpoint: Checkpoint, prompt: str, samples: Any) -> tuple[int, ...]:
    """What transformers generates, up to the end of text, without special tokens."""
    inputs = checkpoint.process(prompt, [samples])
    with torch.inference_mode():
        found = checkpoint.reference.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    tokens = found[0, inputs["input_ids"].shape[1] :].tolist()
    ends = checkpoint.tokenizer.eos_token_id
    tokens = tokens[: tokens.index(ends)] if ends in tokens else tokens
    special = checkpoint.tokenizer.added_tokens_decoder
    return tuple(token for token in tokens if token not in special)


@pytest.mark.parametrize("name", TOWERS)
async def test_each_request_has_the_tokens_of_generate(name: str, made: Callable[[str], Path]) -> None:
    checkpoint, samples = Checkpoint.open(name, made(name)), sound(60_000, 1)
    async with Engine(made(name), config=CONFIG) as engine:
        for asked, prompt in REQUESTS[name]:
            options = {**GREEDY, **{NAMES.get(option, option): value for option, value in asked.items()}}
            transcript = await engine.transcribe(samples, **options)
            tokens = tuple(token for segment in transcript.segments for token in segment.token_ids)
            assert tokens == generated(checkpoint, prompt, samples), asked
            assert transcript.duration == 3.75
            async with engine.stream_transcription(samples, **options) as stream:
                assert tuple([token async for segment in stream for token in segment.token_ids]) == tokens
        assert engine.statistics().encoder_cache.encoded == 1, "all requests share the encoding"


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("voxtral", {"language": "fi"}, "language='fi'.*allowed: .*nl"),
        ("voxtral", {"hotwords": ["Anna"]}, "hotwords"),
        ("voxtral", {"task": "translate"}, "task='translate'"),
        ("granite_speech_plus", {"task": "translate"}, "task='translate'"),
        ("granite_speech", {"language": "en"}, "language='en'"),
        ("phi4_multimodal", {"language": "en"}, "language='en'"),
        ("fun_asr_nano", {"timestamps": "word"}, "timestamps='word'"),
    ],
)
async def test_what_a_model_does_not_document_is_refused_by_name(
    name: str, options: dict[str, Any], told: str, made: Callable[[str], Path]
) -> None:
    async with Engine(made(name), config=CONFIG) as engine:
        with pytest.raises(InvalidRequest, match=told):
            await engine.transcribe(sound(9000), **options)
