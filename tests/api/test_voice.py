"""Voice activity: the network's probabilities are the package's own, speech is heard and nothing else is."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from triolet import demo
from triolet.api.inputs.audio import Samples, load_audio
from triolet.api.inputs.recording import Recording
from triolet.api.speech.hearing import Hearing
from triolet.api.speech.silero import FRAME, WEIGHTS, Silero
from triolet.api.speech.voice import Probabilities, SpanRules, SpeechSpan, at_rate

RATE = 16_000
SAMPLES = {Path(sample.path).name: Path(sample.path) for sample in demo.samples()}
REAL = os.environ.get("TRIOLET_REAL")
SPOKEN = sorted(name for name in SAMPLES if name not in ("noise.flac", "silence.flac"))


@pytest.fixture(scope="module")
def silero() -> Silero:
    return Silero()


def heard(silero: Silero, samples: Samples) -> Probabilities:
    listener = silero.listen()
    return np.concatenate([listener.hear(samples), listener.end()])


async def spans_of(source: object, silero: Silero) -> list[SpeechSpan]:
    async with Recording(source) as recording:  # type: ignore[arg-type]
        hearing = Hearing(recording, silero, SpanRules())
        await hearing.hear(2**40)
        assert hearing.ended
        return [SpeechSpan(start, stop) for start, stop in hearing.spans]


def packages_network() -> torch.jit.ScriptModule:
    """The network that the package runs by default. The package itself is not imported: that would change torch's
    threads."""
    spec = importlib.util.find_spec("silero_vad")
    assert spec is not None
    assert spec.submodule_search_locations
    return torch.jit.load(str(Path(spec.submodule_search_locations[0], "data/silero_vad.jit"))).eval()


def by_the_package(network: torch.jit.ScriptModule, samples: Samples) -> Probabilities:
    """Frame by frame, as it streams."""
    network.reset_states()
    frames = np.pad(samples, (0, -len(samples) % FRAME)).reshape(-1, FRAME)
    with torch.no_grad():
        return np.array([float(network(torch.from_numpy(frame.copy())[None], RATE)) for frame in frames], np.float32)


# ---- the network -----------------------------------------------------------------------------------------------------


def test_the_weights_that_ship_are_those_of_the_packages_default_network() -> None:
    """Bit for bit, of the installed package: 6.2.3 has seven files of networks, with three sets of weights."""
    theirs = packages_network().state_dict()
    ours = load_file(WEIGHTS)
    assert {f"_model.{name}" for name in ours} == {name for name in theirs if name.startswith("_model.")}
    for name, weight in ours.items():
        np.testing.assert_array_equal(weight, theirs[f"_model.{name}"].numpy(), err_msg=name)


@pytest.mark.parametrize("name", ["en-noisy.flac", "de-command.wav", "es-command.ogg"])
def test_probabilities_are_those_of_the_packages_own_network(name: str, silero: Silero) -> None:
    """The weights are those that ship, and some of the speech is in noise. Memory from frame to frame counts, too."""
    samples = load_audio(SAMPLES[name])
    found = heard(silero, samples)
    np.testing.assert_allclose(found, by_the_package(packages_network(), samples), atol=1e-4)
    assert found.max() > 0.9
    assert found.min() < 0.1


@pytest.mark.real
def test_probabilities_of_real_speech_are_those_of_the_packages_own_network(silero: Silero) -> None:
    network = packages_network()
    for path in sorted(Path(str(REAL), "speech").glob("*.wav")):
        samples = load_audio(path)
        np.testing.assert_allclose(
            heard(silero, samples), by_the_package(network, samples), atol=1e-3, err_msg=path.name
        )


def tone(samples: Samples, hertz: float, level: float) -> Samples:
    return (level * np.sin(2 * np.pi * hertz * np.arange(len(samples)) / RATE)).astype(np.float32)


MADE_WORSE = {
    "hum of 50 Hz": lambda speech: speech + tone(speech, 50, 0.3),
    "hum of 60 Hz": lambda speech: speech + tone(speech, 60, 0.3),
    "hum of 25 Hz that clips nothing": lambda speech: speech / 2 + tone(speech, 25, 0.5),
    "offset": lambda speech: speech / 2 + np.float32(0.5),
    "offset below": lambda speech: speech / 2 - np.float32(0.5),
    "50 dB quieter, in 16 bits": lambda speech: np.round(speech * 10**-2.5 * 2**15) / np.float32(2**15),
    "40 dB quieter, and a hum": lambda speech: speech / 100 + tone(speech, 50, 0.1),
}


@pytest.mark.parametrize("worse", MADE_WORSE)
def test_speech_is_heard_beside_a_hum_above_an_offset_and_where_it_is_quiet(worse: str, silero: Silero) -> None:
    """In the frames in which the package's network hears it in the recording as it was. The package's network alone
    finds none of it beside some hums, and half of it where it is quiet."""
    samples = load_audio(SAMPLES["en-command.flac"])
    speaks = heard(silero, samples) >= 0.5  # the package's own probabilities, as shown above
    found = heard(silero, MADE_WORSE[worse](samples).astype(np.float32)) >= 0.5
    assert found[speaks].mean() > 0.7


@given(
    sizes=st.lists(st.integers(0, 5_000), max_size=8),
    rate=st.sampled_from([RATE, 24_000]),
    cut=st.integers(0, 800),
    worse=st.sampled_from([None, "hum of 50 Hz", "50 dB quieter, in 16 bits", "40 dB quieter, and a hum"]),
)
@settings(max_examples=15, deadline=None)
def test_the_division_of_the_stream_changes_nothing(sizes: list[int], rate: int, cut: int, worse: str | None) -> None:
    """A microphone's blocks of any size, or all at once: the same probabilities, of the same frames."""
    samples = load_audio(SAMPLES["es-command.ogg"], sampling_rate=rate)[: 20_000 - cut]
    if worse is not None:
        samples = MADE_WORSE[worse](samples).astype(np.float32)
    silero = at_rate(Silero(), rate)
    whole, listener, at, parts = heard(silero, samples), silero.listen(), 0, []
    for size in [*sizes, len(samples)]:
        parts.append(listener.hear(samples[at : at + size]))
        at = min(at + size, len(samples))
        assert sum(map(len, parts)) == at // silero.frame_samples
    np.testing.assert_allclose(np.concatenate([*parts, listener.end()]), whole, atol=1e-5)
    assert len(whole) == -(-len(samples) // silero.frame_samples)


@pytest.mark.parametrize("name", ["en-noisy.flac", "de-command.wav", "es-command.ogg"])
def test_samples_at_another_rate_are_heard_alike(name: str, silero: Silero) -> None:
    found = heard(at_rate(silero, 24_000), load_audio(SAMPLES[name], sampling_rate=24_000))
    expected = heard(silero, load_audio(SAMPLES[name]))
    count = min(len(found), len(expected))
    assert np.mean((found[:count] > 0.5) != (expected[:count] > 0.5)) < 0.03
    assert at_rate(silero, RATE) is silero
    assert at_rate(silero, 22_050) is silero, "its frames would not be whole samples"


def test_listeners_do_not_hear_each_other(silero: Silero) -> None:
    samples = load_audio(SAMPLES["es-command.ogg"])
    alone = heard(silero, samples)
    first, second = silero.listen(), silero.listen()
    second.hear(samples[::-1].copy())
    np.testing.assert_array_equal(first.hear(samples), alone[: len(samples) // FRAME])


def test_the_network_runs_within_what_it_is_given() -> None:
    inside: list[int] = []

    @contextmanager
    def within() -> Iterator[None]:
        inside.append(1)
        yield
        inside.append(-1)

    listener = Silero(within).listen()
    listener.hear(np.zeros(FRAME - 1, np.float32))
    assert not inside, "no frame is whole"
    listener.hear(np.zeros(1, np.float32))
    assert inside == [1, -1]


def test_the_weights_are_read_once_when_somebody_listens() -> None:
    silero = Silero()
    assert silero._weights is None
    silero.listen()
    weights = silero._weights
    silero.listen()
    assert silero._weights is weights


@pytest.mark.real_time
def test_hearing_imports_neither_the_package_nor_torch() -> None:
    """Importing the package would set torch's threads to one, and slow down every engine of the process."""
    code = """if True:
        import sys, numpy
        from triolet.api.speech.silero import Silero
        print(len(Silero().listen().hear(numpy.zeros(16_000, numpy.float32))))
        print(sorted({"silero_vad", "torch", "onnxruntime", "torchaudio"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["31", "[]"]


# ---- what is speech --------------------------------------------------------------------------------------------------


def white(seconds: float, level: float = 0.1) -> Samples:
    return (level * np.random.default_rng(3).standard_normal(round(seconds * RATE))).astype(np.float32)


def sine(seconds: float, hertz: float) -> Samples:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


@pytest.mark.parametrize(
    "samples",
    [
        np.zeros(20 * RATE, np.float32),
        white(20),
        white(20, 0.001),
        white(20, 0.9),
        *(sine(10, hertz) for hertz in (60, 220, 440, 3_000)),
        np.cumsum(white(20, 0.001)) * np.float32(0.1),
    ],
    ids=["silence", "white noise", "quiet noise", "loud noise", "60 Hz", "220 Hz", "440 Hz", "3 kHz", "brown noise"],
)
async def test_nobody_speaks_in_silence_noise_and_tones(samples: Samples, silero: Silero) -> None:
    assert await spans_of(samples, silero) == []


@pytest.mark.parametrize("name", SPOKEN)
async def test_speech_is_found_in_the_demo_recordings(name: str, silero: Silero) -> None:
    """Ordered, within the recording, none longer than a window; louder than what lies between."""
    samples = load_audio(SAMPLES[name])
    spans = await spans_of(SAMPLES[name], silero)
    assert sum(span.stop - span.start for span in spans) > 0.4 * len(samples)
    assert all(0 <= span.start < span.stop <= len(samples) for span in spans)
    assert all(span.stop - span.start <= 30 * RATE for span in spans)
    assert all(first.stop <= second.start for first, second in itertools.pairwise(spans))
    speech = np.concatenate([samples[span.start : span.stop] for span in spans])
    spoken = np.zeros(len(samples), bool)
    for span in spans:
        spoken[span.start : span.stop] = True
    if len(rest := samples[~spoken]) > RATE:
        assert np.square(speech).mean() > 4 * np.square(rest).mean()


async def test_speech_is_found_where_it_was_put(silero: Silero) -> None:
    """Between silences, behind noise: from 0.5 s before to 0.6 s after, no more."""
    word = load_audio(SAMPLES["es-command.ogg"])[: 3 * RATE]
    samples = np.concatenate([white(5, 0.002), word, white(7, 0.002), word, white(4, 0.002)])
    first, second = await spans_of(samples, silero)
    for span, start in ((first, 5 * RATE), (second, 15 * RATE)):
        assert start - RATE // 2 <= span.start
        assert span.stop <= start + 3 * RATE + 0.6 * RATE
        assert span.stop - span.start >= 1.5 * RATE
