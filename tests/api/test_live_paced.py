"""Live sessions of models that write in step with the audio: their tokens are those that transformers generates for the
whole utterance, and each position is encoded once."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
from attrs import evolve, field, frozen
from transformers.models.voxtral_realtime.modeling_voxtral_realtime import VoxtralRealtimeModel

from triolet import Engine, EngineConfig, InvalidRequest
from triolet.api.hosts.live import open_live
from triolet.api.inputs.audio import Samples
from triolet.api.live.endpoints import Reading
from triolet.api.live.options import read_live_options
from triolet.api.live.streamed_session import StreamReader
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.reader import WindowReader
from triolet.api.speech.recipe import Recipe
from triolet.core.request import Request
from triolet.models.blueprints import text_blueprint
from triolet.models.blueprints.estimate import estimate
from triolet.models.memory import encoder_states

from .added import NAMES, SCARCE, Reference
from .scarcity import settled
from .speech import PaperVoice
from .test_live_streamed import live

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True, encoder_idle_seconds=math.inf)  # however slow it is


POSITIONS = (1, 20, 62, 24)  # of the utterances whose tokens several tests compare


def heard(seed: int, seconds: float) -> Samples:
    """Noise that is now loud and now quiet."""
    numbers = np.random.default_rng(seed)
    loud = np.repeat(numbers.uniform(0.1, 2.0, round(16 * seconds)) ** 3, 1000)
    return np.clip(numbers.normal(0.0, 0.1, len(loud)) * loud, -1.0, 1.0).astype(np.float32)


def utterance(reference: Reference, seed: int) -> Samples:
    """One of `POSITIONS`."""
    return heard(seed, POSITIONS[seed] * reference.step / 16_000)


def cuts(seed: int, length: int) -> list[int]:
    """Some rising numbers up to ``length``: many small steps, and a few large ones."""
    numbers = np.random.default_rng(seed)
    return sorted({*numbers.integers(1, length, numbers.integers(1, 9)), *range(0, length // 3, 1777)} - {0})


@pytest.fixture(scope="module", params=NAMES)
def reference(request: pytest.FixtureRequest, made: Callable[[str], Path]) -> Reference:
    return Reference.of(request.param, made(request.param))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of each call of an encoder."""
    calls = list[int]()

    def count(made: type, name: str, size: int) -> None:
        encode = getattr(made, name)

        def counted(self: Any, *features: torch.Tensor, **inputs: Any) -> Any:
            calls.extend(one.shape[-1] // size for one in features)  # `generate` of Voxtral names its arguments
            return encode(self, *features, **inputs)

        monkeypatch.setattr(made, name, counted)

    count(VoxtralRealtimeModel, "get_audio_features", 8)
    count(transformers.MimiModel, "encode", 1_920)
    return calls


@frozen(eq=False)
class Utterance:
    """One utterance as a live session reads it, with the tokens of its answers."""

    engine: Engine
    name: str = "live"
    written: trio.Event = field(factory=trio.Event, init=False)
    tokens: list[int] = field(factory=list, init=False)
    reader: StreamReader = field(init=False)

    @reader.default
    def _reader(self) -> StreamReader:
        recipe = Recipe(options=TranscribeOptions(timestamps="none", seed=0), description=self.engine.model)
        model: Any = recipe.model
        return StreamReader(WindowReader(recipe, self._run, self.name), model)

    async def _run(self, requests: Sequence[Request]) -> Any:
        answers = await self.engine._reached()._engine._run_together(requests, priority=0, wait=True)
        self.tokens.extend(token for answer in answers for token in answer.token_ids)
        self.written.set()
        return answers

    async def hear(self, samples: Samples) -> None:
        """Reads the samples so far."""
        await self.reader.read(Reading(start=0, stop=len(samples)), samples)

    async def read(self, samples: Samples, stops: Sequence[int]) -> list[int]:
        """Reads the samples up to each of ``stops``, then all. Returns the tokens."""
        for stop in (*stops, len(samples)):
            await self.hear(samples[:stop])
        await self.reader.end()
        return self.tokens


async def test_tokens_are_those_of_the_whole_utterance_however_it_comes(
    reference: Reference, encoded: list[int]
) -> None:
    """The encoder's window is 5 positions, that of the decoder 24, and a call has up to 64."""
    async with Engine(reference.folder, config=CONFIG) as engine:
        for seed in range(3):
            samples = utterance(reference, seed)
            del encoded[:]
            found = await Utterance(engine).read(samples, cuts(seed, len(samples)))
            positions = sum(encoded)
            assert tuple(found) == reference.tokens(samples)
            assert positions == reference.positions(len(samples)), "each position is encoded once"
            assert engine.statistics().device.by_owner["encoder_states"] == 0, "no piece follows the last"
    assert len(set(found)) > 5, "the audio decides"


async def test_what_the_device_forgets_midway_changes_no_token(
    reference: Reference, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine sleeps between two readings; and more utterances go on than there are states, here two."""
    for part in (encoder_states, text_blueprint):
        monkeypatch.setattr(part, "MOST_STATES", 2)
    samples = utterance(reference, 2)
    stops = [len(samples) // 3, len(samples) * 2 // 3, len(samples)]
    async with Engine(reference.folder, config=CONFIG) as engine:
        first, *others = [Utterance(engine, str(number)) for number in range(4)]
        for stop in stops:
            await first.hear(samples[:stop])
            await engine.sleep()
            assert "encoder_states" not in engine.statistics().device.by_owner
            await engine.wake()
        await first.reader.end()
        del encoded[:]
        for stop in stops[1:]:
            for number, one in enumerate(others, 1):
                await one.hear(np.roll(samples, 1000 * number)[:stop])
        kept = engine.statistics().device.by_owner["encoder_states"]
        for one in others:
            await one.reader.end()
    assert sum(encoded) > 3 * reference.positions(len(samples)), "no state was lost"
    assert sum(size >= 63 for size in encoded) >= 3, "no utterance was heard again by several calls"
    assert kept <= estimate(reference.folder, CONFIG).by_owner["encoder_states"] < kept * 3 / 2
    assert tuple(first.tokens) == reference.tokens(samples)
    for number in (1, 3):
        assert tuple(others[number - 1].tokens) == reference.tokens(np.roll(samples, 1000 * number))


async def test_utterances_beside_each_other_with_little_room_keep_their_tokens(reference: Reference) -> None:
    """Pages for two utterances, steps shorter than prompts, and room for few encodings. One of them is given up."""
    places = [(seed, utterance(reference, seed)) for seed in range(1, 4)]
    found = dict[int, tuple[int, ...]]()

    async def read(engine: Engine, seed: int, samples: Samples) -> None:
        found[seed] = tuple(await Utterance(engine, str(seed)).read(samples, cuts(seed, len(samples))))

    async with Engine(reference.folder, config=SCARCE) as engine:
        async with trio.open_nursery() as nursery:
            for seed, samples in places:
                nursery.start_soon(read, engine, seed, samples)
            async with trio.open_nursery() as given_up:
                leaver = Utterance(engine)
                given_up.start_soon(leaver.read, places[0][1], cuts(9, len(places[0][1])))
                await leaver.written.wait()
                given_up.cancel_scope.cancel()
        books = await settled(engine)
    assert found == {seed: reference.tokens(samples) for seed, samples in places}
    assert books.encoder_cache.held == 0
    assert books.requests.pages_free == books.requests.pages


async def test_a_session_writes_words_with_the_times_of_their_positions(reference: Reference) -> None:
    rate, pause = reference.rate, np.zeros(2 * reference.rate, np.float32)
    audio = np.concatenate([heard(1, 4.3), pause, heard(2, 2.1), pause])
    async with Engine(reference.folder, config=CONFIG) as engine:
        updates, held = await live(engine, audio, 7_001, rate)
        books = await settled(engine)
        end = round(next(update.position for update in updates if update.ends_utterance) * rate)
        whole = await engine.transcribe((audio[:end], rate), voice_activity="off")
    assert [update.utterance for update in updates if update.ends_utterance] == [0, 1]
    first = [update for update in updates if not update.utterance]
    assert "".join(update.stable for update in first).strip() == whole.text
    begun = {update.utterance: update.words[0].text for update in reversed(updates) if update.words}
    assert [text[0] for text in begun.values()] == [" ", " "], "also before a mark"
    times = [time for update in updates for word in update.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert max(word.end for update in first for word in update.words) <= end / rate
    starts = {round(word.start * rate) % reference.step for update in first for word in update.words}
    assert starts == {0}, "the first utterance begins with the audio, so that each word begins at a position"
    thought = estimate(reference.folder, CONFIG).by_owner["encoder_states"] / 16  # of each session
    assert thought / 2 < held <= thought
    assert books.encoder_cache.held == 0


async def test_a_request_has_the_features_of_its_utterance_once(reference: Reference) -> None:
    """Else the message to a replica would grow with the square of the utterance."""
    async with Engine(reference.folder, config=CONFIG) as engine:
        model: Any = engine.model.speech
        samples, sound = heard(0, 9.0), None
        for stop in range(24_000, len(samples), 12_000):
            sound = model.hear_on(samples[:stop], sound, None, last=False)
        assert len(sound.heard) == 10
        assert len(pickle.dumps(sound.heard)) < 2 * len(pickle.dumps(sound.item))


async def test_a_session_that_is_left_in_the_middle_gives_everything_back(reference: Reference) -> None:
    async with Engine(reference.folder, config=CONFIG) as engine:
        run = partial(engine._reached()._engine._run_together, priority=0, wait=True)
        options = read_live_options({"step": 0.2})
        async with open_live(options, engine.model, run, request_id="live", detector=PaperVoice()) as session:
            await session.feed(heard(0, 3.0))
            assert (await anext(session)).provisional
        books = await settled(engine)
        assert books.requests.pages_free == books.requests.pages
        assert books.encoder_cache.held == 0


async def test_where_no_piece_fits_into_the_context_windows_are_heard(reference: Reference) -> None:
    async with Engine(reference.folder, config=evolve(CONFIG, max_positions=reference.around)) as engine:
        assert engine.model.speech is not None
        assert engine.model.speech.facts.stream_samples == 0


@pytest.mark.parametrize("limit", [{"max_positions": 64}, {"encoder_cache_bytes": 64 * 48 * 4}])
async def test_an_utterance_ends_where_the_positions_or_the_encoder_cache_end(
    reference: Reference, limit: dict[str, int]
) -> None:
    config = EngineConfig(device="cpu", dtype="float32", verify=True, **limit)
    async with Engine(reference.folder, config=config) as engine:
        assert engine.model.speech is not None
        most = engine.model.speech.facts.stream_samples
        assert most == (64 - reference.around) * reference.step
        samples, one = heard(4, 8.0)[: most + 18_000], Utterance(engine)
        heard_of_it = await one.reader.read(Reading(start=0, stop=most, full=True), samples[:most])
        assert heard_of_it.moved == most
        assert tuple(one.tokens) == reference.tokens(samples[:most])
        del one.tokens[:]
        assert tuple(await one.read(samples[most:], [9_000])) == reference.tokens(samples[most:])
        transcript = await engine.transcribe((samples, reference.rate), voice_activity="off")  # windows of that length
        assert len(transcript.segments) > 1


async def test_nothing_is_written_after_the_end_of_a_text(reference: Reference, tmp_path: Path) -> None:
    samples = utterance(reference, 2)
    whole = reference.tokens(samples)
    shutil.copytree(reference.folder, tmp_path, dirs_exist_ok=True)
    ends = next(token for token in whole[20:] if token not in whole[:20])
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    async with Engine(tmp_path, config=CONFIG) as engine:
        found = tuple(await Utterance(engine).read(samples, cuts(3, len(samples))))
    assert found == Reference.of(reference.name, tmp_path).tokens(samples) == whole[: whole.index(ends)]


async def test_options_of_texts_that_are_read_again_are_refused(reference: Reference) -> None:
    named, refused = type(reference.module).__name__, {"temperature": 0.4, "beam_size": 2, "repetition_penalty": 1.2}
    async with Engine(reference.folder, config=CONFIG) as engine:
        for name, value in {**refused, "suppress_tokens": [3]}.items():
            with pytest.raises(InvalidRequest, match=f"{name}=.*which {named}"):
                async with engine.live(**{name: value}):
                    pass
