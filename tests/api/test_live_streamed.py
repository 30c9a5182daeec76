"""Live sessions of models that hear on where they were: the text is that of the whole utterance, and each piece is
encoded once."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import triolet
from triolet.api.hosts.live import open_live
from triolet.api.inputs.audio import Samples
from triolet.api.live.options import read_live_options
from triolet.api.live.streamed_session import StreamReader
from triolet.models.architectures.streamed_encoder import Chunks, Pieces, hear_on
from triolet.models.blueprints.estimate import estimate
from triolet.models.memory.rows import Rows
from triolet.models.native.runner import Runner

from .speech import PaperVoice
from .test_frames import Reference

RATE = 16_000
CAUSAL = ("nemotron_asr_streaming", "nemotron3_5_asr")


def noise(seconds: float, seed: int = 0) -> Samples:
    samples = np.random.default_rng(seed).standard_normal(round(seconds * RATE)) * 0.3
    return samples.astype(np.float32)


@pytest.fixture(scope="module", params=CAUSAL)
def reference(request: Any, frame_references: Any) -> Reference:
    return frame_references(request.param)


async def live(
    engine: Any, samples: Samples, size: int, rate: int = RATE, name: str = "live"
) -> tuple[list[triolet.LiveText], int]:
    """The updates of a session that is fed ``samples`` in chunks of ``size``, and the most bytes of encoder states."""
    run = partial(engine._reached()._engine._run_together, priority=0, wait=True)
    found, held = [], 0
    options = read_live_options({"step": 0.2, "rate": rate})
    async with open_live(options, engine.model, run, request_id=name, detector=PaperVoice()) as session:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_feed, session, samples, size)
            async for update in session:
                found.append(update)
                held = max(held, engine.statistics().device.by_owner["encoder_states"])
    return found, held


async def _feed(session: Any, samples: Samples, size: int) -> None:
    for start in range(0, len(samples), size):
        await session.feed(samples[start : start + size])
    await session.finish()


def filled(engine: Any, samples: Samples) -> Samples:
    """``samples``, and silence that fills the last chunk of the encoder."""
    pieces = engine.model.preparer.pieces
    *_, hops = pieces.chunks.ends(0, len(samples) // pieces.hop, last=True)
    return np.pad(samples, (0, max(hops * pieces.hop - len(samples), 0)))


@pytest.mark.parametrize(
    ("reference", "size"),
    [("nemotron_asr_streaming", 1_600), ("nemotron_asr_streaming", 80_000), ("nemotron3_5_asr", 7_001)],
    indirect=["reference"],
)
async def test_live_text_is_that_of_the_whole_utterance(reference: Reference, size: int) -> None:
    config = triolet.EngineConfig(device="cpu", dtype="float32")
    pause = np.zeros(2 * RATE, np.float32)
    audio = np.concatenate([noise(4.3), pause, noise(2.1, 1), pause])
    async with triolet.Engine(reference.folder, config=config) as engine:
        updates, held = await live(engine, audio, size)
        assert [update.utterance for update in updates if update.ends_utterance] == [0, 1]
        end = round(next(update.position for update in updates if update.ends_utterance) * RATE)
        whole = await engine.transcribe(filled(engine, audio[:end]), voice_activity="off", timestamps="word")
        assert engine.statistics().encoder_cache.encoded > 2  # of the session: pieces, not windows
        assert engine.statistics().device.by_owner["encoder_states"] == 0, "no piece follows the last"
        thought = estimate(reference.folder, config).by_owner["encoder_states"] / 16  # of each
        assert thought / 2 < held <= thought
    first = [word for update in updates if not update.utterance for word in update.words]
    text, wanted = "".join(word.text for word in first), "".join(segment.text for segment in whole.segments)
    assert text.removeprefix(" ") == wanted.removeprefix(" ")
    assert not text[:1].isalnum(), "utterances are joined"
    assert {update.stable for update in updates} == {"".join(word.text for word in update.words) for update in updates}
    times = [time for update in updates for word in update.words for time in (word.start, word.end)]
    assert times == sorted(times)


@pytest.mark.parametrize("quantization", [None, "int8"])
async def test_sixteen_sessions_hear_each_frame_and_read_each_token_once(
    frame_references: Any, monkeypatch: Any, quantization: Any
) -> None:
    """And each gets what it gets alone, however its utterance grows."""
    frames, fed = list[int](), list[int]()
    texts: list[tuple[int, ...]] = []
    step, read, take = Runner.step, Runner.read, StreamReader._take

    def stepped(runner: Runner, rows: Any, of: Rows, **options: Any) -> torch.Tensor:
        if runner.kept:
            frames.extend(count for count, *_ in of.chunks)
        return step(runner, rows, of, **options)

    def was_read(runner: Runner, rows: Any, tokens: Any, of: Rows, *, scores: bool) -> torch.Tensor:
        fed.extend(tokens[row] for row in of.wanted)
        return read(runner, rows, tokens, of, scores=scores)

    def written(reader: StreamReader, **options: Any) -> Any:
        if options["ends"]:
            texts.append(reader._written)
        return take(reader, **options)

    folder, sounds = frame_references("nemotron_asr_streaming").folder, [noise(2.5, seed) for seed in range(16)]
    found: dict[int, list[Any]] = {}

    async def talk(engine: Any, number: int) -> None:
        updates, _ = await live(engine, sounds[number], 8_000, name=f"live {number}")
        found[number] = [(word.text, word.start, word.end) for one in updates for word in one.words]

    config = triolet.EngineConfig(device="cpu", dtype="float32", quantization=quantization)
    async with triolet.Engine(folder, config=config) as engine:
        await talk(engine, 7)
    alone = found[7]
    monkeypatch.setattr(Runner, "step", stepped)
    monkeypatch.setattr(Runner, "read", was_read)
    monkeypatch.setattr(StreamReader, "_take", written)
    async with triolet.Engine(folder, config=config) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(len(sounds)):
                nursery.start_soon(talk, engine, number)
        blank, chunks = engine.model.eos_token_ids[0], engine.model.preparer.pieces.chunks
        whole = sum(chunks.frames(len(filled(engine, sound)) // 160) for sound in sounds)
    assert sum(frames) == whole
    assert found[7] == alone
    read_once = sorted(token for text in texts for token in text)
    assert sorted(token for token in fed if token != blank) == read_once  # a step that is sent ahead reads a blank
    assert len(read_once) > 3 * len(sounds)
    assert len(set(map(tuple, found.values()))) > len(sounds) / 2, "they prove too little"


async def test_states_are_thought_of_in_the_numbers_that_they_are_kept_in(reference: Reference) -> None:
    """The native library keeps them in float32, also where it multiplies in bfloat16."""
    config = triolet.EngineConfig(device="cpu", dtype="bfloat16")
    async with triolet.Engine(reference.folder, config=config) as engine:
        _, held = await live(engine, noise(4.0), 80_000)
    thought = estimate(reference.folder, config).by_owner["encoder_states"] / 16
    assert thought / 2 < held <= thought


@pytest.mark.parametrize("positions", [2, 12])
async def test_a_reading_with_more_tokens_than_positions_is_heard_to_its_end(
    reference: Reference, positions: int
) -> None:
    config = triolet.EngineConfig(device="cpu", dtype="float32", max_positions=positions)
    async with triolet.Engine(reference.folder, config=config) as engine:
        updates, _ = await live(engine, noise(9.0), 100_000)
    assert updates[-1].position == 9.0
    assert any(update.stable for update in updates)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"max_new_tokens": 5}, "max_new_tokens=5, which Nemotron.* allowed: None$"),
        ({"logprob_threshold": -0.5}, r"logprob_threshold=-0\.5, which Nemotron.* allowed: -1\.0 or None$"),
    ],
)
async def test_options_of_texts_that_are_read_again_are_refused(
    reference: Reference, given: dict[str, Any], match: str
) -> None:
    async with triolet.Engine(reference.folder, config=triolet.EngineConfig(device="cpu")) as engine:
        with pytest.raises(triolet.InvalidRequest, match=match):
            async with engine.live(**given):
                pass


@given(cuts=st.lists(st.integers(1, 40_000), max_size=4), remembers=st.booleans())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_heard_in_pieces_are_those_of_the_whole(reference: Reference, cuts: list[int], remembers: bool) -> None:
    """With what is remembered of the audio before, and if it was lost."""
    ahead = reference.processor.default_num_lookahead_tokens
    chosen = {"num_lookahead_tokens": torch.tensor(ahead)}
    if languages := getattr(reference.processor, "prompt_dictionary", {}):
        chosen["prompt_ids"] = torch.tensor(languages["auto"])

    def read(samples: Samples) -> dict[str, torch.Tensor]:
        made = reference.processor.feature_extractor([samples], sampling_rate=RATE, return_tensors="pt")
        return {**{name: made[name][0] for name in ("input_features", "attention_mask")}, **chosen}

    pieces = Pieces(read=read, hop=160, reach=256, chunks=Chunks(factor=8, ahead=ahead, lacks=7), most=1_000)
    samples = noise(2.5)
    piece, remembered, rows = None, {}, []
    for end in [*sorted(cut for cut in cuts if cut < len(samples)), len(samples)]:
        found = pieces.next(samples[:end], piece, "", last=end == len(samples))
        if found is not None:
            frames, kept = hear_on(reference.module, found, remembered)
            assert len(frames) == found.frames
            piece, remembered, rows = found, kept if remembers else {}, [*rows, frames]
    assert piece is not None
    with torch.no_grad():
        inputs = {name: value[None] for name, value in chosen.items() if name == "prompt_ids"}
        whole = reference.module.get_audio_features(piece.features[None], num_lookahead_tokens=ahead, **inputs)
    torch.testing.assert_close(torch.cat(rows), whole.pooler_output[0], rtol=0, atol=1e-4)
