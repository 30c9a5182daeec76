"""Speech models that read audio in their prompts: the prompts are those of transformers' processors, and every answer
is cut into spans."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError
from triolet.core.model import ModelDescription
from triolet.core.speech import Ask, Detection
from triolet.models.blueprints.read import read_blueprint
from triolet.models.speech.known import _models
from triolet.models.speech.names import MODEL_TYPES
from triolet.models.speech.placed import find_manner

from .media import SPEECH, sound

ASKED: dict[str, dict[str, Any]] = {  # what each model takes, as an Ask and for transformers
    "qwen3_asr": {"language": "en", "hotwords": "Anna, Otto", "prompt": "a talk"},
    "glmasr": {},
    "audioflamingo3": {},
    "moss_transcribe_diarize": {"hotwords": "Anna, Otto"},
    "vibevoice_asr": {"hotwords": "Anna, Otto", "prompt": "a talk"},
}
GIVEN: dict[str, dict[str, Any]] = {
    "qwen3_asr": {"language": "English", "prompt": "a talk\nAnna, Otto"},
    "moss_transcribe_diarize": {"keywords": "Anna, Otto"},
    "vibevoice_asr": {"prompt": "a talk\nAnna, Otto"},
}
Described = Callable[[str], ModelDescription]


@pytest.fixture(scope="session")
def described(folder: Callable[[str], Path]) -> Described:
    """``described(name)`` describes the tiny checkpoint of that name. Nobody changes it."""
    made: dict[str, ModelDescription] = {}

    def describe(name: str) -> ModelDescription:
        if name not in made:
            made[name] = (
                read_blueprint(folder(name), EngineConfig(device="cpu", dtype="float32")).sized(0).describe("m")
            )
        return made[name]

    return describe


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", SPEECH)
def test_a_prompt_is_the_one_of_transformers_own_request(
    name: str, asks: bool, described: Described, folder: Callable[[str], Path]
) -> None:
    description, samples = described(name), sound(30_000)
    processor: Any = transformers.AutoProcessor.from_pretrained(folder(name))
    expected = processor.apply_transcription_request(
        samples, return_tensors="pt", **GIVEN.get(name, {}) if asks else {}
    )
    ask = Ask(**({"language": None} | (ASKED[name] if asks else {})))
    model = description.speech
    heard = model.hear(samples)
    draft = model.draft(heard, ask)
    assert draft.token_ids == tuple(expected["input_ids"][0].tolist())
    assert [item.key for item in draft.items] == [heard.item.key], "all requests of a window share its encoding"
    begun = model.draft(heard, evolve(ask, begun=(5, 6), suppress=(7,)))
    assert begun.token_ids == (*draft.token_ids, 5, 6)
    assert begun.rules.suppress == (7,)
    assert begun.max_tokens == 64 + 32 * 30_000 // description.sampling_rate, "nobody says more"


@pytest.mark.parametrize("name", SPEECH)
def test_a_window_is_what_the_model_takes(name: str, described: Described) -> None:
    description = described(name)
    facts = description.speech.facts
    longest = np.zeros(facts.window_samples, np.float32)
    draft = description.speech.draft(description.speech.hear(longest), Ask(language=None))
    assert len(draft.token_ids) <= description.max_positions * 0.7
    assert draft.max_tokens > 100
    assert facts.step_samples * 100 == description.sampling_rate
    assert facts.names_speakers is (name in ("moss_transcribe_diarize", "vibevoice_asr"))
    assert facts.begins is ("prefix" in facts.options) is (name == "glmasr")
    assert facts.detection is (Detection.WRITTEN if name == "qwen3_asr" else Detection.SILENT)


@pytest.mark.parametrize("name", SPEECH)
def test_the_shortest_window_is_filled_with_silence(name: str, described: Described) -> None:
    model = pickle.loads(pickle.dumps(described(name).speech))
    shortest = sound(model.facts.step_samples)
    heard = model.hear(shortest)
    assert heard.samples is shortest
    assert heard.item.embeddings >= 1


def test_a_window_fits_into_the_encoder_cache(folder: Callable[[str], Path]) -> None:
    config = EngineConfig(device="cpu", dtype="float32", encoder_cache_bytes=48 * 4 * 20)  # 20 embeddings
    description = read_blueprint(folder("vibevoice_asr"), config).sized(0).describe("m")
    assert description.speech.facts.window_samples == 20 * 3200


TURNS = {
    "moss_transcribe_diarize": "[0.50][S01]Guten Tag 你好[2.00][2.50][S02]the end[4.25]",
    "vibevoice_asr": '[{"Start":0.5,"End":2.0,"Speaker":1,"Content":"Guten Tag 你好"},'
    '{"Start":2.5,"End":4.25,"Speaker":2,"Content":"the end"}]',
}


@pytest.mark.parametrize("name", TURNS)
def test_turns_become_spans_with_times_speakers_and_their_tokens(name: str, described: Described) -> None:
    model, tokenizer = described(name).speech, described(name).tokenizer
    ids = model.encode(TURNS[name])
    cut = model.cut(ids, Ask(language=None))
    assert [(span.start, span.end, span.text) for span in cut.spans] == [
        (50, 200, " Guten Tag 你好"),
        (250, 425, " the end"),
    ]
    assert [span.speaker[-1] for span in cut.spans] == ["1", "2"]
    for span in cut.spans:
        assert span.token_ids == ids[span.first : span.first + len(span.token_ids)]
        assert span.text.strip() in tokenizer.decode(span.token_ids)
        assert "Guten" not in span.text or "the end" not in tokenizer.decode(span.token_ids)
    assert cut.next_start is None
    assert model.decode(ids) == "Guten Tag 你好 the end"
    (whole,) = model.cut(ids, Ask(language=None, timestamps=False)).spans
    assert (whole.start, whole.end, whole.text) == (0, None, " Guten Tag 你好 the end")


@pytest.mark.parametrize("name", TURNS)
def test_the_next_window_begins_with_a_turn_that_is_unfinished(name: str, described: Described) -> None:
    model = described(name).speech
    cut = model.cut(model.encode(TURNS[name].partition(" end")[0]), Ask(language=None))
    assert [span.text for span in cut.spans] == [" Guten Tag 你好"]
    assert cut.next_start == 250


@pytest.mark.parametrize(
    ("written", "language", "text"),
    [
        ("language English<asr_text>so it is", "en", " so it is"),
        ("language None<asr_text>", None, ""),
        ("language Klingon<asr_text>nuqneH", None, " nuqneH"),
        ("so it is", None, " so it is"),
        ("language Chinese<asr_text>你好", "zh", "你好"),
    ],
)
def test_the_language_stands_before_its_marker(
    written: str, language: str | None, text: str, described: Described
) -> None:
    description = described("qwen3_asr")
    cut = description.speech.cut(description.tokenizer(written)["input_ids"], Ask(language=None))
    assert cut.language == language
    assert [span.text for span in cut.spans] == [text]


def test_a_tokenizer_without_the_marker_is_refused(described: Described) -> None:
    description = described("qwen3_asr")
    with pytest.raises(CheckpointError, match="no token <nothing>, which stands between"):
        evolve(description.speech, manner=evolve(description.speech.manner, marker="<nothing>"))


@pytest.mark.parametrize("name", SPEECH)
@settings(max_examples=settings().max_examples // 4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), timestamps=st.booleans())
def test_any_tokens_are_cut_into_spans_that_rise(
    name: str, data: st.DataObject, timestamps: bool, described: Described
) -> None:
    description = described(name)
    marks = [description.speech.encode(mark) for mark in ("[", "][S01]", "0.5", "1:00", '[{"Content":"', '"}', ",")]
    known = st.integers(0, description.vocabulary_size - 1).map(lambda token: (token,)) | st.sampled_from(marks)
    ids = tuple(token for part in data.draw(st.lists(known, max_size=20)) for token in part)
    cut = description.speech.cut(ids, Ask(language=None, timestamps=timestamps))
    for span in cut.spans:
        assert span.token_ids == ids[span.first : span.first + len(span.token_ids)]
        assert span.end is None or 0 <= span.start < span.end
    for before, after in pairwise(cut.spans):
        assert before.end is not None
        assert before.end <= after.start
    assert cut.next_start is None or cut.next_start > cut.spans[-1].start


def test_commands_know_the_name_of_every_model_that_transcribes() -> None:
    types = transformers.CONFIG_MAPPING.keys()
    assert {"whisper", *_models(), *filter(find_manner, types)} == MODEL_TYPES
