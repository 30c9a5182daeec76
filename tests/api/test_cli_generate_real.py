"""``triolet generate`` and ``triolet embed`` with real engines, and as processes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

import triolet
from triolet import demo
from triolet.core.config import EngineConfig
from triolet.core.request import SamplingParams

from .paper import run

SECONDS = 300
CPU = ("--device", "cpu")


# -- the engine itself -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(made: Callable[[str], Path]) -> Callable[[str], str]:
    """The folder of a family's checkpoint. All are made at once, since transformers shows its progress."""
    folders = {family: str(made(family)) for family in ("llama", "qwen2_vl", "llava", "qwen2_audio", "bert")}
    return folders.__getitem__


async def completion(folder: str, **asked: Any) -> triolet.Completion:
    async with triolet.Engine(folder, config=EngineConfig(device="cpu")) as engine:
        return await engine.generate(**asked, sampling=SamplingParams(max_tokens=8))


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_a_conversation_has_the_tokens_that_the_engine_gives(
    family: str, checkpoint: Callable[[str], str], picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the chat template, with an image where the model reads any. Nothing on standard error."""
    folder = checkpoint(family)
    media = [] if family == "llama" else ["--image", str(picture)]
    more = [] if media else ["--prompt-logprobs", "1"]
    assert run(["generate", folder, "what is it?", *media, *more, "--max-tokens", "8", *CPU, "--json"]) == 0
    out, err = capsys.readouterr()
    parts = [{"type": "image", "image": str(picture)}, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": parts if media else "what is it?"}]
    expected = trio.run(lambda: completion(folder, messages=messages))
    assert json.loads(out)["tokens"] == list(expected.token_ids)
    assert json.loads(out)["text"] == expected.text
    assert err == ""
    assert len(json.loads(out).get("prompt_logprobs", ())) == (0 if media else expected.usage.prompt_tokens - 1)


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
        (
            "llama",
            ["hi", "--image", "PICTURE"],
            "the request has image, but LlamaForCausalLM reads only text; leave it out",
        ),
        (
            "llama",
            ["hi " * 600],
            "tokens leaves no room to generate; allowed: up to 511 tokens, since the model has 512",
        ),
        (
            "llama",
            ["hi", "--max-tokens", "9999"],
            "--max-tokens=9999 is too much after a prompt of 6 tokens; allowed: up to 506",
        ),
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
    assert run([*words, "--speculate", "0"]) == 0
    plain = capsys.readouterr().out
    assert run([*words, "--speculate", "4", "-v"]) == 0
    out, err = capsys.readouterr()
    assert out == plain
    assert " draft tokens, " in err


def test_embeddings_are_those_that_the_engine_gives(
    checkpoint: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last bit of float32, which depends on the texts that run in the same step: here it is one."""

    async def vectors() -> Any:
        async with triolet.Engine(checkpoint("bert"), config=EngineConfig(device="cpu")) as engine:
            return await engine.embed(["one"])

    assert run(["embed", checkpoint("bert"), "one", *CPU]) == 0
    found = [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()]
    assert np.array_equal(np.array(found, np.float32), trio.run(vectors))


def test_verbose_tells_what_it_took_on_standard_error(
    checkpoint: Callable[[str], str], picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["what?", "--image", str(picture), "--image", str(picture), "--max-tokens", "5", *CPU, "-v"]
    assert run(["generate", checkpoint("qwen2_vl"), *words]) == 0
    told = capsys.readouterr().err
    assert "(Qwen2VLForConditionalGeneration) on cpu, float32; " in told
    assert " tokens read, 5 written\ntriolet: the first token after " in told
    assert "images and sounds encoded: 1" in told  # they are the same
    assert " MiB: weights " in told


# -- processes -------------------------------------------------------------------------------------------------------

UNHURRIED = textwrap.dedent(
    """
    from triolet.core import config
    config.EngineConfig.__init__.__wrapped__.__kwdefaults__["stage_seconds"] = 86_400.0
    from triolet.__main__ import main
    main()
    """
)
"""The command, whose stages nothing cuts off: that would be told on standard error."""


@pytest.mark.real_time
def test_a_real_process_writes_text_alone_and_can_be_interrupted(
    checkpoint: Callable[[str], str], tmp_path: Path
) -> None:
    """No progress bar of a load, no warning. The first piece is read, then comes a ^C; of a model that writes more than
    a pipe holds, and no line end."""
    folder = tmp_path / "long"
    shutil.copytree(checkpoint("llama"), folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ends = [number for token, number in vocabulary.items() if token.endswith("Ċ")]
    for name, changes in (
        ("config.json", lambda settings: {"max_position_embeddings": 100_000}),
        ("generation_config.json", lambda settings: {"suppress_tokens": [settings["eos_token_id"], *ends]}),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **changes(settings)}))
    with subprocess.Popen(
        [sys.executable, "-c", UNHURRIED, "generate", folder, "hi", *CPU],
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
