"""A result without text says why, and which option helps, unless the audio is digital silence."""

from __future__ import annotations

import numpy as np
import pytest

from triolet import Engine, EngineConfig, demo
from triolet.api.command_line.main import main

NOISE = next(str(sample.path) for sample in demo.samples() if "noise.flac" in str(sample.path))
UNHEARD = "no text, since voice activity finds no speech in audio that is not digital silence; "
UNWRITTEN = "no text, since the model finds no speech in audio that is not digital silence; "


@pytest.mark.parametrize("parallel", [False, True])
async def test_where_voice_activity_finds_no_speech_the_option_is_named(parallel: bool) -> None:
    async with Engine(demo.checkpoint(), config=EngineConfig(device="cpu")) as engine:
        assert (await engine.transcribe(NOISE, parallel=parallel)).warnings == (
            f'{UNHEARD}voice_activity="off" reads all of it',
        )
        assert (await engine.transcribe(np.zeros(32_000, np.float32), parallel=parallel)).warnings == ()


async def test_where_the_model_finds_no_speech_the_option_is_named() -> None:
    async with Engine(demo.checkpoint(), config=EngineConfig(device="cpu")) as engine:
        found = await engine.transcribe(NOISE, voice_activity="off", no_speech_threshold=0.0, logprob_threshold=None)
        assert (found.text, found.warnings) == ("", (f"{UNWRITTEN}no_speech_threshold=None keeps text that it doubts",))
        silence = await engine.transcribe(np.zeros(32_000, np.float32), voice_activity="off")
        assert silence.warnings == ()


def test_the_command_names_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["transcribe", "--model", "demo", NOISE])
    assert f'noise.flac: warning: {UNHEARD}--voice-activity="off" reads all of it' in capsys.readouterr().err
