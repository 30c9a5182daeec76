"""Words of a real checkpoint, through the whole engine: beside other requests, preempted, in chunks."""

from __future__ import annotations

import numpy as np
import trio
from attrs import evolve

import triolet.demo
from triolet import Engine, EngineConfig, SamplingParams
from triolet.api.inputs.audio import load_audio
from triolet.api.inputs.prompts import audio_item
from triolet.api.outputs.results import Segment
from triolet.api.speech.options import APPENDED, PREPENDED
from triolet.api.speech.words import WordRules, WordTokens, check_alignment, place_words
from triolet.core.events import Event, RequestStarted
from triolet.core.request import FinishReason, Request

CONFIG = EngineConfig(device="cpu", dtype="float32", max_running=8, verify=True)
SAMPLE = "en-command"


async def spoken(engine: Engine) -> tuple[Segment, WordTokens, Request]:
    """What a recording says, as the model would write it, and the request for the times of its words."""
    check_alignment(engine.model)
    sample = next(sample for sample in triolet.demo.samples() if sample.path.stem == SAMPLE)
    samples = np.asarray(load_audio(str(sample.path), sampling_rate=16_000))
    text = f" {sample.text}"
    segment = Segment(
        id=0,
        start=0.0,
        end=sample.duration,
        text=text,
        token_ids=tuple(engine.model.tokenizer.encode(text, add_special_tokens=False)),
        avg_logprob=0.0,
        no_speech_prob=0.0,
        compression_ratio=1.0,
        temperature=0.0,
    )
    ids = engine.model.whisper
    assert ids is not None
    tokens = WordTokens(
        special=(ids.start_id, ids.language_ids["en"], ids.task_ids["transcribe"], ids.no_timestamps_id),
        written=segment.token_ids,
        text=engine.model.eos_token_ids[0],
    )
    request = tokens.request("words", await audio_item(engine.model, samples), frames=len(samples) // 320)
    assert request is not None
    return segment, tokens, request


async def test_words_share_the_windows_encoding_and_are_spoken_within_it() -> None:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        segment, tokens, request = await spoken(engine)
        answer = await engine.inside._run(request, priority=0, wait=True)
        again = await engine.inside._run(evolve(request, id="again"), priority=0, wait=True)
        assert engine.statistics().encoder_cache.encoded == 1, "the window is encoded again"
        assert again.aligned == answer.aligned
        rules = WordRules(decode=engine.model.tokenizer.decode, language="en", prepended=PREPENDED, appended=APPENDED)
        (found,) = place_words([segment], tokens, answer.aligned, rules=rules, offset=0.0, spoken_until=0.0)
    assert answer.finish_reason is FinishReason.ALIGNED
    assert answer.token_ids == ()
    assert found.words
    assert "".join(word.text for word in found.words) == segment.text
    times = [time for word in found.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] <= segment.end
    assert np.mean([word.probability for word in found.words]) > 0.5, "the words that the model wrote are probable"


async def test_alignments_in_chunks_preempted_and_beside_others_are_the_same() -> None:
    """Room for little more than one sequence, a few tokens a step, and others that come first."""
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        _, _, request = await spoken(engine)
        alone = (await engine.inside._run(request, priority=0, wait=True)).aligned
    page = 3 * 2 * 128 * 4 * 16  # layers, keys and values, width, bytes, positions
    found, reading = [], trio.Event()

    def observe(event: Event) -> None:
        if isinstance(event, RequestStarted):
            reading.set()

    tight = evolve(
        CONFIG,
        max_step_tokens=5,
        max_positions=32,
        self_kv_bytes=3 * page,
        prefix_caching=False,
        steps_in_flight=1,
        observer=observe,
    )
    async with Engine(triolet.demo.checkpoint(), config=tight) as engine:

        async def align(number: int) -> None:
            again = evolve(request, id=f"words{number}")
            found.append((await engine.inside._run(again, priority=1, wait=True)).aligned)

        async def write(number: int) -> None:
            await reading.wait()
            sampling = SamplingParams(max_tokens=20, ignore_eos=True)
            first = evolve(request, id=f"text{number}", prompt_token_ids=request.prompt_token_ids[:4], alignment=None)
            await engine.inside._run(evolve(first, sampling=sampling, max_tokens=20), priority=-1, wait=True)

        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(align, number)
                nursery.start_soon(write, number)
        preempted = engine.statistics().requests.preemptions
    assert alone is not None
    assert len(found) == 4
    for one in found:
        assert one is not None
        assert max(abs(a - b) for a, b in zip(one.frames, alone.frames, strict=True)) <= 2
        assert np.allclose(one.logprobs, alone.logprobs, atol=1e-3)
    assert preempted > 0, "nobody was preempted: this proves nothing"
