"""CTC models and transducers through the whole engine: tokens and frames are those of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio
import trio.testing
from attrs import field, frozen

import triolet
from triolet.models.architectures.frontends import PairedDeltaMel

from ..heap import assert_none, garbage
from .scarcity import settled

CLASSES = {
    "parakeet_ctc": transformers.ParakeetForCTC,
    "parakeet_rnnt": transformers.ParakeetForRNNT,
    "parakeet_tdt": transformers.ParakeetForTDT,
    "nemotron_asr_streaming": transformers.NemotronAsrStreamingForRNNT,
    "nemotron3_5_asr": transformers.Nemotron3_5AsrForRNNT,
    "granite_speech5": transformers.GraniteSpeech5ForCTC,
}
SECONDS = (0.4, 0.4, 1.3, 0.1, 2.9, 6.0)
Emitted = list[tuple[int, int]]


@frozen
class Granite:
    """The processor of Granite Speech 5, which transformers does not make without torchaudio."""

    front: PairedDeltaMel
    tokenizer: Any

    @classmethod
    def of(cls, folder: Path) -> Granite:
        return cls(PairedDeltaMel.read(folder), transformers.AutoTokenizer.from_pretrained(folder))

    def __call__(self, sounds: list[np.ndarray], sampling_rate: int) -> dict[str, torch.Tensor]:
        rows = self.front(sounds[0])[None]
        return {"input_features": rows, "attention_mask": torch.ones(rows.shape[:2], dtype=torch.long)}


@frozen(kw_only=True, eq=False)
class Reference:
    """transformers' own model and processor of a checkpoint."""

    folder: Path
    module: Any
    processor: Any
    known: dict[int, Emitted] = field(factory=dict)

    @classmethod
    def of(cls, name: str, folder: Path) -> Reference:
        make = Granite.of if name == "granite_speech5" else transformers.AutoProcessor.from_pretrained
        return cls(folder=folder, module=CLASSES[name].from_pretrained(folder).eval(), processor=make(folder))

    @staticmethod
    def sound(number: int) -> np.ndarray:
        samples = np.random.default_rng(number).standard_normal(int(SECONDS[number] * 16_000))
        return (samples * 0.3).astype(np.float32)

    def emitted(self, number: int) -> Emitted:
        """The tokens of a sound, with their frames."""
        if number not in self.known:
            with torch.inference_mode():
                inputs = self.processor([self.sound(number)], sampling_rate=16_000)
                frames = int(self.module._get_output_attention_mask(inputs["attention_mask"]).sum())
                symbols = getattr(self.module.config, "max_symbols_per_step", None)
                limit = {} if symbols is None else {"max_new_tokens": symbols * frames}
                self.known[number] = self._read(self.module.generate(**inputs, **limit), frames)
        return self.known[number]

    def _read(self, output: Any, frames: int) -> Emitted:
        if isinstance(output, torch.Tensor):  # the labels of CTC
            labels = output[0, :frames].tolist()
            runs = [next(run) for _, run in groupby(enumerate(labels), key=lambda pair: pair[1])]
            return [(label, frame) for frame, label in runs if label != self.module.config.pad_token_id]
        ids, durations = output.sequences[0], output.durations[0]
        pairs = list(zip(ids.tolist(), (durations.cumsum(-1) - durations).tolist(), strict=True))[1:]
        return [(token, frame) for token, frame in pairs if token != self.module.config.blank_token_id]


def read(completion: triolet.Completion) -> Emitted:
    return [(token, first) for token, (first, _) in zip(completion.token_ids, completion.frames, strict=True)]


def config(**changes: Any) -> triolet.EngineConfig:
    return triolet.EngineConfig(**{"dtype": "float32", "device": "cpu", "verify": True, **changes})


@pytest.fixture(params=CLASSES)
def reference(request: pytest.FixtureRequest, frame_references: Callable[[str], Reference]) -> Reference:
    return frame_references(request.param)


async def test_each_sound_alone_gets_the_tokens_and_frames_of_generate(reference: Reference) -> None:
    async with triolet.Engine(reference.folder, config=config()) as engine:
        found = [await engine.generate(audio=reference.sound(number)) for number in range(len(SECONDS))]
        streamed = []
        async with engine.stream(audio=reference.sound(2)) as deltas:
            async for delta in deltas:
                streamed += zip(delta.token_ids, [first for first, _ in delta.frames], strict=True)
    assert [read(one) for one in found] == [reference.emitted(number) for number in range(len(SECONDS))]
    assert streamed == reference.emitted(2)
    assert len({token for one in found for token in one.token_ids}) > 9, "they prove too little"
    assert {one.finish_reason for one in found} == {triolet.FinishReason.STOP}
    repeats = {} if isinstance(reference.processor, Granite) else {"group_tokens": False}
    assert found[2].text == reference.processor.tokenizer.decode(
        found[2].token_ids, skip_special_tokens=True, **repeats
    )


async def test_requests_with_room_for_few_get_the_tokens_of_generate(reference: Reference) -> None:
    """Sounds of all lengths that repeat, arrivals one after another, urgent requests that preempt others, clients that
    leave, and eviction of slots and outputs."""
    made = reference.module.config
    width = getattr(made, "decoder_hidden_size", made.encoder_config.hidden_size)
    numbers = np.random.default_rng(3)
    asks = [(int(numbers.integers(0, len(SECONDS))), int(numbers.integers(0, 3))) for _ in range(24)]
    found: dict[int, triolet.Completion] = {}

    async def client(index: int, engine: triolet.Engine, begun: trio.Event) -> None:
        number, priority = asks[index]
        with trio.CancelScope() as scope:
            async with engine.stream(audio=reference.sound(number), priority=priority) as deltas:
                parts = []
                async for delta in deltas:
                    begun.set()
                    parts.append(delta)
                    if index % 5 == 4:
                        scope.cancel()  # this client leaves after its first delta
        begun.set()
        if not scope.cancelled_caught:
            found[index] = [pair for delta in parts for pair in zip(delta.token_ids, delta.frames, strict=True)]

    settings = config(
        cross_kv_bytes=3 * (501 if isinstance(reference.processor, Granite) else 101) * width * 4,
        encoder_cache_bytes=90 * width * 4,
        max_running=4,
        max_step_tokens=9,
    )
    async with triolet.Engine(reference.folder, config=settings) as engine:
        for _ in range(20):  # a round without a preemption is rare
            async with trio.open_nursery() as nursery:
                for index in range(len(asks)):
                    begun = trio.Event()
                    nursery.start_soon(client, index, engine, begun)
                    if index % 3 == 0:
                        await begun.wait()
            if engine.statistics().requests.preemptions:
                break
        assert read(await engine.generate(audio=reference.sound(5))) == reference.emitted(5)
        statistics = await settled(engine)
    for index, pairs in found.items():
        assert [(token, first) for token, (first, _) in pairs] == reference.emitted(asks[index][0]), index
    assert len(found) > 15
    assert statistics.requests.preemptions, "nobody gave way"
    assert statistics.requests.cross_written > len(SECONDS), "slots were never short"
    assert statistics.requests.cross_shared, "no slot was shared"
    assert statistics.encoder_cache.evicted, "the encoder cache was never short"
    assert statistics.encoder_cache.held == 0


async def test_a_sound_is_encoded_once_however_many_ask_and_again_after_sleep(reference: Reference) -> None:
    async with triolet.Engine(reference.folder, config=config()) as engine:
        before = [engine.generate(audio=reference.sound(4), max_tokens=most) for most in (1, 7, None)]
        short, longer, whole = [await one for one in before]
        assert engine.statistics().encoder_cache.encoded == 1
        await engine.sleep()
        await engine.wake()
        after = await engine.generate(audio=reference.sound(4))
    assert read(whole) == read(after) == reference.emitted(4)
    assert read(short) == reference.emitted(4)[:1]
    assert read(longer) == reference.emitted(4)[:7]
    assert short.finish_reason is triolet.FinishReason.LENGTH


@pytest.mark.parametrize("name", ["parakeet_ctc", "parakeet_tdt", "granite_speech5"])
async def test_a_request_makes_no_garbage(name: str, frame_references: Callable[[str], Reference]) -> None:
    """The encoders of Nemotron make some: their masks are made by torch's vmap, which leaves classes behind."""
    reference = frame_references(name)
    async with triolet.Engine(reference.folder, config=config()) as engine:
        await engine.generate(audio=reference.sound(0))
        await trio.testing.wait_all_tasks_blocked()
        with garbage() as found:
            for number in range(3):
                await engine.generate(audio=reference.sound(number), max_tokens=5)
            await trio.testing.wait_all_tasks_blocked()
    assert_none(found)


async def test_logprobs_are_those_of_the_frame(frame_references: Callable[[str], Reference]) -> None:
    reference = frame_references("parakeet_ctc")
    async with triolet.Engine(reference.folder, config=config()) as engine:
        completion = await engine.generate(audio=reference.sound(4), logprobs=2)
    with torch.inference_mode():
        logits = reference.module(**reference.processor([reference.sound(4)], sampling_rate=16_000)).logits[0]
    expected = logits.log_softmax(-1)[[first for first, _ in completion.frames], list(completion.token_ids)]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=1e-4)
    assert all(top[0][0] == token for top, token in zip(completion.top_logprobs, completion.token_ids, strict=True))


REFUSED = [
    ({"temperature": 0.5}, "temperature=0.5 for ParakeetForTDT, which reads frames greedily; allowed: 0.0"),
    ({"beam_size": 2}, "beam_size=2 .* allowed: 1"),
    ({"min_tokens": 3}, "min_tokens=3 .* allowed: 0"),
    ({"logit_bias": {3: 1.0}}, "logit_bias=.* allowed: ()"),
    ({"structure": triolet.Structure(kind="regex", text="a*")}, "structure=.* allowed: None"),
    ({"ignore_eos": True}, "ignore_eos=True .* allowed: False"),
    ({"prompt": "a cat"}, "a prompt of 5 .* allowed: audio=... alone"),
    ({"prompt_token_ids": [3]}, "a prompt of 1 .* allowed: audio=... alone"),
    ({"audio": np.zeros(1_000_000, np.float32)}, "up to 8 s"),
]


async def test_what_makes_no_sense_for_frames_is_refused_by_name(frame_references: Callable[[str], Reference]) -> None:
    reference = frame_references("parakeet_tdt")
    async with triolet.Engine(reference.folder, config=config()) as engine:
        for options, message in REFUSED:
            with pytest.raises(triolet.InvalidRequest, match=message):
                await engine.generate(**{"audio": reference.sound(0), **options})
        assert read(await engine.generate("", audio=reference.sound(2))) == reference.emitted(2)
