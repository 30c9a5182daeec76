"""Live sessions of models that write in step with the audio: their tokens are those that transformers generates for the
whole utterance, and each position is encoded once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
from attrs import field, frozen
from transformers.models.voxtral_realtime.modeling_voxtral_realtime import VoxtralRealtimeModel

from triolet import Engine, EngineConfig, InvalidRequest
from triolet.api.hosts.live import open_live
from triolet.api.inputs.audio import Samples
from triolet.api.live.endpoints import Reading
from triolet.api.live.options import read_live_options
from triolet.api.live.streamed import StreamReader
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.reader import WindowReader
from triolet.api.speech.recipe import Recipe
from triolet.core.request import Request
from triolet.models.blueprints.estimate import estimate
from triolet.testing.families import make_checkpoint

from .scarcity import settled
from .speech import PaperVoice
from .test_live_streamed import live

CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)
STEP, SILENCE, DELAY = 1280, 3, 2  # of the tiny checkpoint: samples of a position, and positions
AROUND = SILENCE + DELAY + 11  # positions of silence


def heard(seed: int, seconds: float) -> Samples:
    """Noise that is now loud and now quiet."""
    numbers = np.random.default_rng(seed)
    loud = np.repeat(numbers.uniform(0.1, 2.0, round(16 * seconds)) ** 3, 1000)
    return np.clip(numbers.normal(0.0, 0.1, len(loud)) * loud, -1.0, 1.0).astype(np.float32)


def cuts(seed: int, length: int) -> list[int]:
    """Some rising numbers up to ``length``: many small steps, and a few large ones."""
    numbers = np.random.default_rng(seed)
    return sorted({*numbers.integers(1, length, numbers.integers(1, 9)), *range(0, length // 3, 1777)} - {0})


@frozen(kw_only=True, eq=False)
class Reference:
    """transformers' own model and feature extractor of a checkpoint."""

    folder: Path
    module: Any
    tokenizer: Any
    extractor: Any

    @classmethod
    def of(cls, folder: Path) -> Reference:
        return cls(
            folder=folder,
            module=transformers.VoxtralRealtimeForConditionalGeneration.from_pretrained(folder).eval(),
            tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
            extractor=transformers.AutoFeatureExtractor.from_pretrained(folder),
        )

    def tokens(self, samples: Samples) -> list[int]:
        """What the model generates of an utterance, up to the end of text."""
        pads = [self.tokenizer.convert_tokens_to_ids("[STREAMING_PAD]")] * (SILENCE + DELAY)
        prompt = torch.tensor([[self.tokenizer.bos_token_id, *pads]])
        padded = np.pad(samples, (SILENCE * STEP, -len(samples) % STEP + (DELAY + 11) * STEP))
        inputs = self.extractor(padded, sampling_rate=16_000, return_tensors="pt")
        with torch.inference_mode():
            found = self.module.generate(
                input_ids=prompt, **inputs, num_delay_tokens=DELAY, do_sample=False, max_new_tokens=999
            )
        tokens = found[0, prompt.shape[1] :].tolist()
        ends = self.module.generation_config.eos_token_id
        return tokens[: tokens.index(ends)] if ends in tokens else tokens


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference.of(make_checkpoint("voxtral_realtime", tmp_path_factory.mktemp("realtime")))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of each call of the encoder."""
    calls, encode = list[int](), VoxtralRealtimeModel.get_audio_features

    def counted(self: Any, *features: torch.Tensor, **inputs: Any) -> Any:
        calls.extend(one.shape[-1] // 8 for one in features)  # `generate` names its arguments
        return encode(self, *features, **inputs)

    monkeypatch.setattr(VoxtralRealtimeModel, "get_audio_features", counted)
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
        for seed in range(6):
            samples = heard(seed, 0.1 + 1.5 * seed)
            del encoded[:]
            found = await Utterance(engine).read(samples, cuts(seed, len(samples)))
            positions = sum(encoded)
            assert found == reference.tokens(samples)
            assert positions == -(-len(samples) // STEP) + AROUND, "each position is encoded once"
            assert engine.statistics().device.by_owner["encoder_states"] == 0, "no piece follows the last"
    assert len(set(found)) > 5, "the audio decides"


async def test_what_the_device_forgets_midway_changes_no_token(reference: Reference, encoded: list[int]) -> None:
    """The engine sleeps between two readings; and more utterances go on than there are states."""
    samples = heard(3, 5.0)
    stops = [*range(20_000, len(samples), 20_000), len(samples)]
    async with Engine(reference.folder, config=CONFIG) as engine:
        first, *others = [Utterance(engine, str(number)) for number in range(18)]
        for stop in stops:
            await first.hear(samples[:stop])
            await engine.sleep()
            assert "encoder_states" not in engine.statistics().device.by_owner
            await engine.wake()
        await first.reader.end()
        del encoded[:]
        for stop in stops:
            for number, one in enumerate(others, 1):
                await one.hear(np.roll(samples, 1000 * number)[:stop])
        kept = engine.statistics().device.by_owner["encoder_states"]
        for one in others:
            await one.reader.end()
    assert sum(encoded) > 17 * (len(samples) // STEP + AROUND), "no state was lost"
    assert encoded.count(64) >= 17, "no utterance was heard again by several calls"
    assert kept <= estimate(reference.folder, CONFIG).by_owner["encoder_states"] < kept * 17 / 16
    assert first.tokens == reference.tokens(samples)
    for number in (1, 9, 17):
        assert others[number - 1].tokens == reference.tokens(np.roll(samples, 1000 * number))


async def test_utterances_beside_each_other_with_little_room_keep_their_tokens(reference: Reference) -> None:
    """Pages for less than two utterances, steps shorter than prompts, and room for few encodings. One of them is given
    up."""
    page, places = 2 * 2 * 2 * 12 * 4 * 4, [(seed, heard(seed, 3.0)) for seed in range(6)]
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        verify=True,
        page_size=4,
        self_kv_bytes=34 * page,
        max_positions=128,
        encoder_cache_bytes=2 * 70 * 48 * 4,
        max_step_tokens=5,
    )
    found = dict[int, list[int]]()

    async def read(engine: Engine, seed: int, samples: Samples) -> None:
        found[seed] = await Utterance(engine, str(seed)).read(samples, cuts(seed, len(samples)))

    async with Engine(reference.folder, config=config) as engine:
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
    pause = np.zeros(32_000, np.float32)
    audio = np.concatenate([heard(1, 4.3), pause, heard(2, 2.1), pause])
    async with Engine(reference.folder, config=CONFIG) as engine:
        updates, held = await live(engine, audio, 7_001)
        books = await settled(engine)
        end = round(next(update.position for update in updates if update.ends_utterance) * 16_000)
        whole = await engine.transcribe(audio[:end], voice_activity="off")
    assert [update.utterance for update in updates if update.ends_utterance] == [0, 1]
    first = [update for update in updates if not update.utterance]
    assert "".join(update.stable for update in first).strip() == whole.text
    times = [time for update in updates for word in update.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert max(word.end for update in first for word in update.words) <= end / 16_000
    starts = {round(word.start * 16_000) % STEP for update in first for word in update.words}
    assert starts == {0}, "the first utterance begins with the audio, so that each word begins at a position"
    thought = estimate(reference.folder, CONFIG).by_owner["encoder_states"] / 16  # of each session
    assert thought / 2 < held <= thought
    assert books.encoder_cache.held == 0


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


@pytest.mark.parametrize("limit", [{"max_positions": 64}, {"encoder_cache_bytes": 64 * 48 * 4}])
async def test_an_utterance_ends_where_the_positions_or_the_encoder_cache_end(
    reference: Reference, limit: dict[str, int]
) -> None:
    config = EngineConfig(device="cpu", dtype="float32", verify=True, **limit)
    async with Engine(reference.folder, config=config) as engine:
        assert engine.model.speech is not None
        most = engine.model.speech.facts.stream_samples
        assert most == (64 - AROUND) * STEP
        samples, one = heard(4, 5.0), Utterance(engine)
        heard_of_it = await one.reader.read(Reading(start=0, stop=most, full=True), samples[:most])
        assert heard_of_it.moved == most
        assert one.tokens == reference.tokens(samples[:most])
        del one.tokens[:]
        assert await one.read(samples[most:], [20_000]) == reference.tokens(samples[most:])


async def test_nothing_is_written_after_the_end_of_a_text(tmp_path: Path) -> None:
    folder, samples = make_checkpoint("voxtral_realtime", tmp_path), heard(5, 4.0)
    whole = Reference.of(folder).tokens(samples)
    ends = next(token for token in whole[20:] if token not in whole[:20])
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    async with Engine(folder, config=CONFIG) as engine:
        found = await Utterance(engine).read(samples, cuts(5, len(samples)))
    assert found == Reference.of(folder).tokens(samples) == whole[: whole.index(ends)]


@pytest.mark.parametrize(
    "given", [{"temperature": 0.4}, {"beam_size": 2}, {"repetition_penalty": 1.2}, {"suppress_tokens": [3]}]
)
async def test_options_of_texts_that_are_read_again_are_refused(reference: Reference, given: dict[str, Any]) -> None:
    async with Engine(reference.folder, config=CONFIG) as engine:
        with pytest.raises(InvalidRequest, match=f"{next(iter(given))}=.*which VoxtralRealtime"):
            async with engine.live(**given):
                pass
