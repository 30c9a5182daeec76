"""The page for those who come from other engines is true: its code runs, its tables are whole and name what exists."""

from __future__ import annotations

import ast
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from PIL import Image

import triolet
from triolet import Engine, demo
from triolet.testing import make_checkpoint

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
SPEECH = "openai/whisper-small"
MODELS = {  # small checkpoints in their places; the demo checkpoint in that of SPEECH
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl",
    "cardiffnlp/twitter-roberta-base-sentiment-latest": "bert_classifier",
}
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


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page names lies in the current folder."""
    monkeypatch.chdir(tmp_path)
    said = next(sample.path for sample in demo.samples() if sample.path.stem == "en-command")
    for name in ("talk.mp3", "another.wav"):  # the format is found in the file, not in its name
        shutil.copy(said, name)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)).save("cat.png")


def collect(printed: list[object], *values: object, **_: object) -> None:
    """In the place of ``print``."""
    printed.extend(values)


async def test_every_piece_of_code_runs_and_prints_something(tmp_path: Path) -> None:
    """In order, since later ones use what earlier ones import."""
    folders = {name: make_checkpoint(family, tmp_path / family) for name, family in MODELS.items()}
    folders[SPEECH] = demo.checkpoint()
    printed: list[object] = []
    found: dict[str, Any] = {"print": partial(collect, printed)}
    pieces = re.findall(r"^```python\n(.*?)^```", text(), re.MULTILINE | re.DOTALL)
    pieces = [code for code in pieces if "127.0.0.1" not in code]  # tests/server/test_docs_migration.py
    assert len(pieces) == 11
    for code in pieces:
        printed.clear()
        for name, folder in folders.items():
            code = code.replace(f'"{name}"', repr(str(folder)))  # noqa: PLW2901
        await eval(compile(code, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), found)
        assert printed, code


async def test_the_language_alone_is_found_as_the_page_says() -> None:
    async with Engine(demo.checkpoint()) as engine:
        transcript = await engine.transcribe("talk.mp3", clip_timestamps=[0, 30])
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
