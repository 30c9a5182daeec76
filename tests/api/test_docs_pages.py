"""The pages are true: their code runs, prints or logs what they say, and what they name is there."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import re
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import soundfile
from PIL import Image

import triolet
from triolet import Engine, EngineConfig, Engines, SamplingParams, SyncEngine, demo
from triolet.core import events
from triolet.core.event_lines import read_events
from triolet.core.request import STRUCTURES

from ..checkpoints.families import make_checkpoint

DOCS = Path(__file__).resolve().parents[2] / "docs"
DEMO = "demo"
ENGINES = {  # the engines that the first piece of a page names, and the small checkpoints in their places
    "text": {"engine": "qwen3"},
    "vision": {"engine": "qwen2_vl"},
    "audio-language": {"engine": "qwen2_audio"},
    "encoder-decoders": {"writer": "bart", "listener": "moonshine", "prompted": "cohere_asr"},
    "pooling": {"engine": "bert", "reranker": "bert_reranker", "classifier": "bert_classifier"},
    "sampling": {"engine": DEMO},
    "word_times": {"engine": "qwen3_asr", "aligner": "qwen3_aligner"},
    "several_models": {},
    "observability": {},
}
PAGES = (*ENGINES, "without_a_loop", "features", "migration")
PIECE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
MODELS = {  # real models that programs open, and the small checkpoints in their places
    "Qwen/Qwen3-0.6B": "qwen3",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "qwen3",
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl",
    "BAAI/bge-small-en-v1.5": "bert",
    "cardiffnlp/twitter-roberta-base-sentiment-latest": "bert_classifier",
    "openai/whisper-small": DEMO,
}


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def pieces(page: str) -> list[tuple[str, str]]:
    """Code, and what it prints or logs. Code that asks a server runs in tests/server/test_docs_migration.py."""
    return [(code, said) for code, said in PIECE.findall(text_of(page)) if "127.0.0.1" not in code]


def made(family: str, folder: Path) -> Path:
    return demo.checkpoint() if family == DEMO else make_checkpoint(family, folder / family)


def with_models(code: str, folder: Path) -> str:
    for name, family in MODELS.items():
        if f'"{name}"' in code:
            code = code.replace(f'"{name}"', repr(str(made(family, folder))))
    return code


async def run(code: str, page: str, names: dict[str, Any]) -> None:
    running = eval(compile(code, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(running):
        await running


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pages name lies in the current folder."""
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0)
    for name in ("cat", "dog", "bird"):
        Image.fromarray(noise.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(f"{name}.png")
        soundfile.write(f"{name}.wav", noise.normal(0, 0.1, 8000), 16_000)
    for name in ("talk.mp3", "another.wav"):  # the format is found in the file, not in its name
        shutil.copy(next(one.path for one in demo.samples() if one.path.stem == "en-command"), name)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was printed since the last call, or else logged by engines: other lines depend on what ran before."""
    caplog.set_level(logging.INFO, logger="triolet")
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)  # pytest's handlers are the ones that listen

    def take() -> tuple[str, str]:
        records = [record for record in caplog.records if record.name.startswith("triolet.engine")]
        logged = "".join(f"{record.levelname} {record.name}: {record.getMessage()}\n" for record in records)
        caplog.clear()
        return capsys.readouterr().out, logged

    return take


def assert_said(said: tuple[str, str], expected: str) -> None:
    """Line by line; ``...`` stands for what differs from run to run."""
    printed, logged = said
    text = printed or (logged if expected else "")
    assert re.fullmatch(re.escape(expected).replace(r"\.\.\.", ".*"), text), f"{text}\n-- is not --\n{expected}"


# -- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_no_piece_of_code_is_overlooked(page: str) -> None:
    assert len(PIECE.findall(text_of(page))) == text_of(page).count("```python") >= len(pieces(page)) > 3


@pytest.mark.parametrize("page", ENGINES)
async def test_every_piece_of_code_says_what_the_page_says(page: str, said: Any, tmp_path: Path) -> None:
    (setup, _), *others = pieces(page)
    names: dict[str, Any] = {}
    await run(setup, page, names)
    config = EngineConfig(device="cpu", dtype="float32", threads=1, verify=True)
    async with AsyncExitStack() as stack:
        for name, family in ENGINES[page].items():
            assert isinstance(names[name], Engine)  # of a real model, which is not opened here
            names[name] = await stack.enter_async_context(Engine(made(family, tmp_path), config=config))
        if page == "several_models":
            await stack.enter_async_context(names["engines"])
        said()
        for code, expected in others:
            await run(code, page, names)
            assert_said(said(), expected)
    if page == "observability":
        with (tmp_path / "events.jsonl").open() as log:
            assert any(isinstance(event, events.RequestEnded) for event in read_events(log))


def test_every_piece_of_code_without_a_loop_prints_what_the_page_says(said: Any) -> None:
    names: dict[str, Any] = {}
    for code, expected in pieces("without_a_loop"):
        exec(compile(code, "without_a_loop.md", "exec"), names)
        assert_said(said(), expected)


@pytest.mark.parametrize("page", ["features", "migration"])
async def test_every_piece_of_code_runs_on_the_models_that_it_names(page: str, said: Any, tmp_path: Path) -> None:
    """Each prints something; what, depends on the model. Later ones use what earlier ones import."""
    names: dict[str, Any] = {"Engine": Engine, "Engines": Engines}
    for code, _ in pieces(page):
        await run(with_models(code, tmp_path), page, names)
        assert said()[0].strip(), code


@pytest.mark.parametrize(("code", "expected"), pieces("quick_start"))
def test_a_program_of_the_quick_start_prints_what_the_page_says(
    code: str, expected: str, said: Any, tmp_path: Path
) -> None:
    """What a real model answers the page does not say."""
    exec(compile(with_models(code, tmp_path), "quick_start.md", "exec"), {})
    printed, _ = said()
    assert printed == expected if expected else printed.strip()


def test_on_asyncio_nothing_changes_but_the_last_line(said: Any) -> None:
    code, expected = pieces("quick_start")[0]
    assert code.endswith("\ntrio.run(main)\n")
    exec(compile(code.replace("trio.run(main)", "asyncio.run(main())"), "page", "exec"), {"asyncio": asyncio})
    assert_said(said(), expected)


async def test_the_simulated_engines_of_the_page_work(autojump_clock: object) -> None:
    *_, (code, _) = pieces("several_models")
    names: dict[str, Any] = {"Engines": Engines}
    await run("from triolet import ModelSpec\n" + code, "several_models.md", names)
    async with names["simulated"] as engines:
        for name in engines.models:
            async with engines.use(name):
                pass
        assert sum(found.bytes for found in engines.statistics().values()) > 0


# -- names -----------------------------------------------------------------------------------------------------------

EVENTS = [
    name
    for name, value in vars(events).items()
    if isinstance(value, type) and issubclass(value, events.Event) and not value.__subclasses__()
]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("quick_start", ("transcribe", "stream_transcription", "stream", "embed", "open_nursery", "TrioletError")),
        ("sampling", [*(field.name for field in attrs.fields(SamplingParams)), *STRUCTURES]),
        ("observability", EVENTS),
        ("without_a_loop", {name for name in dir(SyncEngine) if not name.startswith("_")} - {"from_parts"}),
    ],
)
def test_a_page_names_all_that_it_is_about(page: str, names: Any) -> None:
    assert names
    assert [name for name in names if not re.search(rf"\b{name}\b", text_of(page))] == []


@pytest.mark.parametrize("page", ["text", "vision", "audio-language", "encoder-decoders", "pooling"])
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    text = text_of(page)
    table = text.partition("\n## Settings\n")[2].partition("\n## ")[0]
    settings = {
        name for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", table, re.MULTILINE) for name in row.split(", ")
    }
    assert settings <= {f"`{name}`" for name in ("EngineConfig", *EngineConfig.__annotations__)}
    assert settings or page == "audio-language"  # which points to the table of images


# -- the page for those who come from other engines --------------------------------------------------------------------

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


def rows(title: str = "") -> list[tuple[str, str]]:
    """The rows of the tables behind ``title``, up to the next heading: theirs, and ours."""
    part = text_of("migration").partition(f"{title}\n")[2]
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
