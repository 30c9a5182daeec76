"""The command line over an engine of paper: what is written where, in which order, and the exit status."""

from __future__ import annotations

import errno
import importlib.metadata
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

import triolet
import triolet.demo
from triolet.api.command_line import terminal
from triolet.api.command_line.main import main
from triolet.core.config import EngineConfig
from triolet.core.errors import EngineStateError, EngineTeardownError

from .paper import Broken, PaperEngine, Terminal, run, run_as_it_is
from .threads import press_in_a_callback

pytestmark = pytest.mark.usefixtures("folder")


@pytest.fixture
def engine() -> PaperEngine:
    return PaperEngine()


SAYS = {name: f"said in {name}.wav, möglichst.\n" for name in ("a", "b", "c", "slow", "warned")}


@pytest.mark.parametrize(
    ("words", "status", "out", "told"),
    [
        # one line, nothing else: ready for a pipe, and no progress bar where standard error is no terminal
        ("a.wav", 0, SAYS["a"], ""),
        # as grep has it, in their order; the first may be the last to finish
        ("slow.wav b.wav c.wav", 0, "".join(f"{name}.wav: {SAYS[name]}" for name in ("slow", "b", "c")), ""),
        # a file that fails does not stop the others
        ("a.wav bad.wav", 1, f"a.wav: {SAYS['a']}", "bad.wav: cut short: promised 2, found 1"),
        (
            "breaks.wav b.wav",
            1,
            f"breaks.wav: said in breaks.wav,\nb.wav: {SAYS['b']}",
            "breaks.wav: the device is gone; what is said after 1.00 s is missing",
        ),
        ("warned.wav", 0, SAYS["warned"], "warned.wav: warning: the end is missing"),
        # ^C
        ("interrupt.wav", 130, "", "stopped; nothing is transcribed of interrupt.wav"),
        (
            "endless.wav",
            130,
            "said in endless.wav,\n",
            "endless.wav: stopped before its end; what is said after 1.00 s is missing",
        ),
        # once, and not for each file
        ("a.wav b.wav --language fr", 1, "", "--language='fr', which the model does not know; allowed: de, en"),
        (
            "a.wav b.wav --initial-prompt <|en|>",
            1,
            "",
            "--initial-prompt='<|en|>' has a special token (<|...|>); allowed: plain text",
        ),
    ],
)
def test_texts_are_written_to_standard_output_and_one_line_for_what_is_wrong_to_standard_error(
    words: str, status: int, out: str, told: str, engine: PaperEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine closes in any case."""
    assert run(["transcribe", *words.split()], engine) == status
    assert capsys.readouterr() == (out, f"triolet: {told}\n" if told else "")
    assert engine.closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_json_is_one_object_a_line(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """With everything that a transcript holds, and the file's name."""
    assert run(["transcribe", "--format", "json", "a.wav", "b.wav"], engine) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["file"], second["file"]) == ("a.wav", "b.wav")
    assert first["text"] == "said in a.wav,\nmöglichst."
    assert (first["language"], first["language_probability"], first["duration"]) == ("en", 0.75, 2.5)
    assert [(s["start"], s["end"], s["tokens"]) for s in first["segments"]] == [(0, 1, [1, 2]), (1, 2.5, [1, 2])]


def test_options_reach_the_engine(engine: PaperEngine) -> None:
    """Model, device, dtype and threads open it; language and task go with each file."""
    words = (
        "transcribe a.wav --model some/model --language de --task translate --device cpu --dtype float32 --threads 2"
    )
    assert run(words.split(), engine) == 0
    assert engine.models == [("some/model", EngineConfig(device="cpu", dtype="float32", threads=2))]
    assert engine.asked == [("a.wav", {"language": "de", "task": "translate"})]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("demo", str(triolet.demo.checkpoint())),
        ("base", "openai/whisper-base"),
        ("turbo", "openai/whisper-large-v3-turbo"),
        ("small", "small"),  # whoever converted a checkpoint into ./small means it
        ("./demo", "./demo"),
        ("a/b", "a/b"),
    ],
)
def test_the_toy_and_the_names_of_openai_whisper_stand_for_checkpoints(
    name: str, model: str, engine: PaperEngine
) -> None:
    for folder in ("demo", "small"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text('{"model_type": "whisper"}')
    assert run(["transcribe", "a.wav", "--model", name], engine) == 0
    assert engine.models[0][0] == model


@pytest.mark.parametrize("words", [["--at-once", "3"], ["--at-once", "1"], ["--at-once", "1", "-o", "out"]])
def test_few_files_are_held_at_once(words: list[str], engine: PaperEngine) -> None:
    """Memory holds the audio of --at-once files; they start in order. Each has its turn, also where one ends, and is
    reported, before the next is taken."""
    names = [f"{number}.wav" for number in range(9)]
    assert run(["transcribe", *words, "--no-parallel", *names], engine) == 0
    assert engine.most_running == int(words[1])
    assert [asked[0] for asked in engine.asked] == names


def test_a_dash_reads_standard_input(engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine gets its bytes."""
    path = tmp_path / "input"
    path.write_bytes(b"sound" * 30_000)
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(["transcribe", "-"], engine) == 0
    assert engine.asked[0][0] == b"sound" * 30_000


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.wav", "absent.wav: there is no such file; check the name and the folder"),
        ("closed", "standard input: it is closed; pipe audio in, or redirect it from a file (< FILE)\n"),
        ("unreadable", "standard input: it cannot be read ([Errno 9] Bad file descriptor); pipe audio in"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_the_others_go_on(
    name: str, told: str, engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(os.devnull, "w") as unreadable:
        monkeypatch.setattr(sys, "stdin", unreadable if name == "unreadable" else None)
        assert run(["transcribe", name if name == "absent.wav" else "-", "b.wav"], engine) == 1
    out, err = capsys.readouterr()
    assert out == "b.wav: said in b.wav, möglichst.\n"
    assert err.startswith(f"triolet: {told}")
    assert err.count("\n") == 1
    assert [audio for audio, _ in engine.asked] == ["b.wav"]


def test_a_failed_teardown_is_one_line_after_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What was transcribed is not lost."""
    assert run(["transcribe", "a.wav"], PaperEngine(closing=EngineTeardownError("a stage hung"))) == 1
    assert capsys.readouterr() == ("said in a.wav, möglichst.\n", "triolet: a stage hung\n")


def test_interrupting_again_while_it_closes_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    """The second ^C is Python's own; still no traceback."""
    assert run(["transcribe", "interrupt.wav"], PaperEngine(closing=KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_that_python_would_lose_is_heard() -> None:
    async def work() -> int:
        press_in_a_callback()
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        return 0

    assert trio.run(terminal.until_interrupted, work) == terminal.INTERRUPTED


@pytest.mark.real_time
def test_interrupting_while_it_still_imports_leaves_no_traceback() -> None:
    """In a real process, at the moment when trio is imported: status 130. Nothing that takes long comes before."""
    code = """
        import sys

        class Impatient:
            def find_spec(self, name, path, target=None):
                if name == "trio":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Impatient())
        from triolet.__main__ import main
        print(sorted({"attrs", "click", "numpy", "trio"} & set(sys.modules)), flush=True)
        main()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "transcribe"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "[]\n", "")


@pytest.mark.real_time
def test_a_load_that_still_computes_does_not_change_how_the_command_ends() -> None:
    """A thread that is given up computes by torch while the process ends, which ended with SIGABRT: "terminate called
    without an active exception". Functions of the exit run before."""
    code = """
        import atexit
        import threading

        import torch
        from triolet import __main__

        def load():
            while True:
                numbers.clone()

        def main():
            threading.Thread(target=load, daemon=True).start()
            atexit.register(print, "the exit", end="")
            triolet()

        numbers = torch.ones(1_000_000)
        torch.set_num_threads(1)
        triolet, __main__.main = __main__.main, main
        __main__.run()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), "serve", "demo", "--port", "many"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "the exit")
    assert done.stderr.endswith("'many' is not a valid integer.\n")


def test_other_errors_in_groups_are_not_swallowed() -> None:
    """A bug keeps its traceback."""
    with pytest.raises(BaseExceptionGroup):
        main(["transcribe", "--model", "m", __file__], PaperEngine(closing=ZeroDivisionError()))


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (BrokenPipeError(), 141, ""),
        (OSError(errno.ENOSPC, "No space left"), 1, "the output cannot be written: [Errno 28] No space left"),
    ],
)
def test_output_that_cannot_be_written_ends_the_work(
    error: OSError,
    status: int,
    told: str,
    engine: PaperEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The other files are cancelled, the engine closes. A reader that went away is no fault."""
    monkeypatch.setattr(sys, "stdout", Broken(error))
    assert run(["transcribe", "a.wav", *[f"slow{number}.wav" for number in range(5)]], engine) == status
    assert engine.closed
    assert engine.finished < 6
    assert capsys.readouterr().err == (told and f"triolet: {told}\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16", "utf-8", "UTF8"])
def test_json_is_valid_in_every_encoding(engine: PaperEngine, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the encoding lacks is escaped as JSON does, not as Python does; names that are no text are kept too."""
    names = ("é.wav", "日本.wav", "🎙.wav", "\udcff.wav")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert run(["transcribe", *names, "-f", "json"], engine) == 0
    lines = raw.getvalue().decode(encoding).splitlines()
    assert [json.loads(line)["file"] for line in lines] == list(names)
    assert ("日本" in lines[1]) == encoding.lower().startswith(("utf-8", "utf8"))


def test_without_standard_output_nothing_is_loaded(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``>&-`` in a shell: Python has no standard output then."""
    for words in (["transcribe", "a.wav"], ["devices"]):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", None)
            assert run(words, engine) == 1
        assert capsys.readouterr().err.startswith("triolet: standard output is closed; redirect it")
    assert not engine.models


def test_a_broken_standard_error_keeps_the_status(engine: PaperEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be told; the status tells."""
    monkeypatch.setattr(sys, "stderr", Broken(OSError(errno.ENOSPC, "No space left on device")))
    assert run(["transcribe", "bad.wav"], engine) == 1


REAL = """
import sys
from tests.api.paper import PaperEngine
from triolet.api.command_line.main import main

sys.stdin.readline()
main(sys.argv[1:], PaperEngine())
"""


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("words", "sink", "status"),
    [
        (f"transcribe --model paper {__file__} {__file__}", "pipe", 141),
        ("--help", "pipe", 141),
        ("--help", "/dev/full", 1),
    ],
    ids=["transcribe", "help", "full"],
)
def test_a_gone_reader_and_a_full_disk_leave_no_traceback(words: str, sink: str, status: int) -> None:
    """In a real process, also at its exit, and where click itself writes: ``| head`` says nothing, a full disk is one
    line."""
    if not Path(sink).exists() and sink != "pipe":
        pytest.skip(f"no {sink}")
    with (
        open(os.devnull if sink == "pipe" else sink, "w") as file,
        subprocess.Popen(
            [sys.executable, "-c", REAL, *words.split()],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if sink == "pipe" else file,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        if process.stdout is not None:
            process.stdout.close()
        _, errors = process.communicate("go\n", timeout=300)
    told = "triolet: the output cannot be written: [Errno 28] No space left on device\n"
    assert (process.returncode, errors) == (status, "" if sink == "pipe" else told)


def test_a_terminal_shows_seconds_of_audio(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bar on standard error, over all files opened so far, with the speed, and each segment as it becomes final;
    standard output stays clean."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["transcribe", "a.wav", "b.wav", "bad.wav"], engine) == 1
    assert "% of 5 s |" in terminal.getvalue()
    assert re.search(r"left, +[\d.]+ s of audio/s", terminal.getvalue())
    assert "b.wav [00:01.000 --> 00:02.500] möglichst.\n" in terminal.getvalue()
    assert "triolet: bad.wav: cut short" in terminal.getvalue()
    assert capsys.readouterr().out.count("\n") == 2


def test_devices_marks_the_default(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a device with its memory and the dtype that "auto" gives; one star. Below: which cores, and how their
    threads wait."""
    assert run(["devices"], engine) == 0
    *lines, cores, waits = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("* ") for line in lines) == 1
    assert "cpu" in lines[-1]
    assert all("GiB" in line and "float" in line for line in lines)
    assert re.fullmatch(r" +cores: \d+ usable of \d+ logical.*", cores)
    assert re.match(r" +waiting threads: (spin|OMP_WAIT_POLICY=|GOMP_SPINCOUNT=|KMP_BLOCKTIME=)", waits)


def test_devices_tells_of_a_card_that_does_not_answer(
    engine: PaperEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program may have it for itself; the others are told."""
    torch = pytest.importorskip("torch")

    def ask(index: int) -> tuple[int, int]:
        if index == 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nCompile with TORCH_USE_CUDA_DSA")
        return 5 << 30, 8 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name=f"Card {index}"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    assert run(["devices"], engine) == 0
    first, second, cpu, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "* cuda:0  cannot be asked: CUDA error: all CUDA-capable devices are busy Compile with TORCH_USE_CUDA_DSA"
    )
    assert second == "  cuda:1  Card 1, 8.0 GiB (5.0 GiB free), float16"
    assert cpu.startswith("  cpu")


LOGGED = ["triolet: open: paper", "triolet: warning: step 3 failed: RuntimeError: boom"]
SEGMENTS = ["[00:00.000 --> 00:01.000] said in a.wav,", "[00:01.000 --> 00:02.500] möglichst."]


# -- the log ---------------------------------------------------------------------------------------------------------


class LoggingEngine(PaperEngine):
    """One that has something to say."""

    async def __aenter__(self) -> LoggingEngine:
        log = logging.getLogger("triolet.engine")
        log.info("open: paper")
        log.warning("step 3 failed:\n  RuntimeError: boom")
        log.debug("request a finished")
        await super().__aenter__()
        return self


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], ["triolet: warning: step 3 failed: RuntimeError: boom"]),
        (["-v"], [*LOGGED, *SEGMENTS]),
        (["--verbose"], [*LOGGED, *SEGMENTS]),
        (["--no-verbose"], LOGGED[1:]),
    ],
)
def test_warnings_of_the_log_are_lines_on_standard_error_and_more_is_asked_for(
    words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One line each. The result is untouched, and so is the logging of the program around."""
    logger = logging.getLogger("triolet")
    before = (logger.level, logger.propagate, list(logger.handlers))
    assert run(["transcribe", "a.wav", *words], LoggingEngine()) == 0
    out, err = capsys.readouterr()
    assert out == "said in a.wav, möglichst.\n"
    assert err.splitlines() == told
    assert (logger.level, logger.propagate, logger.handlers) == before


@pytest.mark.parametrize("words", ["{} a.wav", "a.wav {}", "{} --language de a.wav b.wav"])
@pytest.mark.parametrize("command", ["transcribe", "generate", "embed"])
def test_a_model_is_the_first_word_or_follows_its_flag(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In every command. Also a folder with a checkpoint."""

    def opened(model: str, config: EngineConfig) -> Any:
        raise EngineStateError(f"{model} was opened")

    Path("a.wav").touch()
    Path("b.wav").touch()
    Path("own").mkdir()
    Path("own/config.json").write_text('{"model_type": "whisper"}')
    words = words if command == "transcribe" else words.replace("--language de", "").replace("b.wav", "")
    for model in ("some/model", "own"):
        for given in (f"--model {model}", model)[: 1 if words.startswith("a") else 2]:
            assert run_as_it_is([command, *words.format(given).split()], opened) == 1
            assert capsys.readouterr().err == f"triolet: {model} was opened\n"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command and by the package, which reads it only when asked."""
    assert run(["--version"], PaperEngine()) == 0
    assert capsys.readouterr().out == f"triolet {triolet.__version__}\n"
    assert triolet.__version__ == importlib.metadata.version("triolet")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = triolet.nothing
