"""``triolet generate`` and ``triolet embed``: what is asked, what is written where, and the exit status."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
from PIL import Image

import triolet
from triolet import demo
from triolet.api.command_line.generate import Generation
from triolet.api.command_line.main import main
from triolet.api.outputs.results import Delta, Usage
from triolet.core.config import EngineConfig, Speculation
from triolet.core.errors import CheckpointError, InvalidRequest, PoisonRequest, RequestTooLarge, TrioletError
from triolet.core.request import FinishReason, SamplingParams
from triolet.testing.families import make_checkpoint

SECONDS = 60
CPU = ("--device", "cpu")


class PaperPreparer:
    """Of a model with a chat template that reads ``media``."""

    def __init__(self, media: set[str], *, converses: bool = True) -> None:
        self.media = frozenset(media)
        self.converses = converses

    def with_items(self, prompt: str, count: int) -> str:
        return "<item>" * count + prompt


class PaperEngine:
    """Says ``pieces``; an error among them is raised. ``None`` presses ^C."""

    def __init__(
        self,
        *pieces: str | TrioletError | None,
        media: Sequence[str] = (),
        converses: bool = True,
        opening: TrioletError | None = None,
    ) -> None:
        self.pieces = pieces
        self.opening = opening
        self.model = SimpleNamespace(name="paper", preparer=PaperPreparer(set(media), converses=converses))
        self.configs: list[tuple[str, EngineConfig]] = []
        self.asked: dict[str, Any] = {}
        self.embedded: list[tuple[str, ...]] = []
        self.given = 0
        self.closed = False

    def __call__(self, model: str, config: EngineConfig) -> PaperEngine:
        self.configs.append((model, config))
        return self

    async def __aenter__(self) -> PaperEngine:
        if self.opening:
            raise self.opening
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed = True

    @asynccontextmanager
    async def stream(self, **asked: Any) -> AsyncIterator[AsyncIterator[Delta]]:
        self.asked = asked
        async with aclosing(self._deltas()) as deltas:
            yield deltas

    async def _deltas(self) -> AsyncIterator[Delta]:
        for piece in self.pieces:
            await trio.lowlevel.checkpoint()
            if piece is None:
                signal.raise_signal(signal.SIGINT)
                await trio.sleep_forever()
            elif isinstance(piece, TrioletError):
                raise piece
            else:
                self.given += 1
                yield Delta(text=piece, token_ids=(self.given,))
        usage = Usage(prompt_tokens=3, completion_tokens=self.given)
        yield Delta(text="", token_ids=(), finish_reason=FinishReason.STOP, usage=usage)

    async def embed(self, texts: Sequence[str], *, pooling: str | None, normalize: bool | None) -> Any:
        await trio.lowlevel.checkpoint()
        self.embedded.append(tuple(texts))
        self.asked = {"pooling": pooling, "normalize": normalize}
        return np.array([[len(text), 0.1] for text in texts], np.float32)


def run(arguments: Sequence[str], engine: PaperEngine | None = None) -> int:
    """The exit status."""
    with pytest.raises(SystemExit) as caught:
        main(arguments, engine)
    status = caught.value.code
    assert isinstance(status, int)
    return status


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""

    def typed(data: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(data)
        file = path.open()
        monkeypatch.setattr(sys, "stdin", file)
        files.append(file)

    files: list[Any] = []
    yield typed
    for file in files:
        file.close()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGB", (40, 60), (200, 30, 30)).save(path)
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "hum.wav"
    soundfile.write(path, 0.3 * np.sin(np.arange(8000) / 10), 16_000)
    return path


# -- what is written -------------------------------------------------------------------------------------------------


def test_the_text_is_written_alone_and_ends_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Ready for a pipe: no progress, no statistics."""
    engine = PaperEngine("Once", " upon", "", " a time")
    assert run(["generate", "model", "hi"], engine) == 0
    assert capsys.readouterr() == ("Once upon a time\n", "")
    assert engine.closed


def test_a_text_that_ends_its_line_gets_no_second_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "model", "hi"], PaperEngine("two\n", "lines\n")) == 0
    assert capsys.readouterr().out == "two\nlines\n"


async def test_each_piece_is_written_as_it_comes() -> None:
    """And flushed: whoever reads the pipe need not wait for the end."""
    seen: list[str] = []

    class Out(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    engine = PaperEngine("a", "b", "c")
    assert await Generation(prompt="hi").run(lambda: engine("model", EngineConfig()), Out()) == 0
    assert seen == ["a", "ab", "abc", "abc\n"]


async def test_a_terminal_is_shown_control_characters_and_does_not_obey_them() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, expected in ((Terminal(), "a\\x1b[2Jb\tc\n"), (io.StringIO(), "a\x1b[2Jb\tc\n")):
        engine = PaperEngine("a\x1b[2J", "b\tc")
        await Generation(prompt="hi").run(lambda engine=engine: engine("model", EngineConfig()), out)
        assert out.getvalue() == expected


def test_json_is_one_object_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "model", "hi", "--json"], PaperEngine("gr", "ün")) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "grün",
        "tokens": [1, 2],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "seed": None},
    }


def test_a_fault_in_the_middle_keeps_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, status 1, the engine closes."""
    engine = PaperEngine("half a ", PoisonRequest("it crashed\nits step"))
    assert run(["generate", "model", "hi"], engine) == 1
    assert capsys.readouterr() == ("half a ", "triolet: it crashed its step\n")
    assert engine.closed


def test_interrupting_closes_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """^C: status 130, what was written stays, no traceback."""
    engine = PaperEngine("half a ", None)
    assert run(["generate", "model", "hi"], engine) == 130
    assert capsys.readouterr() == ("half a ", "")
    assert engine.closed


async def test_a_line_that_is_broken_off_is_ended_on_a_terminal() -> None:
    """Or the shell's prompt would stand behind it."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    engine = PaperEngine("half a ", PoisonRequest("it crashed"))
    assert await Generation(prompt="hi").run(lambda: engine("model", EngineConfig()), out) == 1
    assert out.getvalue() == "half a \n"


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_reader_that_goes_away_ends_the_work(as_json: bool) -> None:
    """The request is withdrawn, the engine closes, the status is that of SIGPIPE."""

    class Pipe(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    engine = PaperEngine(*"many pieces")
    job = Generation(prompt="hi", as_json=as_json)
    assert await job.run(lambda: engine("model", EngineConfig()), Pipe()) == 141
    assert engine.closed
    assert engine.given == (11 if as_json else 1)


async def test_output_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    engine = PaperEngine(*"many pieces")
    assert await Generation(prompt="hi").run(lambda: engine("model", EngineConfig()), Full()) == 1
    assert engine.closed
    assert capsys.readouterr().err == "triolet: the output cannot be written: [Errno 28] No space left on device\n"


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_options_reach_the_engine() -> None:
    engine = PaperEngine("a")
    words = (
        "generate some/model hi --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --stop END "
        "--stop . --device cpu --dtype bfloat16 --threads 2 --speculate 6"
    )
    assert run(words.split(), engine) == 0
    config = EngineConfig(device="cpu", dtype="bfloat16", threads=2, max_running=1, speculation=Speculation(tokens=6))
    assert engine.configs == [("some/model", config)]
    assert engine.asked["sampling"] == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=3, stop=("END", ".")
    )


@pytest.mark.parametrize(("words", "speculation"), [("", "auto"), ("--speculate 0", None)])
def test_draft_tokens_are_proposed_unless_none_are_wanted(words: str, speculation: str | None) -> None:
    engine = PaperEngine("a")
    assert run(["generate", "model", "hi", *words.split()], engine) == 0
    ((_, config),) = engine.configs
    assert config.speculation == speculation


def test_a_model_of_text_is_asked_in_texts() -> None:
    """Its chat template knows no parts."""
    engine = PaperEngine("a")
    assert run(["generate", "model", "hi", "--system", "be brief"], engine) == 0
    assert engine.asked["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_model_of_images_is_asked_in_parts_with_the_images_first(picture: Path) -> None:
    engine = PaperEngine("a", media=["image"])
    words = ["generate", "model", "hi", "--image", str(picture), "--image", str(picture), "--system", "be brief"]
    assert run(words, engine) == 0
    system, user = engine.asked["messages"]
    assert system == {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    assert [part["type"] for part in user["content"]] == ["image", "image", "text"]
    assert user["content"][0]["image"].size == (40, 60)
    assert user["content"][2]["text"] == "hi"


def test_audio_alone_is_a_question(sound: Path, typed: Callable[[bytes], None]) -> None:
    """A voice may ask by itself: the prompt may be empty."""
    typed(b"")
    engine = PaperEngine("a", media=["audio"])
    assert run(["generate", "model", "--audio", str(sound)], engine) == 0
    assert engine.asked["messages"] == [{"role": "user", "content": [{"type": "audio", "audio": str(sound)}]}]


@pytest.mark.parametrize(("words", "converses"), [(["--raw"], True), ([], False)])
def test_raw_or_without_a_template_the_prompt_goes_as_it_is(words: list[str], converses: bool, picture: Path) -> None:
    """Images go in front where it has no placeholder for them."""
    engine = PaperEngine("a", media=["image"], converses=converses)
    assert run(["generate", "model", "hi", "--image", str(picture), *words], engine) == 0
    assert engine.asked["prompt"] == "<item>hi"
    assert len(engine.asked["images"]) == 1
    assert "messages" not in engine.asked


@pytest.mark.parametrize("words", [[], ["-"]])
def test_the_prompt_may_come_from_standard_input(words: list[str], typed: Callable[[bytes], None]) -> None:
    """Without the end of its last line, which echo puts there."""
    typed("zwei\nZeilen grün\n".encode())
    engine = PaperEngine("a")
    assert run(["generate", "model", *words, "--raw"], engine) == 0
    assert engine.asked["prompt"] == "zwei\nZeilen grün"


def test_a_schema_becomes_a_structure(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"enum": ["kitchen", "hall"]}')
    engine = PaperEngine("a")
    assert run(["generate", "model", "hi", "--json-schema", str(path)], engine) == 0
    structure = engine.asked["sampling"].structure
    assert (structure.kind, json.loads(structure.text)) == ("json_schema", {"enum": ["kitchen", "hall"]})


# -- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate", "Missing argument 'MODEL'"),
        ("generate m hi --temperature -1", "temperature=-1.0; allowed: a number, 0 or more"),
        ("generate m hi --max-tokens 0", "max_tokens=0; allowed: an integer, 1 to"),
        ("generate m hi --top-p 2", "top_p=2.0; allowed: a number, more than 0, up to 1"),
        ("generate m hi --speculate -1", "Speculation.tokens=-1; allowed: an integer, 1 to 64"),
        ("generate m hi --dtype int4", "'int4' is not one of"),
        ("generate m hi --threads -1", "threads=-1; allowed:"),
        ("generate m hi --raw --system x", "--system with --raw; write it into the prompt"),
        ("embed m hi --pooling sum", "'sum' is not one of 'mean', 'cls', 'last'"),
        ("embed m hi --threads -1", "threads=-1; allowed:"),
    ],
)
def test_wrong_usage_has_status_2(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any model is loaded."""
    engine = PaperEngine()
    assert run(words.split(), engine) == 2
    assert told in capsys.readouterr().err
    assert not engine.configs


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hi", "--image", "absent.png"], "absent.png: no such file; check the spelling and the folder"),
        (["hi", "--audio", "absent.wav"], "absent.wav: no such file; check the spelling and the folder"),
        (["hi", "--image", "https://a.b/c.png"], "https://a.b/c.png: no such file; addresses are not fetched"),
        (["hi", "--image", ""], "'': an empty file name; look at the quotes"),
        (["hi", "--image", "."], ".: it is a folder; give the files in it"),
        (["hi", "--image", __file__], "is not an image that can be read (no format that is known); allowed: PNG,"),
        (["hi", "--json-schema", "absent.json"], "absent.json: no such file"),
        (["hi", "--json-schema", __file__], "it is no JSON (Extra data"),
        (["hi", "--json-schema", os.devnull], "it is no JSON (Expecting value"),
    ],
)
def test_a_wrong_file_is_one_line_and_status_1(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As `transcribe` has it. Told before any model is loaded."""
    assert_one_line_and_status(1, words, told, capsys)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([""], "the prompt is empty; write one, or give --image or --audio"),
        (["\udcff"], "PROMPT is no UTF-8 text (character 0); convert it first"),
        (["hi", "--system", "\udcff"], "--system is no UTF-8 text"),
    ],
)
def test_a_wrong_input_is_one_line_and_status_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told before any model is loaded."""
    assert_one_line_and_status(2, words, told, capsys)


def assert_one_line_and_status(status: int, words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = PaperEngine()
    assert run(["generate", "model", *words], engine) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("triolet: ")
    assert told in err
    assert not engine.configs


def test_a_schema_that_cannot_be_followed_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schema.json"
    path.write_text('{"type": "poem"}')
    assert run(["generate", "model", "hi", "--json-schema", str(path)], PaperEngine()) == 1
    assert capsys.readouterr().err.startswith(f"triolet: {path}: ")


@pytest.mark.parametrize(
    ("command", "data", "status", "told"),
    [
        ("generate", b"\n", 2, "the prompt is empty"),
        (
            "generate",
            b"ab\xff",
            1,
            "standard input: byte 2 is no UTF-8 text; images and audio are given with --image and",
        ),
        ("embed", b"\n \n", 2, "standard input has no text; one a line is wanted"),
    ],
)
def test_standard_input_without_a_text_is_one_line(
    command: str,
    data: bytes,
    status: int,
    told: str,
    typed: Callable[[bytes], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed(data)
    engine = PaperEngine()
    assert run([command, "model"], engine) == status
    assert capsys.readouterr().err.startswith(f"triolet: {told}")
    assert not engine.configs


@pytest.mark.parametrize("command", ["generate", "embed"])
def test_without_a_prompt_a_terminal_is_not_waited_for(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would look like a model that takes long."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run([command, "model"], PaperEngine()) == 2
    assert "give" in capsys.readouterr().err


def test_standard_input_that_is_closed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["generate", "model"], PaperEngine()) == 1
    assert capsys.readouterr().err.startswith("triolet: standard input: it is closed; pipe a prompt in")


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (PaperEngine(opening=CheckpointError("no checkpoint there")), "no checkpoint there"),
        (PaperEngine(opening=InvalidRequest("no such device")), "no such device"),
        (PaperEngine(RequestTooLarge("too long a prompt")), "too long a prompt"),
        (PaperEngine("a", converses=False), "--system, but paper has no chat template; write it into the prompt"),
    ],
)
def test_what_the_engine_refuses_is_one_line(
    engine: PaperEngine, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "model", "hi", "--system", "be brief"], engine) == 1
    assert capsys.readouterr() == ("", f"triolet: {told}\n")


# -- embed -----------------------------------------------------------------------------------------------------------


def test_each_text_becomes_a_line_with_its_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers have the digits of float32, no more."""
    engine = PaperEngine()
    assert run(["embed", "model", "grün", "b", "--pooling", "cls", "--no-normalize"], engine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"text": "grün", "embedding": [4.0, 0.1]},
        {"text": "b", "embedding": [1.0, 0.1]},
    ]
    assert engine.asked == {"pooling": "cls", "normalize": False}


def test_lines_of_standard_input_are_texts(typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Empty ones are passed over; many go together, and their lines come before the rest is computed."""
    typed(b"".join(b"line %d\n\n" % number for number in range(300)))
    engine = PaperEngine()
    assert run(["embed", "model"], engine) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts == [f"line {number}" for number in range(300)]
    assert [len(part) for part in engine.embedded] == [256, 44]


# -- the engine itself -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a family's checkpoint. All are made at once, since transformers shows its progress."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for family in ("llama", "qwen2_vl", "llava", "idefics3", "qwen2_audio", "bert"):
        make_checkpoint(family, folder / family)
    return lambda family: str(folder / family)


async def completion(folder: str, **asked: Any) -> triolet.Completion:
    async with triolet.Engine(folder, config=EngineConfig(device="cpu")) as engine:
        return await engine.generate(**asked, sampling=SamplingParams(max_tokens=8))


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "llava", "idefics3"])
def test_a_conversation_has_the_tokens_that_the_engine_gives(
    family: str, checkpoint: Callable[[str], str], picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the chat template, with an image where the model reads any. Nothing on standard error."""
    folder = checkpoint(family)
    media = [] if family == "llama" else ["--image", str(picture)]
    assert run(["generate", folder, "what is it?", *media, "--max-tokens", "8", *CPU, "--json"]) == 0
    out, err = capsys.readouterr()
    parts = [{"type": "image", "image": str(picture)}, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": parts if media else "what is it?"}]
    expected = trio.run(lambda: completion(folder, messages=messages))
    assert json.loads(out)["tokens"] == list(expected.token_ids)
    assert json.loads(out)["text"] == expected.text
    assert err == ""


def test_audio_is_asked_about(
    checkpoint: Callable[[str], str], sound: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("qwen2_audio")
    assert (
        run(["generate", folder, "what is it?", "--raw", "--audio", str(sound), "--max-tokens", "8", *CPU, "--json"])
        == 0
    )
    prompt = "<|audio_bos|><|AUDIO|><|audio_eos|>what is it?"
    expected = trio.run(lambda: completion(folder, prompt=prompt, audio=[str(sound)]))
    assert json.loads(capsys.readouterr().out)["tokens"] == list(expected.token_ids)


def test_whisper_is_asked_by_its_own_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    sample = next(sample for sample in demo.samples() if sample.path.stem == "en-command")
    prompt = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    assert run(["generate", str(demo.checkpoint()), prompt, "--audio", str(sample.path), *CPU]) == 0
    assert capsys.readouterr().out == " Please set the temperature in the cellar to eighteen degrees.\n"


@pytest.mark.parametrize(
    ("family", "words", "told"),
    [
        ("llama", ["hi", "--image", "PICTURE"], "image in the request, but LlamaForCausalLM reads text; leave it out"),
        ("llama", ["hi " * 600], "tokens leaves no room to generate; allowed: up to 511 tokens, the model has 512"),
        ("llama", ["hi", "--max-tokens", "9999"], "max_tokens=9999 after a prompt of 6 tokens; allowed: up to 506"),
        (
            "llava",
            ["<image>", "--raw", *["--image", "PICTURE"] * 2],
            "the prompt has 1 of '<image>' (token 268), but 2",
        ),
        ("qwen2_audio", ["hi", "--audio", __file__], "is not audio that can be decoded"),
        ("bert", ["hi"], "BertModel gives vectors, not text"),
    ],
)
def test_what_the_model_cannot_read_is_one_line_and_status_1(
    family: str,
    words: list[str],
    told: str,
    checkpoint: Callable[[str], str],
    picture: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(picture) if word == "PICTURE" else word for word in words]
    assert run(["generate", checkpoint(family), *given, *CPU]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_guessing_ahead_changes_no_token(checkpoint: Callable[[str], str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", checkpoint("llama"), "the cat and the cat", "--raw", "--max-tokens", "40", *CPU, "--json"]
    assert run(words) == 0
    plain = capsys.readouterr().out
    assert run([*words, "--speculate", "4", "-v"]) == 0
    out, err = capsys.readouterr()
    assert out == plain
    assert " draft tokens, " in err


@pytest.mark.parametrize("text", ["one", "two"])
def test_embeddings_are_those_that_the_engine_gives(
    checkpoint: Callable[[str], str], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """To the last bit of float32. One text at a time: in which steps several run, which changes the last bit, is up to
    trio's scheduling."""

    async def vectors() -> Any:
        async with triolet.Engine(checkpoint("bert"), config=EngineConfig(device="cpu")) as engine:
            return await engine.embed([text])

    assert run(["embed", checkpoint("bert"), text, *CPU]) == 0
    found = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    assert np.array_equal(np.array(found, np.float32), trio.run(vectors))


def test_verbose_tells_what_it_took_on_standard_error(
    checkpoint: Callable[[str], str], picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["what?", "--image", str(picture), "--image", str(picture), "--max-tokens", "5", *CPU, "-v"]
    assert run(["generate", checkpoint("qwen2_vl"), *words]) == 0
    told = capsys.readouterr().err
    assert "Qwen2VLForConditionalGeneration on cpu, float32; opened in " in told
    assert " tokens read, 5 written; the first after " in told
    assert "images and sounds encoded: 1" in told  # they are the same
    assert "MiB held: weights " in told


# -- processes -------------------------------------------------------------------------------------------------------

ENDLESS = textwrap.dedent(
    """
    import itertools, sys, types
    from contextlib import asynccontextmanager
    import trio
    from triolet.api.command_line.main import main
    from triolet.api.outputs.results import Delta

    class Engine:
        model = types.SimpleNamespace(name="endless", preparer=None)

        @asynccontextmanager
        async def stream(self, **asked):
            async def deltas():
                for number in itertools.count():
                    await trio.lowlevel.checkpoint()
                    yield Delta(text="word ", token_ids=(number,))
            yield deltas()

    @asynccontextmanager
    async def open_engine(model, config):
        try:
            yield Engine()
        finally:
            print("given back", file=sys.stderr)

    main(["generate", "model", "hi"], open_engine)
    """
)


def test_a_pipe_that_is_closed_ends_the_process_quietly() -> None:
    """Status 141, after the engine has closed."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(10) == b"word word "
        process.stdout.close()
        assert process.stderr is not None
        errors = process.stderr.read()
        assert (process.wait(SECONDS), errors) == (141, b"given back\n")


def test_an_interrupt_at_a_terminal_ends_the_line_and_gives_the_device_back() -> None:
    """Status 130, no traceback."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=theirs, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        shown = b""
        while not shown.startswith(b"word word"):
            shown += os.read(ours, 1000)
        process.send_signal(signal.SIGINT)
        last = shown
        try:
            while part := os.read(ours, 1000):
                last = (last + part)[-10:]
        except OSError as error:
            if error.errno != errno.EIO:  # how Linux says that the other end is closed
                raise
        assert process.stderr is not None
        errors = process.stderr.read()
        assert (process.wait(SECONDS), errors) == (130, b"given back\n")
    os.close(ours)
    assert last.endswith(b"word \r\n")


def test_a_real_process_writes_text_alone_and_can_be_interrupted(
    checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    """No progress bar of a load, no warning. The first piece is read, then comes a ^C; of a model that writes for more
    than a minute."""
    folder = tmp_path / "long"
    shutil.copytree(checkpoint("llama"), folder)
    for name, changes in (
        ("config.json", lambda settings: {"max_position_embeddings": 20_000}),
        ("generation_config.json", lambda settings: {"suppress_tokens": [settings["eos_token_id"]]}),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **changes(settings)}))
    with subprocess.Popen(
        [sys.executable, "-m", "triolet", "generate", folder, "hi", *CPU],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, errors) == (130, b"")
        assert not rest.endswith(b"\n")
