"""``triolet transcribe`` over an engine of paper: its flags, its files, and what is left when it is stopped."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import numpy as np
import pytest
import soundfile

from triolet.api.command_line.flags import temperatures
from triolet.api.command_line.other_programs import IGNORED, TRANSLATED, translated
from triolet.api.command_line.pages import in_flags
from triolet.api.command_line.transcribe import transcribe
from triolet.api.command_line.transcribe_job import ProgressBar, seconds_of
from triolet.api.outputs.languages import language_name
from triolet.api.outputs.results import Turn
from triolet.api.speech.options import OPTIONS, TranscribeOptions
from triolet.core.languages import language_code

from .paper import PaperEngine, Terminal, run

pytestmark = pytest.mark.usefixtures("folder")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def engine() -> PaperEngine:
    return PaperEngine()


# -- flags -----------------------------------------------------------------------------------------------------------


VALUES = {
    "audio_track": ("de", "de"),
    "max_audio_seconds": ("60", 60.0),
    "language": ("de", "de"),
    "task": ("translate", "translate"),
    "initial_prompt": ("Names: Åsa.", "Names: Åsa."),
    "carry_initial_prompt": (None, True),
    "hotwords": ("Åsa, Ödön", "Åsa, Ödön"),
    "prefix": ("Well,", "Well,"),
    "condition_on_previous_text": (None, True),
    "prompt_reset_temperature": ("0.3", 0.3),
    "timestamps": ("word", "word"),
    "aligner": ("aligner", "the engine"),
    "temperature": ("0,0.5", (0.0, 0.5)),
    "beam_size": ("3", 3),
    "patience": ("None", None),
    "length_penalty": ("0.5", 0.5),
    "repetition_penalty": ("1.1", 1.1),
    "no_repeat_ngram_size": ("3", 3),
    "max_new_tokens": ("128", 128),
    "best_of": ("None", 1),
    "compression_ratio_threshold": ("None", None),
    "logprob_threshold": ("-2", -2.0),
    "no_speech_threshold": ("0.4", 0.4),
    "hallucination_silence_threshold": ("2", 2.0),
    "clip_timestamps": ("1,2.5,4", "1,2.5,4"),
    "max_initial_timestamp": ("1", 1.0),
    "suppress_tokens": ("-1,2", (-1, 2)),
    "prepend_punctuations": ("(", "("),
    "append_punctuations": (")", ")"),
    "voice_activity": ("off", "off"),
    "vad_threshold": ("0.6", 0.6),
    "vad_neg_threshold": ("0.3", 0.3),
    "vad_min_speech_duration_ms": ("250", 250.0),
    "vad_max_speech_duration_s": ("20", 20.0),
    "vad_min_silence_duration_ms": ("2000", 2000.0),
    "vad_speech_pad_ms": ("200", 200.0),
    "encoder_context": ("trimmed", "trimmed"),
    "parallel": (None, True),
    "language_detection_segments": ("3", 3),
    "language_detection_threshold": ("0.9", 0.9),
    "multilingual": (None, True),
    "punctuation": ("True", True),
    "speakers": ("2-5", "2-5"),
    "known_speakers": ("Ada=a.wav", {"Ada": "a.wav"}),
    "diarizer": ("diarizer", "the engine"),
    "strict": (None, True),
    "seed": ("None", None),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_flag_reaches_the_engine_under_its_fields_name(name: str, engine: PaperEngine) -> None:
    """And no other option does."""
    text, value = VALUES[name]
    flag = "--known-speaker" if name == "known_speakers" else f"--{name.replace('_', '-')}"
    words = [flag] if text is None else [flag, text]
    words_too = ("timestamps", "word")
    needed = {
        "aligner": words_too,
        "hallucination_silence_threshold": words_too,
        "known_speakers": ("speakers", "any"),
    }
    also = [needed[name]] if name in needed else []
    given = [word for option, setting in also for word in (f"--{option}", setting)]
    assert run(["transcribe", "a.wav", *words, *given], engine) == 0
    expected = {name: engine if value == "the engine" else value, **dict(also)}
    assert engine.asked == [("a.wav", expected)]


@pytest.mark.parametrize(
    ("given", "increment", "expected"),
    [
        ((0.0,), 0.2, (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        ((0.5,), 0.2, (0.5, 0.7, 0.9)),
        ((0.0,), None, (0.0,)),
        ((0.0,), 0.3, (0.0, 0.3, 0.6, 0.9)),
        ((0.0, 0.9), 0.2, (0.0, 0.9)),
        ((1.5,), 0.2, (1.5,)),
    ],
)
def test_one_temperature_rises_and_several_are_taken(
    given: tuple[float, ...], increment: float | None, expected: tuple[float, ...]
) -> None:
    """As numpy's arange(given, 1, increment), which openai/whisper takes."""
    assert temperatures(given, increment) == expected


def test_messages_speak_of_flags_and_leave_plain_words_alone() -> None:
    """A parameter whose name is a word is meant where a value follows."""
    message = (
        "prefix with parallel=True; beam_size too; the language; xbeam_size; task='x'; engine.embed(...); "
        "strict=False; EngineConfig(threads=1); EngineConfig(max_pending=1)"
    )
    with click.Context(transcribe):
        assert in_flags(message) == (
            "prefix with --parallel; --beam-size too; the language; xbeam_size; --task='x'; triolet embed; "
            "--no-strict; --threads=1; EngineConfig(max_pending=1)"
        )


def test_languages_are_those_of_the_table_of_transformers() -> None:
    """By code, name and token; unknown codes keep their name."""
    assert [language_code(name) for name in ("de", "German", " <|de|> ", "castilian", "xx")] == [
        "de",
        "de",
        "de",
        "es",
        None,
    ]
    assert (language_name("de"), language_name("xx")) == ("german", "xx")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.wav", "--speakers"], "A: said in a.wav,|B: möglichst.|"),
        (
            ["--speakers", "a.wav", "b.wav"],
            "a.wav: A: said in a.wav, B: möglichst.|b.wav: A: said in b.wav, B: möglichst.|",
        ),
        (["a.wav", "--speakers", "2-3", "-f", "vtt"], "<v A>said in a.wav,||00:01.000 --> 00:02.500|<v B>möglichst.||"),
    ],
)
def test_speakers_are_written_when_all_is_heard(
    words: list[str], expected: str, engine: PaperEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.turns = (Turn(start=0.0, end=1.0, speaker="A"), Turn(start=1.0, end=2.5, speaker="B"))
    assert run(["transcribe", *words], engine) == 0
    assert capsys.readouterr().out.endswith(expected.replace("|", "\n"))


@pytest.mark.parametrize("flag", ["--speakers=0", "--speakers=many", "--known-speaker=Ada=a.wav"])
def test_speakers_that_make_no_sense_are_refused_before_a_model_is_loaded(flag: str, engine: PaperEngine) -> None:
    assert run(["transcribe", "a.wav", flag], engine) == 2
    assert not engine.models


# -- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--output_dir out", "--output-dir out"),
        ("--output_format=srt", "--output-format=srt"),
        ("--word_timestamps True", "--word-timestamps"),
        ("--word_timestamps=False a", "--no-word-timestamps a"),
        ("--condition_on_previous_text False", "--no-condition-on-previous-text"),
        ("--verbose False", "--no-verbose"),
        ("--highlight-words a.wav", "--highlight-words a.wav"),
        ("--fp16 False", "--dtype float32"),
        ("--fp16=True", "--dtype auto"),
        ("--vad_filter True", "--voice-activity skip"),
        ("--batched True", "--parallel"),
        ("--model_directory dir", "--model dir"),
        ("--compute_type float16", "--dtype float16"),
        ("--compute_type int8", "--quantization int8"),
        ("--compute_type int8_float32", "--quantization int8 --dtype float32"),
        ("--prompt_reset_on_temperature 0.4", "--prompt-reset-temperature 0.4"),
        ("--initial_prompt --batched", "--initial-prompt --batched"),
        ("--speaker_num 3", "--speakers 3"),
        ("--speakers 3 a.wav", "--speakers 3 a.wav"),
        ("--speakers 2-5", "--speakers 2-5"),
        ("--speakers 2,5", "--speakers 2,5"),
        ("--speakers a.wav", "--speakers=any a.wav"),
        ("a.wav --speakers", "a.wav --speakers=any"),
        ("--speakers --strict", "--speakers=any --strict"),
        ("--diarize a.wav", "--speakers=any a.wav"),
        ("-o out -f srt", "-o out -f srt"),
        ("-- --output_dir", "-- --output_dir"),
        ("--unheard_of x", "--unheard_of x"),
    ],
)
def test_the_spelling_of_whisper_and_whisper_ctranslate2_is_understood(theirs: str, ours: str) -> None:
    assert translated(theirs.split(), transcribe.params) == (ours.split(), [])


@pytest.mark.parametrize("name", [name for name, ours in TRANSLATED.items() if "{}" not in str(ours)])
def test_a_value_that_has_no_counterpart_is_refused_with_those_that_have_one(name: str) -> None:
    allowed = ", ".join(TRANSLATED[name])
    with pytest.raises(click.UsageError, match=f"^{name} whatever is not supported; allowed: {allowed}; "):
        translated([name, "whatever"], transcribe.params)


@pytest.mark.parametrize("name", IGNORED)
def test_what_makes_no_sense_here_is_ignored_with_a_warning(name: str) -> None:
    warning = f"{name} whatever has no effect: {IGNORED[name]}"
    assert translated([name, "whatever"], transcribe.params) == ([], [warning])


def test_a_script_for_whisper_runs_as_it_is(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files have the names that whisper gives them."""
    engine.words = True
    script = (
        "a.wav --model turbo --output_dir out --output_format all --verbose False --language English --fp16 False "
        "--word_timestamps True --max_line_width 12 --max_line_count 2 --temperature 0 --best_of 5 --beam_size 5 "
        "--initial_prompt Hi --suppress_tokens -1 --clip_timestamps 0 --condition_on_previous_text True "
        "--logprob_threshold -1.0 --model_dir models"
    )
    assert run(["transcribe", *script.split()], engine) == 0
    assert capsys.readouterr() == (
        "",
        "triolet: warning: --model-dir models has no effect: checkpoints are in the cache of the hub; set "
        "HF_HUB_CACHE in the environment to move it\n",
    )
    assert sorted(os.listdir(folder / "out")) == ["a.json", "a.srt", "a.tsv", "a.txt", "a.vtt"]
    ((_, options),) = engine.asked
    assert options["temperature"] == (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert options["suppress_tokens"] == (-1,)
    assert TranscribeOptions(**options).timestamps == "word"


SHARED = """language task initial_prompt carry_initial_prompt hotwords prefix condition_on_previous_text temperature
beam_size patience length_penalty repetition_penalty no_repeat_ngram_size best_of compression_ratio_threshold
logprob_threshold no_speech_threshold hallucination_silence_threshold clip_timestamps suppress_tokens multilingual
prepend_punctuations append_punctuations vad_threshold vad_min_speech_duration_ms vad_max_speech_duration_s
vad_min_silence_duration_ms"""  # flags of openai/whisper's or whisper-ctranslate2's commands, under the same names


def test_the_table_of_the_documents_has_every_flag_of_the_other_programs() -> None:
    text = (ROOT / "docs/speech.md").read_text(encoding="utf-8")
    shared = set(SHARED.split())
    assert shared <= OPTIONS.keys()
    foreign = {name[2:].replace("-", "_") for name in (*TRANSLATED, *IGNORED)}
    assert {name for name in shared | foreign if f"`--{name}`" not in text} == set()


# -- files -----------------------------------------------------------------------------------------------------------


def test_files_are_named_after_the_audio_and_standard_output_stays_empty(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file that was written is a line on standard error, with the number of files that have ended."""
    words = ["--output-dir", "new/out", "-f", "srt"]
    assert run(["transcribe", "x/talk.one.wav", "b.wav", "bad.wav", *words], engine) == 1
    out, err = capsys.readouterr()
    told = {re.sub(r"\d of", "N of", line) for line in err.splitlines()}
    wrote = {f"triolet: wrote new/out/{name}.srt (N of 3)" for name in ("b", "talk.one")}
    assert (out, told) == ("", wrote | {"triolet: bad.wav: cut short: promised 2, found 1"})
    assert len(set(re.findall(r"\d of 3", err))) == 2
    assert run(["transcribe", "b.wav", "--no-verbose", *words], engine) == 0
    assert capsys.readouterr() == ("", "")
    assert sorted(os.listdir(folder / "new/out")) == ["b.srt", "talk.one.srt"]
    assert (folder / "new/out/b.srt").read_text(encoding="utf-8") == (
        "1\n00:00:00,000 --> 00:00:01,000\nsaid in b.wav,\n\n2\n00:00:01,000 --> 00:00:02,500\nmöglichst.\n\n"
    )


def test_a_folder_is_its_media_files_and_one_stem_in_two_formats_keeps_the_extensions(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("in/b.mp3", "in/b.WAV", "in/c.ogg", "in/notes.txt", "in/deep.mp4/d.wav", "empty/e.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    words = ["-o", "out", "--no-verbose", "--no-parallel", "--at-once", "1"]
    assert run(["transcribe", "in", "empty", *words], engine) == 1
    assert [name for name, _ in engine.asked] == ["in/b.WAV", "in/b.mp3", "in/c.ogg"]
    assert sorted(os.listdir("out")) == ["b.WAV.txt", "b.mp3.txt", "c.txt"]
    assert capsys.readouterr().err == "triolet: empty: it is a folder; give the files in it (empty/*)\n"


def test_the_time_left_runs_down_while_no_more_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr("tqdm.std.time", lambda: now.seconds)
    monkeypatch.setattr(sys, "stderr", Terminal())

    def left(seconds: float, done: float) -> str:
        now.seconds += seconds
        bar.advance(done)
        return re.findall(r"([\d:?]+) left", sys.stderr.getvalue())[-1]  # type: ignore[attr-defined]

    with ProgressBar() as bar:
        bar.begin(120.0)
        assert [left(5, 0), left(5, 30), left(10, 0), left(15, 0)] == ["?", "00:30", "00:20", "00:05"]
        assert left(9, 0) == "00:00"
        bar.begin(120.0)  # another file
        assert [left(6, 90), left(20, 0)] == ["00:50", "00:30"]


def test_an_output_that_cannot_be_written_ends_the_work(
    engine: PaperEngine, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out/a.txt").mkdir(parents=True)
    assert run(["transcribe", "a.wav", "-o", "out"], engine) == 1
    assert capsys.readouterr().err == "triolet: out/a.txt: it cannot be written (Is a directory)\n"


def test_a_short_file_does_not_wait_for_a_long_one_before_it(engine: PaperEngine, folder: Path) -> None:
    """In a folder. The long one is stopped before its end; what it said so far is there too."""
    words = ["--no-parallel", "-o", "out", "-f", "text"]
    assert run(["transcribe", "slow.wav", "b.wav", "endless.wav", *words], engine) == 130
    assert (folder / "out/b.txt").read_text(encoding="utf-8") == "said in b.wav,\nmöglichst.\n"
    assert (folder / "out/endless.txt").read_text(encoding="utf-8") == "said in endless.wav,\n"
    assert not (folder / "out/slow.txt").exists()


# -- stopped ---------------------------------------------------------------------------------------------------------


def test_interrupted_json_says_it_too(engine: PaperEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """So that nobody takes it for all."""
    assert run(["transcribe", "endless.wav", "-f", "json"], engine) == 130
    told = json.loads(capsys.readouterr().out)
    assert told["text"] == "said in endless.wav,"
    assert told["warnings"] == ["stopped before its end; what is said after 1.00 s is missing"]


def test_interrupted_in_parallel_every_window_that_was_read_is_written(
    engine: PaperEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each format. Until then the bar has counted the window, though its text waits for the one before it."""
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["transcribe", "ahead.wav", "-f", "all", "-o", "out"], engine) == 130
    assert " 60% of 2 s" in err.getvalue()
    missing = "stopped before its end; what is said from 0.00 to 1.00 s is missing"
    assert f"triolet: ahead.wav: {missing}\n" in err.getvalue()
    written = {name: (folder / "out" / name).read_text(encoding="utf-8") for name in os.listdir(folder / "out")}
    told = json.loads(written.pop("ahead.json"))
    assert (told["text"], told["warnings"]) == ("möglichst.", [missing])
    assert written == {
        "ahead.txt": "möglichst.\n",
        "ahead.srt": "1\n00:00:01,000 --> 00:00:02,500\nmöglichst.\n\n",
        "ahead.vtt": "WEBVTT\n\n00:01.000 --> 00:02.500\nmöglichst.\n\n",
        "ahead.tsv": "start\tend\ttext\n1000\t2500\tmöglichst.\n",
    }


def test_a_file_that_fails_at_its_beginning_leaves_what_an_earlier_run_wrote(engine: PaperEngine, folder: Path) -> None:
    (folder / "bad.txt").write_text("before")
    assert run(["transcribe", "bad.wav", "-o", "."], engine) == 1
    assert (folder / "bad.txt").read_text() == "before"


# -- terminals -------------------------------------------------------------------------------------------------------


def test_at_a_terminal_the_text_of_one_file_comes_with_its_times(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard output, and so not on standard error too."""
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["transcribe", "a.wav"], engine) == 0
    assert out.getvalue() == "[00:00.000 --> 00:01.000] said in a.wav,\n[00:01.000 --> 00:02.500] möglichst.\n"
    assert "said" not in err.getvalue()


def test_without_a_known_length_the_bar_counts(
    engine: PaperEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream does not say how long it is."""
    engine.duration = None
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["transcribe", "a.wav"], engine) == 0
    assert "2 s, 00:00" in err.getvalue()
    assert "%" not in err.getvalue()
    assert capsys.readouterr().out == "said in a.wav, möglichst.\n"


def test_a_terminal_obeys_no_character_that_a_model_wrote(engine: PaperEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    assert run(["transcribe", "a\x1b[2J.wav"], engine) == 0
    assert "said in a\\x1b[2J.wav" in err.getvalue()


# -- parallel --------------------------------------------------------------------------------------------------------


def recording(path: Path, seconds: float, suffix: str) -> str:
    name = str(path / f"{seconds:g}.{suffix}")
    soundfile.write(name, np.zeros(int(seconds * 1000), np.float32), 1000 if suffix == "wav" else 8000)
    return name


def test_files_of_more_than_two_minutes_are_parallel(engine: PaperEngine, folder: Path) -> None:
    """Where nobody said otherwise."""
    short, long = recording(folder, 119, "wav"), recording(folder, 121, "wav")
    assert run(["transcribe", short, long], engine) == 0
    assert sorted(engine.asked) == [(short, {}), (long, {"parallel": True})]
    for words, options in [
        (["--no-parallel"], {"parallel": False}),
        (["--prefix", "Well"], {"prefix": "Well"}),
        (["--parallel"], {"parallel": True}),
    ]:
        engine.asked.clear()
        assert run(["transcribe", long, *words], engine) == 0
        assert engine.asked == [(long, options)]


def test_the_length_of_audio_is_what_its_header_says(folder: Path) -> None:
    """Of a pipe nothing is read: it would be gone."""
    name = recording(folder, 3, "wav")
    assert seconds_of(name) == 3.0
    assert seconds_of(Path(name).read_bytes()) == 3.0
    assert seconds_of(b"no audio") is None
    os.mkfifo(folder / "pipe")
    assert seconds_of(str(folder / "pipe")) is None
    assert seconds_of("absent.wav") is None
