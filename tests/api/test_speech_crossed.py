"""Transcriptions by encoder-decoders besides Whisper: each window's text is that of transformers' own prompt and
`generate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import field, frozen

import triolet
from triolet import demo
from triolet.api.inputs.audio import load_audio

RATE = 16_000
Folder = Callable[[str], Path]


@frozen(kw_only=True)
class Spoken:
    """How transformers' class ``loader`` is asked, and which of its inputs ``read`` makes of samples."""

    loader: str
    read: Callable[[Path, Any], Any]
    options: dict[str, Any] = field(factory=dict)


def _moonshine(folder: Path, samples: Any) -> Any:
    return transformers.AutoFeatureExtractor.from_pretrained(folder)(samples, sampling_rate=RATE, return_tensors="pt")


def _cohere(folder: Path, samples: Any) -> Any:
    processor = transformers.CohereAsrProcessor.from_pretrained(folder)
    return processor(samples, language="de", punctuation=False, sampling_rate=RATE)


def _canary(folder: Path, samples: Any, **options: str) -> Any:
    processor = transformers.CanaryProcessor.from_pretrained(folder)
    return processor.apply_transcription_request(
        samples, source_language="de", processor_kwargs={"text_kwargs": {"add_special_tokens": False}}, **options
    )


def _moonshine_streaming(folder: Path, samples: Any) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    return transformers.MoonshineStreamingProcessor(extractor, tokenizer)(samples, sampling_rate=RATE)


SPOKEN = {
    "moonshine": Spoken(loader="MoonshineForConditionalGeneration", read=_moonshine),
    "moonshine_streaming": Spoken(loader="MoonshineStreamingForConditionalGeneration", read=_moonshine_streaming),
    "cohere_asr": Spoken(
        loader="CohereAsrForConditionalGeneration", read=_cohere, options={"language": "de", "punctuation": False}
    ),
    "canary": Spoken(loader="CanaryForConditionalGeneration", read=_canary, options={"language": "de"}),
    "canary, in English": Spoken(
        loader="CanaryForConditionalGeneration",
        read=partial(_canary, target_language="en"),
        options={"language": "german", "task": "translate"},
    ),
}


def noise(samples: int) -> Any:
    return (np.random.default_rng(2).standard_normal(samples) * 0.3).astype(np.float32)


@pytest.mark.parametrize("name", SPOKEN)
async def test_each_window_gets_the_text_of_transformers_own_request(name: str, made: Folder) -> None:
    """The last window is so short that it is filled with silence."""
    spoken = SPOKEN[name]
    module = getattr(transformers, spoken.loader).from_pretrained(made(name.partition(",")[0])).eval()
    end, expected = module.generation_config.eos_token_id, []
    config = triolet.EngineConfig(device="cpu", dtype="float32", threads=1, verify=True)
    async with triolet.Engine(made(name.partition(",")[0]), config=config) as engine:
        window = engine.model.speech.facts.window_samples
        audio = noise(2 * window + 3_200)
        transcript = await engine.transcribe(
            audio, voice_activity="off", temperature=0.0, max_new_tokens=12, **spoken.options
        )
    for start in range(0, len(audio), window):
        samples = audio[start : start + window]
        inputs = spoken.read(made(name.partition(",")[0]), np.pad(samples, (0, max(RATE // 4 - len(samples), 0))))
        given = inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
        with torch.inference_mode():
            tokens = module.generate(**inputs, max_new_tokens=12, do_sample=False)[0, given:].tolist()
        expected.append(tuple(tokens[: tokens.index(end)] if end in tokens else tokens))
    assert [segment.token_ids for segment in transcript.segments] == expected
    assert transcript.language == ("de" if spoken.options else None)
    assert len({token for tokens in expected for token in tokens}) > 1, "they prove too little"


async def test_a_prompted_model_refuses_what_it_cannot_do_and_names_what_is_allowed(made: Folder) -> None:
    async with triolet.Engine(made("cohere_asr")) as engine:
        for options, told in (
            ({}, "does not detect it; allowed: de, en"),
            ({"language": "fr"}, "does not know; allowed: de, en"),
            ({"language": "de", "task": "translate"}, "knows only: 'transcribe'"),
            ({"language": "de", "hotwords": "Anna"}, "hotwords='Anna', which CohereAsrForConditionalGeneration cannot"),
            ({"language": "de", "prefix": "<|en|>"}, "prefix='<|en|>' has a special token"),
            ({"language": "de", "timestamps": "word"}, "word"),
        ):
            with pytest.raises(triolet.InvalidRequest) as caught:
                await engine.transcribe(noise(RATE), **options)
            assert told in str(caught.value)


@pytest.mark.parametrize("name", SPOKEN)
async def test_a_live_session_reads_all_that_was_said(name: str, made: Folder) -> None:
    sample = next(one for one in demo.samples() if one.path.stem == "en-command")
    audio = load_audio(sample.path)
    config = triolet.EngineConfig(device="cpu", dtype="float32", threads=1)
    options = {"temperature": 0.0, "max_new_tokens": 6, **SPOKEN[name].options}
    async with triolet.Engine(made(name.partition(",")[0]), config=config) as engine, engine.live(**options) as session:
        await session.feed(audio)
        await session.finish()
        updates = [update async for update in session]
    assert updates[-1].ends_utterance
    assert updates[-1].position > 4.0, "the last word ends there"
    assert updates[-1].language == ("de" if SPOKEN[name].options else None)
