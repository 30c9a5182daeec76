"""``triolet generate`` and ``triolet embed``: what is asked, what is written where, and the exit status."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attrs import fields_dict

from triolet.api.command_line.flags import FORM, SAMPLING
from triolet.api.command_line.generate import generate
from triolet.api.outputs.results import Delta
from triolet.core.config import EngineConfig, Speculation
from triolet.core.errors import CheckpointError, InvalidRequest, PoisonRequest, RequestTooLarge
from triolet.core.request import FinishReason, SamplingParams, Structure

from .generating import PaperEngine
from .paper import Broken, Terminal, run

SECONDS = 60
CPU = ("--device", "cpu")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[bytes], None]]:
    """Puts bytes on standard input."""
    with ExitStack() as files:

        def typed(data: bytes) -> None:
            (tmp_path / "stdin").write_bytes(data)
            monkeypatch.setattr(sys, "stdin", files.enter_context((tmp_path / "stdin").open()))

        yield typed


# -- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "out", "status", "written"),
    [
        (("Once", " upon", "", " a time"), io.StringIO(), 0, "Once upon a time\n"),  # ready for a pipe
        (("two\n", "lines\n"), io.StringIO(), 0, "two\nlines\n"),  # no second end of a line
        (("a\x1b[2J", "b\tc"), io.StringIO(), 0, "a\x1b[2Jb\tc\n"),
        (("a\x1b[2J", "b\tc"), Terminal(), 0, "a\\x1b[2Jb\tc\n"),  # is shown control characters, and does not obey them
        (("half a ", PoisonRequest("it crashed\nits step")), io.StringIO(), 1, "half a "),
        (
            ("half a ", PoisonRequest("it crashed\nits step")),
            Terminal(),
            1,
            "half a \n",
        ),  # for the shell
        (("half a ", None), Terminal(), 130, "half a \n"),
    ],
)
def test_the_text_is_written_alone_and_ends_its_line(
    pieces: tuple[Any, ...],
    out: io.StringIO,
    status: int,
    written: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No progress, no statistics; a fault in the middle keeps what was written, is one line, and the engine closes."""
    monkeypatch.setattr(sys, "stdout", out)
    engine = PaperEngine(*pieces)
    assert run(["generate", "model", "hi"], engine) == status
    assert out.getvalue() == written
    assert capsys.readouterr().err == {0: "", 1: "triolet: it crashed its step\n", 130: ""}[status]
    assert engine.closed


@pytest.mark.parametrize(
    ("options", "no_color", "shown"),
    [((), "", "\x1b[2mSo be\\x1b it\x1b[0m\n\n"), ((), "1", "So be\\x1b it\n\n"), (("--json",), "", "")],
)
def test_reasoning_is_shown_dimmed_to_people_and_never_among_the_results(
    options: tuple[str, ...], no_color: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where standard error is no terminal, nothing is written there. ^C ends the dimming, too."""
    monkeypatch.setenv("NO_COLOR", no_color)
    parts = [Delta(text="", token_ids=(1,), reasoning=thought) for thought in ("So", "", " be\x1b it")]
    for ends in (("yes",), (None,)):
        out, err = io.StringIO(), Terminal()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        assert run(["generate", "model", "hi", *options], PaperEngine(*parts, *ends)) == (0 if ends[0] else 130)
        assert err.getvalue() == shown
        assert ("So" in out.getvalue()) is bool(options and ends[0])
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    assert run(["generate", "model", "hi"], PaperEngine(*parts, "yes")) == 0
    assert not plain.getvalue()


class Flushed(io.StringIO):
    """Notes what it has, each time that it is flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        self.seen.append(self.getvalue())


def test_each_piece_is_written_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And flushed: whoever reads the pipe need not wait for the end."""
    monkeypatch.setattr(sys, "stdout", out := Flushed())
    assert run(["generate", "model", "hi"], PaperEngine("a", "b", "c")) == 0
    assert out.seen[:4] == ["a", "ab", "abc", "abc\n"]


def test_json_is_one_object_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "model", "hi", "--json"], PaperEngine("gr", "ün")) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "grün",
        "tokens": [1, 2],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 0, "seed": None},
    }


def test_json_lines_come_as_the_text_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each piece, the last with what is known at the end."""
    monkeypatch.setattr(sys, "stdout", out := Flushed())
    assert run(["generate", "model", "hi", "--json-lines"], PaperEngine("gr", "ün")) == 0
    first, second, last = map(json.loads, out.seen[-1].splitlines())
    assert json.loads(out.seen[0]) == first == {"text": "gr", "tokens": [1]}
    assert second == {"text": "ün", "tokens": [2]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "reasoning_tokens": 0, "seed": None}
    assert last == {"text": "", "tokens": [], "finish_reason": "stop", "usage": usage}


@pytest.mark.parametrize(
    ("words", "text", "is_whole"),
    [
        (["--regex", "[0-9]{4}(-x)?"], "1234", True),
        (["--regex", "[0-9]{4}(-x)?"], "1234-", False),
        (["--choice", "red", "--choice", "redder"], "redd", False),
        (["--json-schema", "schema"], '{"a": "ü"}', True),
        (["--json-schema", "schema"], '{"a": "ü', False),
        (["--grammar", "grammar"], "aa", False),
        (["--max-tokens", "1"], "{", True),
    ],
)
def test_a_form_that_was_cut_off_has_a_status_of_its_own(
    words: list[str],
    text: str,
    is_whole: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What was written stays; a text without a form is as long as it was asked to be."""
    monkeypatch.chdir(tmp_path)
    Path("schema").write_text('{"type": "object", "properties": {"a": {"type": "string"}}}')
    Path("grammar").write_text('start: "aaa"')
    engine = PaperEngine(text, reason=FinishReason.LENGTH)
    assert run(["generate", "model", "hi", *words], engine) == (0 if is_whole else 3)
    told = "triolet: the output was cut off after 1 tokens, before it was complete; allow more with --max-tokens"
    out, err = capsys.readouterr()
    assert out == f"{text}\n"
    assert err.startswith(told) is not is_whole


@pytest.mark.parametrize(("words", "given"), [([], 1), (["--json"], 11)])
def test_a_reader_that_goes_away_ends_the_work(words: list[str], given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is withdrawn, the engine closes, the status is that of SIGPIPE."""
    engine = PaperEngine(*"many pieces")
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError()))
    assert run(["generate", "model", "hi", *words], engine) == 141
    assert engine.closed
    assert engine.given == given


# -- what is asked ---------------------------------------------------------------------------------------------------


def test_options_reach_the_engine() -> None:
    engine = PaperEngine("a")
    words = (
        "generate some/model hi --max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --stop END "
        "--stop . --min-tokens 2 --repetition-penalty 1.1 --presence-penalty 0.5 --frequency-penalty -0.5 "
        "--logit-bias 7=-2.5 --logit-bias 8=1 --stop-token-ids 4,5 --ignore-eos --logprobs 3 --length-penalty 2 "
        "--patience 3 --no-skip-special-tokens --json --device cpu --dtype bfloat16 --threads 2 --speculate 6 "
        "--draft-head some/head"
    )
    assert run(words.split(), engine) == 0
    drafts = {"speculation": Speculation(tokens=6), "draft_head": "some/head"}
    config = EngineConfig(device="cpu", dtype="bfloat16", threads=2, max_running=1, **drafts)
    assert engine.configs == [("some/model", config)]
    assert engine.asked["sampling"] == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        stop=("END", "."),
        min_tokens=2,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={7: -2.5, 8: 1.0},
        stop_token_ids=(4, 5),
        ignore_eos=True,
        logprobs=3,
        length_penalty=2.0,
        patience=3.0,
        skip_special_tokens=False,
    )


def test_every_sampling_parameter_has_a_flag() -> None:
    """But the number of completions: the command writes one."""
    assert {*fields_dict(SamplingParams)} == {*SAMPLING, "structure", "n"}
    assert {each.name for each in generate.params} >= {*SAMPLING, *FORM}
    asked = PaperEngine("a")
    assert run(["generate", "model", "hi"], asked) == 0
    assert asked.asked["sampling"] == SamplingParams()


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ((), "speculation", "auto"),
        (("--speculate", "0"), "speculation", None),
        (("--chat-template", "ü.jinja"), "chat_template", r"ü\n{{ x }}"),  # Jinja reads the escapes of a file
        (("--chat-template", r"ü\n{{ x }}"), "chat_template", "ü\n{{ x }}"),  # those of a text are read as in vLLM
    ],
)
def test_the_engine_is_opened_as_asked(
    words: tuple[str, ...], setting: str, value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ü.jinja").write_text(r"ü\n{{ x }}", encoding="utf-8")
    engine = PaperEngine("a")
    assert run(["generate", "model", "hi", *words], engine) == 0
    ((_, config),) = engine.configs
    assert getattr(config, setting) == value


TEXT, IMAGE = {"type": "text", "text": "hi"}, {"type": "image", "image": (40, 60)}


@pytest.mark.parametrize(
    ("line", "media", "content"),
    [
        ("hi", [], "hi"),  # a chat template for text alone knows no parts
        ("hi --image red.png --image red.png", ["image"], [IMAGE, IMAGE, TEXT]),
        ("hi --image - < red.png", ["image", "audio"], [IMAGE, TEXT]),
        ("--audio hum.wav < /dev/null", ["audio"], [{"type": "audio", "audio": "hum.wav"}]),  # a voice asks by itself
        ("hi --audio - < hum.wav", ["audio"], [{"type": "audio", "audio": "its bytes"}, TEXT]),
    ],
)
@pytest.mark.usefixtures("picture")
def test_a_question_has_the_parts_that_its_model_reads(
    line: str,
    media: list[str],
    content: Any,
    sound: Path,
    typed: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files are from the command line or from standard input. Images and audio come before the text."""
    monkeypatch.chdir(sound.parent)
    words, _, stdin = line.partition(" < ")
    typed(Path(stdin or "/dev/null").read_bytes())
    engine = PaperEngine("a", media=media)
    assert run(["generate", "model", *words.split(), "--system", "be brief"], engine) == 0
    system, user = engine.asked["messages"]
    assert system == {"role": "system", "content": [TEXT | {"text": "be brief"}] if media else "be brief"}
    for part in user["content"] if media else []:
        if "image" in part:
            part["image"] = part["image"].size
        elif part.get("audio") == sound.read_bytes():
            part["audio"] = "its bytes"
    assert user == {"role": "user", "content": content}


@pytest.mark.parametrize(
    ("words", "converses", "prompt"),
    [
        ("hi --image {} --raw", True, "<item>hi"),
        ("hi --image {}", False, "<item>hi"),  # there is no template
        ("--raw", True, "zwei\nZeilen grün"),
        ("- --raw", True, "zwei\nZeilen grün"),
    ],
)
def test_a_raw_prompt_goes_as_it_is(
    words: str, converses: bool, prompt: str, picture: Path, typed: Callable[[bytes], None]
) -> None:
    """Images go in front where it has no placeholder for them. From standard input it comes without the end of its last
    line, which echo puts there."""
    typed("zwei\nZeilen grün\n".encode())
    engine = PaperEngine("a", media=["image"], converses=converses)
    assert run(["generate", "model", *words.format(picture).split()], engine) == 0
    assert engine.asked["prompt"] == prompt
    assert len(engine.asked.get("images") or ()) == words.count("--image")
    assert "messages" not in engine.asked


@pytest.mark.parametrize(
    ("words", "structure"),
    [
        (["--json-schema", "{}"], Structure.json_schema({"enum": ["kitchen", "hall"]})),
        (["--json-schema", "{}"], Structure.json_schema('{"minimum": 0.50}')),  # each digit
        (["--grammar", "{}"], Structure(kind="lark", text='start: "a"')),
        (["--regex", "[a-z]+"], Structure(kind="regex", text="[a-z]+")),
        (["--choice", "red", "--choice", "blue"], Structure.choice(["red", "blue"])),
    ],
)
def test_a_form_becomes_a_structure(words: list[str], structure: Structure, tmp_path: Path) -> None:
    path = tmp_path / "form"
    path.write_text(structure.text)
    engine = PaperEngine("a")
    assert run(["generate", "model", "hi", *(word.format(path) for word in words)], engine) == 0
    assert engine.asked["sampling"].structure == structure


# -- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (PaperEngine(opening=CheckpointError("no checkpoint there")), "no checkpoint there"),
        (PaperEngine(opening=InvalidRequest("no such device")), "no such device"),
        (PaperEngine(RequestTooLarge("too long a prompt")), "too long a prompt"),
        (
            PaperEngine("a", converses=False),
            "--system is given, but paper has no chat template; write the message into the prompt",
        ),
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


@pytest.mark.parametrize(
    ("typed_in", "texts"),
    [
        (b"".join(b"line %d\n\n" % number for number in range(300)), [f"line {number}" for number in range(300)]),
        (b"a cat\r\n\r\na dog\r\n", ["a cat", "a dog"]),  # as Windows ends lines
    ],
    ids=["many", "Windows"],
)
def test_lines_of_standard_input_are_texts(
    typed_in: bytes, texts: list[str], typed: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty ones are passed over; many go together, and their lines come before the rest is computed."""
    typed(typed_in)
    engine = PaperEngine()
    assert run(["embed", "model"], engine) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == texts
    assert [len(part) for part in engine.embedded] == ([256, 44] if len(texts) == 300 else [2])
