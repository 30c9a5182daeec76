"""The page for those who come from other engines: its tables are whole and name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

import triolet
from triolet import Engine, demo

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
FASTER_WHISPER = """audio language task log_progress beam_size best_of patience length_penalty repetition_penalty
no_repeat_ngram_size temperature compression_ratio_threshold log_prob_threshold no_speech_threshold
condition_on_previous_text prompt_reset_on_temperature initial_prompt prefix suppress_blank suppress_tokens
without_timestamps max_initial_timestamp word_timestamps prepend_punctuations append_punctuations multilingual
vad_filter vad_parameters max_new_tokens chunk_length clip_timestamps hallucination_silence_threshold batch_size
hotwords language_detection_threshold language_detection_segments"""  # of version 1.2.1, batched or not
OPENAI_WHISPER = """audio verbose temperature compression_ratio_threshold logprob_threshold no_speech_threshold
condition_on_previous_text initial_prompt carry_initial_prompt word_timestamps prepend_punctuations append_punctuations
clip_timestamps hallucination_silence_threshold task language sample_len best_of beam_size patience length_penalty
prompt prefix suppress_tokens suppress_blank without_timestamps max_initial_timestamp fp16"""  # and of DecodingOptions
VALUES = (
    triolet.TranscribeOptions,
    triolet.SamplingParams,
    triolet.EngineConfig,
    triolet.Speculation,
    triolet.Segment,
    triolet.Word,
    triolet.Transcript,
    triolet.Completion,
)


def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def rows(title: str = "") -> list[tuple[str, str]]:
    """The rows of the tables behind ``title``, up to the next heading: theirs, and ours."""
    part = text().partition(f"{title}\n")[2]
    part = re.split(r"^##", part, maxsplit=1, flags=re.MULTILINE)[0] if title else part
    return [pair for pair in re.findall(r"^\| (.+?) \| (.+?) \|$", part, re.MULTILINE) if "---" not in pair[0]]


def names(cell: str) -> set[str]:
    """Names of arguments: `name`, `name=value`, `object.name`; not calls."""
    spans = re.findall(r"`([^`]+)`", cell)
    return {match[1] for span in spans if (match := re.fullmatch(r"(?:\w+\.)?(\w+)(?:=[^()]*)?", span))}


def ours() -> set[str]:
    fields = {field.name for value in VALUES for field in attrs.fields(value)}
    return fields | set(dir(Engine)) | {"audio", "config", "messages"}


async def test_the_language_alone_is_found_as_the_page_says() -> None:
    async with Engine(demo.checkpoint()) as engine:
        said = next(sample.path for sample in demo.samples() if sample.path.stem == "en-command")
        transcript = await engine.transcribe(said, clip_timestamps=[0, 30])
    assert max(transcript.language_probabilities, key=transcript.language_probabilities.get) == "en"


@pytest.mark.parametrize(
    ("title", "theirs"),
    [
        ("### Its arguments of transcribe", FASTER_WHISPER),
        ("### Its arguments of transcribe and of decoding", OPENAI_WHISPER),
    ],
)
def test_every_argument_of_theirs_has_a_row(title: str, theirs: str) -> None:
    told = {name for left, _ in rows(title) for name in names(left)}
    assert set(theirs.split()) - told == set()


def test_what_is_said_to_be_the_same_is_there() -> None:
    told = {name for left, right in rows() if right.startswith("the same") for name in names(left)}
    assert len(told) > 40
    assert told - ours() == set()


def test_what_a_row_names_on_our_side_is_there() -> None:
    """`name=value`, as an argument or a setting."""
    spans = [span for _, right in rows() for span in re.findall(r"`[^`]+`", right)]
    told = {name for span in spans for name in re.findall(r"([a-z]\w*)=", span)}
    assert len(told) > 15
    assert told - ours() == set()
