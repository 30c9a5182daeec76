"""What cannot work is refused by the commands before a model is loaded: the message and the exit status."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..checkpoints.ctranslate2 import packed
from .paper import Terminal, refuse, run_as_it_is

T, G, E = "transcribe a.wav --model m", "generate m hi", "embed m hi"


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that the command lines name."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "ct2", "llama", "x", "y"):
        Path(name).mkdir()
    for name in ("a.wav", "b.wav", "x/a.wav", "y/a.wav"):
        Path(name).write_bytes(b"RIFF")
    Path("ct2/model.bin").write_bytes(packed({}, {}, spec="TransformerSpec"))
    Path("llama/config.json").write_text(json.dumps({"model_type": "llama"}))
    texts = {"a.gguf": "GGUF", "a.srt": "1", "no.json": "{} {}", "deep.json": "[" * 100_000, "none": ""}
    texts |= {"lines": "\n \n", "some.json": '{"type": "object"}', "endless.json": '{"$ref": "#/absent"}'}
    for name, text in texts.items():
        Path(name).write_text(text)
    Path("latin").write_bytes(b"ab\xff")
    return tmp_path


def refusals() -> Iterator[tuple[str, int, str]]:
    """A command line, its status, and its message. ``< FILE`` is its standard input, ``<&-`` closes that, ``< tty`` is
    a terminal."""
    # options and arguments that are wrong by themselves
    for command in (T, G, E):
        yield f"{command} --device gpu", 2, "--device='gpu'; allowed:"
        yield f"{command} --threads -1", 2, "--threads=-1; allowed:"
        yield f"{command} --nonsense", 2, "No such option"
        yield f"{command} --dtype int4", 2, "'int4' is not one of"
        yield f"{command} --trace -", 2, "--trace - is not allowed: standard output is for the results"
        yield f"{command} --trace absent/t.json", 1, "absent/t.json: the trace cannot be written (No such file or dir"
    yield f"{T} --trace b.wav", 1, "b.wav: this file exists and is not a trace; give the trace another name"
    yield f"{T} --trace .", 1, ".: the trace cannot be written (Is a directory)"
    yield "sing a.wav", 2, "No such command 'sing'"
    yield "completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'"
    yield "trace", 2, "Missing argument 'EVENTS'"
    yield "trace absent.jsonl", 1, "absent.jsonl: there is no such file; check the name"
    yield "trace none -o a.wav", 1, "a.wav: this file exists and is not a trace"

    # models
    for command in ("transcribe a.wav --model {}", "generate {} hi", "embed {} hi"):
        told = "there is no folder ./absent; allowed: a checkpoint's folder or a hub id such as"
        yield command.format("./absent"), 1, told.replace("./", "")
    for absent in ("folder /absent/folder/of/mine", "file absent.gguf"):
        yield f"generate {absent.split()[1]} hi", 1, f"there is no {absent}; allowed"
    yield "generate empty hi", 1, "empty has no config.json, so it is not a checkpoint; give a folder that save_pre"
    yield "embed a.gguf hi", 1, "a.gguf is a damaged GGUF file: it ends within its version; download it again"
    yield "transcribe a.wav --model ct2", 1, "ct2 has a TransformerSpec of CTranslate2; allowed of its models: Whisp"
    yield "transcribe a.wav --model llama", 1, "llama (llama) cannot transcribe; allowed: models of speech"
    for line in ("transcribe a.wav", "transcribe absent.wav a.wav", "transcribe x a.wav", "generate", "embed", "pull"):
        yield line, 2, f"{'--model' if 'a.wav' in line else 'MODEL'} is missing; give "

    # transcribe
    yield "transcribe", 2, "Missing argument '[MODEL] FILES...'"
    for words, told in {
        "--task sing": "'sing' is not one of 'transcribe', 'translate'",
        "--format xml": "'xml' is not one of",
        "--at-once 0": "Invalid value for '--at-once'",
        "--beam-size 0": "--beam-size=0; allowed: an integer, 1 to 64",
        "--temperature-increment-on-fallback 0": "--temperature-increment-on-fallback=0.0; allowed: a number of",
        "--temperature x": "'x'; allowed: numbers separated by commas",
        "--patience x": "'x'; allowed: one number or None",
        "--suppress-tokens=-2,5": "--suppress-tokens=(-2, 5); allowed: a list of token ids",
        "--hallucination-silence-threshold 2": "allowed: --timestamps='word', since it needs",
        "--timestamps none --word-timestamps": "--timestamps=none with --word-timestamps; give only one",
        "--clip-timestamps 5,1": "--clip-timestamps='5,1'; allowed: rising times in seconds",
        "--max-line-width 20 -f srt": "--max-line-width needs words with their times; give --word-timestamps",
        "--word-timestamps --max-line-width 0": "--max-line-width=0; allowed: an integer",
        "--format all": "--format all writes several files; give a folder for them: --output-dir DIR",
        "--format srt b.wav": "2 outputs of --format srt cannot be written one after the other; give --output-dir DIR",
        "--language klingon": "'klingon' is not a language of Whisper",
        "--language germna": "did you mean german",
        "--compute_type int16": "--compute-type int16 is not supported; allowed: default, auto, float32",
        "--word_timestamps=maybe": "--word-timestamps=maybe; allowed: --word-timestamps or --no-word-timestamps",
        "- -": "- is given 2 times; standard input can be read only once",
        "y/a.wav -o out -f srt": "the outputs of a.wav and y/a.wav would both be written to out/a.srt; rename one",
        "a.wav -o out -f srt": "the outputs of a.wav and a.wav would both be written to out/a.srt; rename one",
        "a.srt a.wav.mp3 -o . -f srt": "would both be written to ./a.wav.srt",
    }.items():
        yield f"{T} {words}", 2, told
    yield "transcribe a.srt --model m -o . -f srt", 2, "a.srt would be overwritten by its own transcript"
    yield f"{T} -o a.gguf/out", 1, "a.gguf/out: this folder cannot be made (Not a directory)"
    yield "transcribe absent.wav empty --model m", 1, "absent.wav: there is no such file; check the name and the folder"
    yield "transcribe absent.wav empty --model m", 1, "empty: it is a folder; give the files in it (empty/*)"
    yield "transcribe absent://a --model m", 1, "absent://a: there is no such file, and addresses are not fetched; down"
    yield "transcribe '' --model m", 1, "'': the name of the file is empty; check the quotes, and that the variable"

    # generate and embed
    for words, told in {
        "there": "'there' follows the prompt; allowed: one prompt. Put all of it in quotes",
        "--temperature -1": "temperature=-1.0; allowed: a number, 0 or more",
        "--max-tokens 0": "--max-tokens=0; allowed: an integer, 1 to",
        "--top-p 2": "--top-p=2.0; allowed: a number, more than 0, up to 1",
        "--speculate -1": "Speculation.tokens=-1; allowed: an integer, 1 to 64",
        "--raw --system x": "--system with --raw: a raw prompt has no system message",
        "--raw --chat-template x": "--chat-template with --raw: a raw prompt uses no template",
        "--chat-template lines": "; allowed: the text of a Jinja template",
        "--system \udcff": "--system is not UTF-8 text",
        "--regex (": "--regex: the structure (regex) cannot be followed",
        "--regex a --choice b": "--regex with --choice; allowed: one of them",
        "--regex a --beam-size 2": "a structure with --beam-size=2; allowed: no structure, or --beam-size=1",
        "--choice ''": "allowed: a list of texts, none of them empty",
        "--presence-penalty 3": "--presence-penalty=3.0; allowed: a number, -2 or more, up to 2",
        "--logit-bias 5": "--logit-bias 5; allowed: ID=NUMBER, such as 50=-2.5",
        "--logit-bias 5=1 --logit-bias 5=2": "with a token twice",
        "--stop-token-ids x": "'x'; allowed: numbers separated by commas",
        "--logprobs 2": "--logprobs needs an output that shows them; give --json or --json-lines too",
        "--prompt-logprobs 2": "--prompt-logprobs needs an output that shows them; give --json or --json-lines too",
        "--json --json-lines": "--json with --json-lines; allowed: one of them",
        "--image - --audio -": "--image - and --audio - would all be read from standard input",
    }.items():
        yield f"{G} {words}", 2, told
    yield "generate m ''", 2, "the prompt is empty; give a text, or --image or --audio"
    yield "generate m \udcff", 2, "PROMPT is not UTF-8 text (at character 0); convert it first"
    yield "generate m --image -", 2, "the prompt (not given as an argument) and --image - would all be read from sta"
    yield "generate m - --image -", 2, "the prompt and --image - would all be read from standard input"
    for words, told in {
        "--image absent.png": "absent.png: there is no such file; check the name and the folder",
        "--image .": ".: it is a folder; give the files in it",
        "--image a.gguf": "is not an image that can be read (its format is not known); allowed: PNG,",
        "--chat-template absent.jinja": "absent.jinja: there is no such file",
        "--chat-template latin": "--chat-template latin: it cannot be read ('utf-8' codec",
        "--json-schema absent.json": "absent.json: there is no such file",
        "--json-schema -": "-: it cannot be read (No such file or directory)",
        "--json-schema no.json": "no.json: it is not JSON (Extra data",
        "--json-schema none": "none: it is not JSON (Expecting value",
        "--json-schema deep.json": "deep.json: it is nested too deeply to be read; let the schema refer",
        "--json-schema endless.json": "endless.json: the structure (json_schema) cannot be followed: Pointer '/absent'",
        "--image - < latin": "standard input: 3 bytes is not an image that can be read",
        "--image - < none": "standard input: it is empty; pipe an image in",
        "--audio - < none": "standard input: it is empty; pipe audio in",
        "--audio - <&-": "standard input: it is closed; pipe audio in, or redirect it from a file (< FILE)",
    }.items():
        yield f"{G} {words}", 1, told
    yield "transcribe a.wav --model m --aligner n", 2, "--aligner finds the times of words; give --word-timestamps"
    yield "transcribe a.wav --model m --diarizer n --speakers 2", 2, "a number of speakers is given with diarizer"
    speakers = "transcribe a.wav --model m --speakers --known-speaker"
    yield f"{speakers} Ada", 2, "--known-speaker='Ada'; allowed: NAME=FILE, once for each name"
    yield f"{speakers} Ada=a.wav --known-speaker Ada=b.wav", 2, "--known-speaker='Ada=b.wav'; allowed: NAME=FILE, once"
    yield f"{speakers} Ada=absent.wav", 2, "--known-speaker Ada=absent.wav: there is no such file"
    yield "generate m < lines", 2, "the prompt is empty"
    yield "generate m < latin", 1, "standard input: it is not UTF-8 text (at byte 2); give images and audio with"
    yield "generate m <&-", 1, "standard input: it is closed; pipe a prompt in, or redirect it from a file (< FILE)"
    yield "generate m < tty", 2, "PROMPT is missing; give it as an argument"  # else it looks like a model that is slow
    yield f"{E} --pooling sum", 2, "'sum' is not one of 'mean', 'cls', 'last'"
    yield "embed m < latin", 1, "standard input: it is not UTF-8 text (at byte 2); embed reads only text"
    yield "embed m < lines", 2, "standard input has no text; give one text a line"
    yield "embed m < tty", 2, "TEXT is missing; give texts as arguments"


@pytest.mark.parametrize(("line", "status", "told"), list(refusals()))
def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    line: str, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """2: it is wrong by itself. 1: something that was named cannot be used, which is one line. In terms of flags."""
    line, _, stdin = line.replace("<&-", "< closed").partition(" < ")
    with ExitStack() as stack:
        streams: dict[str, Any] = {"closed": None, "tty": Terminal()}
        opened = streams[stdin] if stdin in streams else stack.enter_context(open(stdin or os.devnull))
        monkeypatch.setattr(sys, "stdin", opened)
        assert run_as_it_is(shlex.split(line), refuse) == status
    out, err = capsys.readouterr()
    assert told in " ".join(err.split())
    assert status == 2 or all(line.startswith("triolet: ") for line in err.splitlines())
    assert err.count("Error:") < 2
    assert "Traceback" not in err
    assert out == ""
    assert Path("a.wav").read_bytes() == b"RIFF"
    assert Path("a.srt").read_text() == "1"
