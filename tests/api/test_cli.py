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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

import triolet
import triolet.demo
from triolet.api.command_line.destinations import standard_output
from triolet.api.command_line.main import main
from triolet.api.command_line.transcribe_job import Job
from triolet.api.formats.settings import SubtitleSettings
from triolet.api.formats.writers import JSON, TEXT, Format
from triolet.core.config import EngineConfig
from triolet.core.errors import EngineTeardownError

from .paper import PaperEngine, Terminal, run, run_as_it_is


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def engine() -> PaperEngine:
    return PaperEngine()


def test_one_file_gives_its_text_alone(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, nothing else: ready for a pipe. No progress bar where standard error is no terminal."""
    assert run(["transcribe", "a.wav"], engine) == 0
    assert capsys.readouterr() == ("said in a.wav, möglichst.\n", "")
    assert engine.closed
    assert engine.asked == [("a.wav", {})]


def test_many_files_are_named_and_keep_their_order(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """As grep does; the first may be the last to finish."""
    assert run(["transcribe", "slow.wav", "b.wav", "c.wav"], engine) == 0
    lines = [f"{name}: said in {name}, möglichst." for name in ("slow.wav", "b.wav", "c.wav")]
    assert capsys.readouterr().out.splitlines() == lines


def test_json_is_one_object_a_line(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """With everything that a transcript holds, and the file's name."""
    assert run(["transcribe", "--format", "json", "a.wav", "b.wav"], engine) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["file"], second["file"]) == ("a.wav", "b.wav")
    assert first["text"] == "said in a.wav,\nmöglichst."
    assert (first["language"], first["language_probability"], first["duration"]) == ("en", 0.75, 2.5)
    assert [(s["start"], s["end"], s["token_ids"]) for s in first["segments"]] == [(0, 1, [1, 2]), (1, 2.5, [1, 2])]


def test_a_file_that_fails_does_not_stop_the_others(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error, status 1, and the others' text on standard output."""
    assert run(["transcribe", "a.wav", "bad.wav", "c.wav"], engine) == 1
    out, err = capsys.readouterr()
    assert [line.partition(":")[0] for line in out.splitlines()] == ["a.wav", "c.wav"]
    assert err == "triolet: bad.wav: cut short: promised 2, found 1\n"


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
        ("./demo", "./demo"),
        ("a/b", "a/b"),
    ],
)
def test_the_toy_and_the_names_of_openai_whisper_stand_for_checkpoints(
    name: str, model: str, engine: PaperEngine, folder: Path
) -> None:
    put_checkpoint(folder / "demo")
    assert run(["transcribe", "a.wav", "--model", name], engine) == 0
    assert engine.models[0][0] == model


def test_a_folder_with_the_name_of_a_size_is_taken(engine: PaperEngine, folder: Path) -> None:
    """Who converted a checkpoint into ./base means it."""
    put_checkpoint(folder / "base")
    assert run(["transcribe", "a.wav", "--model", "base"], engine) == 0
    assert engine.models[0][0] == "base"


def put_checkpoint(folder: Path, model_type: str = "whisper") -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


@pytest.mark.parametrize("command", ["transcribe a.wav --model", "generate", "embed"])
@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("./absent", "there is no folder absent; allowed: a checkpoint's folder or a hub id such as"),
        ("/absent/folder/of/mine", "there is no folder /absent/folder/of/mine; allowed"),
        ("empty", "empty has no config.json, so it is no checkpoint; give a folder as save_pretrained writes it"),
        ("a.gguf", "a.gguf is a file in GGUF, the format of llama.cpp; allowed: checkpoints in transformers' layout"),
        ("whisper-ct2", "whisper-ct2 holds a model of CTranslate2, as faster-whisper has it; allowed: checkpoints in"),
    ],
)
def test_what_is_no_checkpoint_is_told_before_torch_is_imported(
    command: str, model: str, told: str, engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    (folder / "a.gguf").write_bytes(b"GGUF")
    (folder / "whisper-ct2").mkdir()
    (folder / "whisper-ct2" / "model.bin").touch()
    more = ["hi"] if command in ("generate", "embed") else []
    assert run([*command.split(), model, *more], engine) == 1
    assert capsys.readouterr().err.startswith(f"triolet: {told}")
    assert not engine.models


def test_a_model_of_text_is_not_loaded_to_transcribe(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_checkpoint(folder / "small", "llama")
    assert run(["transcribe", "a.wav", "--model", "small"], engine) == 1
    assert capsys.readouterr().err.startswith("triolet: small (llama) cannot transcribe; allowed: Whisper models.")
    assert not engine.models


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--language fr", "--language='fr', which the model does not know; allowed: de, en"),
        ("--initial-prompt <|en|>", "--initial-prompt='<|en|>' holds a special token (<|...|>); allowed: plain text"),
    ],
)
def test_what_this_model_does_not_know_is_told_once_and_not_for_each_file(
    words: str, told: str, engine: PaperEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["transcribe", "a.wav", "b.wav", *words.split()], engine) == 1
    assert capsys.readouterr() == ("", f"triolet: {told}\n")
    assert not engine.asked
    assert engine.closed


def test_without_a_model_the_command_names_real_ones(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A silent default would invent speech."""
    (folder / "a.wav").touch()
    assert run_as_it_is(["transcribe", "a.wav"], engine) == 2
    told = capsys.readouterr().err
    assert "no --model: give the folder or the hub id of a Whisper checkpoint" in told
    assert "openai/whisper-small" in told
    assert "--model demo is a toy" in told


def test_few_files_are_held_at_once(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory holds the audio of --at-once files; they start in order."""
    names = [f"{number}.wav" for number in range(9)]
    assert run(["transcribe", "--at-once", "3", "--no-parallel", *names], engine) == 0
    assert engine.most_running == 3
    assert [asked[0] for asked in engine.asked] == names
    assert len(capsys.readouterr().out.splitlines()) == 9


def test_a_dash_reads_standard_input(engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine gets its bytes."""
    path = tmp_path / "input"
    path.write_bytes(b"sound" * 30_000)
    with path.open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(["transcribe", "-"], engine) == 0
    assert engine.asked[0][0] == b"sound" * 30_000


def closed_stdin() -> None:
    return None


def unreadable_stdin() -> io.TextIOWrapper:
    """Open for writing only."""
    return open(os.devnull, "w", encoding="utf-8")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (closed_stdin, "it is closed"),
        (unreadable_stdin, "it cannot be read"),
    ],
)
def test_standard_input_that_cannot_be_read_is_one_line(
    make: Callable[[], Any],
    told: str,
    engine: PaperEngine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback, what would help, and the other files go on."""
    stream = make()
    monkeypatch.setattr(sys, "stdin", stream)
    assert run(["transcribe", "-", "b.wav"], engine) == 1
    if stream is not None:
        stream.close()
    out, err = capsys.readouterr()
    assert out == "b.wav: said in b.wav, möglichst.\n"
    assert err.startswith(f"triolet: standard input: {told}")
    assert err.endswith("pipe audio in, or redirect it from a file (< FILE)\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent.wav", "absent.wav: no such file; check the spelling and the folder"),
        ("absent://a.wav", "absent://a.wav: no such file; addresses are not fetched: download it first"),
        ("", "'': an empty file name; look at the quotes, and whether the variable between them is set"),
    ],
)
def test_a_missing_file_is_told_in_the_words_of_a_shell(
    name: str, told: str, engine: PaperEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody there has arrays or binary file objects to give. The engine never hears of it."""
    assert run(["transcribe", name, "b.wav"], engine) == 1
    out, err = capsys.readouterr()
    assert out == "b.wav: said in b.wav, möglichst.\n"
    assert err.startswith(f"triolet: {told}")
    assert "array" not in err
    assert [audio for audio, _ in engine.asked] == ["b.wav"]


def test_where_no_file_can_be_read_no_model_is_loaded(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sub").mkdir()
    assert run(["transcribe", "absent.wav", "sub"], engine) == 1
    assert not engine.models
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("triolet: absent.wav: no such file")
    assert second == "triolet: sub: it is a folder; give the files in it (sub/*)"


def test_a_failed_teardown_is_one_line_after_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """What was transcribed is not lost."""
    assert run(["transcribe", "a.wav"], PaperEngine(closing=EngineTeardownError("a stage hung"))) == 1
    assert capsys.readouterr() == ("said in a.wav, möglichst.\n", "triolet: a stage hung\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("transcribe", "Missing argument 'FILES...'"),
        ("transcribe a.wav --task sing", "'sing' is not one of 'transcribe', 'translate'"),
        ("transcribe a.wav --format xml", "'xml' is not one of"),
        ("transcribe a.wav --dtype int4", "'int4' is not one of"),
        ("transcribe a.wav --threads -1", "threads=-1; allowed:"),
        ("transcribe - a.wav -", "- is given 2 times; standard input can be read once"),
        ("transcribe a.wav --at-once 0", "Invalid value for '--at-once'"),
        ("sing a.wav", "No such command 'sing'"),
    ],
)
def test_wrong_usage_has_status_2(
    words: str, message: str, engine: PaperEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usage and what is wrong, before any model is loaded."""
    assert run(words.split(), engine) == 2
    assert message in capsys.readouterr().err
    assert not engine.models


def test_interrupting_closes_the_engine(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """^C: status 130, the engine's block is left in order, no traceback."""
    assert run(["transcribe", "interrupt.wav"], engine) == 130
    assert engine.closed
    assert capsys.readouterr().err == "triolet: stopped; nothing is transcribed of interrupt.wav\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupting_again_while_it_closes_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    """The second ^C is Python's own; still no traceback."""
    assert run(["transcribe", "interrupt.wav"], PaperEngine(closing=KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err


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


def test_other_errors_in_groups_are_not_swallowed() -> None:
    """A bug keeps its traceback."""
    with pytest.raises(BaseExceptionGroup):
        main(["transcribe", "--model", "m", __file__], PaperEngine(closing=ZeroDivisionError()))


def job(out: TextIO, *files: str, format_: Format = TEXT) -> Job:
    """Files to ``out``."""
    return Job(files=files, destination=lambda clear: standard_output(out, files, format_, SubtitleSettings(), clear))


async def test_a_reader_that_goes_away_ends_the_work(engine: PaperEngine) -> None:
    """The other files are cancelled, the engine closes, the status is that of SIGPIPE."""

    class Pipe(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    assert await job(Pipe(), "a.wav", *["slow.wav"] * 5).run(lambda: engine("model", EngineConfig())) == 141
    assert engine.closed
    assert engine.finished < 6


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-16", "utf-8", "UTF8"])
async def test_json_is_valid_in_every_encoding(engine: PaperEngine, encoding: str) -> None:
    """What the encoding lacks is escaped as JSON does, not as Python does; names that are no text are kept too."""
    names = ("é.wav", "日本.wav", "🎙.wav", "\udcff.wav")
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    assert await job(out, *names, format_=JSON).run(lambda: engine("model", EngineConfig())) == 0
    lines = raw.getvalue().decode(encoding).splitlines()
    assert [json.loads(line)["file"] for line in lines] == list(names)
    assert ("日本" in lines[1]) == encoding.lower().startswith(("utf-8", "utf8"))


async def test_output_that_cannot_be_written_is_one_line(
    engine: PaperEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk: the other files are cancelled, the engine closes, status 1."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    assert await job(Full(), "a.wav", *["slow.wav"] * 5).run(lambda: engine("model", EngineConfig())) == 1
    assert engine.closed
    assert capsys.readouterr().err == "triolet: the output cannot be written: [Errno 28] No space left on device\n"


def test_without_standard_output_nothing_is_loaded(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``>&-`` in a shell: Python has no standard output then."""
    for words in (["transcribe", "a.wav"], ["devices"]):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", None)
            assert run(words, engine) == 1
        assert capsys.readouterr().err.startswith("triolet: standard output is closed; send it somewhere")
    assert not engine.models


@pytest.mark.real_time
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [f"transcribe --model m {__file__}", "devices", "--help", "--version"])
def test_a_full_disk_leaves_no_traceback(words: str) -> None:
    """In a real process, also at its exit: one line and status 1."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", REAL, *words.split()],
            input=b"go\n",
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
            check=False,
        )
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert done.stderr.startswith(b"triolet: the output cannot be written: [Errno 28]")


def test_a_broken_standard_error_keeps_the_status(engine: PaperEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be told; the status tells."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert run(["transcribe", "bad.wav"], engine) == 1


REAL = textwrap.dedent(
    """
    import sys
    from contextlib import asynccontextmanager
    from triolet.api.command_line.main import main

    from types import SimpleNamespace

    from triolet.api.outputs.results import Progress, Transcript
    from triolet.api.speech.segments import SegmentStream
    from triolet.core.model import WhisperTokens

    async def nothing():
        return
        yield

    class Engine:
        whisper = WhisperTokens(
            start_id=0,
            no_timestamps_id=1,
            timestamp_begin_id=2,
            previous_id=None,
            no_speech_id=None,
            language_ids={},
            task_ids={},
            max_initial_timestamp=None,
        )
        model = SimpleNamespace(whisper=whisper, eos_token_ids=())

        @asynccontextmanager
        async def stream_transcription(self, audio, **options):
            so_far = Transcript(text="", language="en", language_probability=1.0, duration=1.0, segments=())
            yield SegmentStream(nothing(), lambda: Progress(so_far=so_far, duration=1.0, position=1.0))

    @asynccontextmanager
    async def open_engine(model, config):
        yield Engine()

    sys.stdin.readline()
    main(sys.argv[1:], open_engine)
    """
)


@pytest.mark.real_time
@pytest.mark.parametrize(
    "words",
    [
        f"transcribe --model m {__file__} {__file__}",
        "completion bash",
        "devices",
        "--help",
        "trace --help",
        "--version",
    ],
    ids=lambda words: " ".join(words.split()[:2]),
)
def test_head_leaves_no_traceback(words: str) -> None:
    """In a real pipe whose reader is gone: status 141 and a clean standard error, also at exit."""
    with subprocess.Popen(
        [sys.executable, "-c", REAL, *words.split()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(b"go\n", timeout=300)
    assert (process.returncode, errors) == (141, b"")


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
    assert re.search(r"left, \d+\.\dx", terminal.getvalue())
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


@pytest.mark.real_time
def test_the_command_starts_without_torch() -> None:
    """--help answers at once: torch and transformers are imported by the commands that need them."""
    code = (
        "import sys, triolet.api.command_line.main; print({'torch', 'transformers', 'av', 'tqdm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


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


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command and by the package, which reads it only when asked."""
    assert run(["--version"], PaperEngine()) == 0
    assert capsys.readouterr().out == f"triolet {triolet.__version__}\n"
    assert triolet.__version__ == importlib.metadata.version("triolet")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = triolet.nothing
