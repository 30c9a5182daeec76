"""Token times by cross-attention are transformers' own, whole or in chunks, alone or beside others."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from triolet.core.plan import Chunk, CrossWrite, StepPlan
from triolet.core.request import Alignment
from triolet.models.attention.alignment import first_frames, mean_weights, median_filtered
from triolet.models.checkpoints.alignment import AlignmentSettings
from triolet.models.checkpoints.settings import FileSettings

from .texts import start_of

SECONDS = 0.02  # of a frame
NEAR = 0.04  # seconds


# -- the path --------------------------------------------------------------------------------------------------------


def plain_first_frames(gains):
    """The same path by the textbook: every cell from its three neighbours."""
    tokens, frames = gains.shape
    best = np.full((tokens, frames), -np.inf)
    came = {}
    for token in range(tokens):
        for frame in range(frames):
            ways = [(best[token, frame - 1], "frame")] if frame else []
            if token and frame:
                ways.append((best[token - 1, frame - 1], "both"))
            if token:
                ways.append((best[token - 1, frame], "token"))
            sum_before, came[token, frame] = max(ways, key=lambda way: way[0]) if ways else (0.0, None)
            best[token, frame] = gains[token, frame] + sum_before
    token, frame, found = tokens - 1, frames - 1, [0] * tokens
    while came[token, frame] is not None:
        found[token] = frame
        way = came[token, frame]
        token, frame = token - (way != "frame"), frame - (way != "token")
    assert (token, frame) == (0, 0)
    found[0] = 0
    return found


@settings(max_examples=200)
@given(
    arrays.arrays(
        np.float64,
        st.tuples(st.integers(1, 8), st.integers(1, 12)),
        elements=st.integers(-3, 3).map(float),  # ties, and sums without rounding
    )
)
def test_the_path_is_that_of_the_textbook(gains):
    assert first_frames(gains) == plain_first_frames(gains)


@pytest.mark.parametrize("width", [1, 3, 7, 9])
@pytest.mark.parametrize("frames", [1, 3, 4, 5, 50])
def test_the_median_filter_is_transformers_own(width, frames):
    from transformers.models.whisper.generation_whisper import _median_filter

    values = torch.randn(2, 3, frames, generator=torch.Generator().manual_seed(width))
    torch.testing.assert_close(median_filtered(values, width), _median_filter(values, width), rtol=0, atol=0)


def test_the_mean_of_heads_does_not_depend_on_how_they_come():
    heads = torch.rand(5, 7, 40, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mean_weights([heads[:2], heads[2:]], 7), mean_weights([heads], 7))


def test_tokens_that_attend_alike_tell_nothing():
    """Equal weights give zeros, not a division by zero."""
    assert mean_weights([torch.full((2, 3, 20), 0.05)], 7).abs().max() == 0


# -- the executor ----------------------------------------------------------------------------------------------------


def run_alignments(driver, asked, *, chunk=64, shuffled=()):
    """The answers to (key, prompt, alignment) of ``asked``, read side by side in chunks, all of one slot a key."""
    executor, size = driver.executor, driver.description.page_size
    keys = sorted({key for key, _, _ in asked})
    per_sequence = -(-driver.description.max_positions // size)
    answers, fed = [None] * len(asked), [0] * len(asked)
    for step in range(1000):
        left = [index for index in range(len(asked)) if answers[index] is None]
        if not left:
            break
        lengths = {index: min(chunk, len(asked[index][1]) - fed[index]) for index in left}
        parts = [
            Chunk(
                1000 + index,
                fed[index],
                lengths[index],
                tuple(range(index * per_sequence, (index + 1) * per_sequence)),
                keys.index(asked[index][0]),
                fed[index] + lengths[index] == len(asked[index][1]),
            )
            for index in left
        ]
        starts = [
            start_of(1000 + index, prompt, alignment=alignment) for index, (_, prompt, alignment) in enumerate(asked)
        ]
        plan = StepPlan(
            step_id=step,
            epoch=0,
            started=tuple(starts) if step == 0 else (),
            ended=(),
            cross_writes=tuple(CrossWrite(key=key, slot=slot) for slot, key in enumerate(keys)) if step == 0 else (),
            chunks=tuple(parts),
        )
        for index, sampled in zip(left, executor.step(plan).sampled, strict=True):
            fed[index] += lengths[index]
            assert sampled.token_id is None
            answers[index] = sampled.aligned
    done = tuple(1000 + index for index in range(len(asked)))
    executor.step(StepPlan(step_id=-1, epoch=0, started=(), ended=done, cross_writes=(), chunks=()))
    return answers


def transformers_times(model, features, tokens, *, given, frames, heads):
    """transformers' own token timestamps, in seconds, of the rows that feed ``tokens[given:]``."""
    with torch.inference_mode():
        found = model(features, decoder_input_ids=torch.tensor([tokens]), output_attentions=True)
    outputs = SimpleNamespace(cross_attentions=[found.cross_attentions], sequences=torch.zeros(1, len(tokens) + 1))
    outputs = type("Outputs", (dict,), {"__getattr__": dict.__getitem__})(vars(outputs))
    times = model._extract_token_timestamps(outputs, heads, num_frames=torch.tensor([2 * frames]), num_input_ids=given)
    return times[0, given:-1].tolist(), found.logits[0]


# with the end two rows or fewer would be all ties: over two tokens a standardised weight is 1 or -1
TEXTS = ["Hello there, you.", "abc", "one two three four five six seven eight nine"]


@pytest.fixture(scope="module")
def sounds(audio):
    return {"whole": audio(1), "short": audio(2, 0.7), "tiny": audio(3, 0.05)}


def frames_of(samples):
    return max(1, len(samples) // 320)


def make_attentive(make, seed):
    """A random model whose cross-attention is neither even nor all on one frame, as a trained model's."""
    model = make(seed)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.encoder_attn.q_proj.weight.mul_(0.1)
            layer.encoder_attn.q_proj.bias.mul_(0.1)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_token_times_are_transformers_own(open_driver, save, make, tmp_path, ids, sounds, features, seed):
    model = make_attentive(make, seed)
    heads = [[0, 1], [1, 0], [1, 2]]
    model.generation_config.alignment_heads = heads
    driver = open_driver(save(tmp_path, model))
    driver.encode(**sounds)
    special = (ids.start, ids.en, ids.transcribe)
    for key, samples in sounds.items():
        for text in TEXTS:
            tokens = (*special, ids.no_timestamps, *text.encode())
            frames = frames_of(samples)
            (found,) = run_alignments(driver, [(key, tokens, Alignment(start=4, frames=frames))])
            times, logits = transformers_times(model, features(samples), tokens, given=3, frames=frames, heads=heads)
            assert len(found.frames) == len(times) == len(text) + 1
            far = [abs(SECONDS * ours - theirs) for ours, theirs in zip(found.frames, times, strict=True)]
            assert max(far) <= NEAR, (key, text, far)
            expected = logits.log_softmax(-1)[range(3, len(tokens) - 1), tokens[4:]]
            torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7])
def test_chunks_and_company_change_nothing(driver, sounds, ids, chunk):
    driver.encode(**sounds)
    special = (ids.start, ids.en, ids.transcribe, ids.no_timestamps)
    asked = [
        (key, (*special, *text.encode()), Alignment(start=start, frames=frames_of(sounds[key])))
        for key, text, start in (
            ("whole", TEXTS[2], 4),
            ("short", TEXTS[0], 4),
            ("whole", TEXTS[0], 7),
            ("tiny", "ab", 1),
        )
    ]
    alone = [run_alignments(driver, [one])[0] for one in asked]
    together = run_alignments(driver, asked, chunk=chunk)
    for one, other in zip(alone, together, strict=True):
        assert max(abs(a - b) for a, b in zip(one.frames, other.frames, strict=True)) <= 2
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_log_probabilities_are_among_the_first_tokens(driver, sounds, ids):
    driver.encode(**sounds)
    tokens = (ids.start, ids.en, ids.transcribe, ids.no_timestamps, *b"ab", ids.timestamps)
    (free,) = run_alignments(driver, [("whole", tokens, Alignment(start=4, frames=100))])
    (text,) = run_alignments(driver, [("whole", tokens, Alignment(start=4, frames=100, among=ids.eos))])
    assert all(a < b for a, b in zip(free.logprobs[:2], text.logprobs[:2], strict=True))
    assert text.logprobs[2] == -np.inf
    assert free.frames == text.frames


# -- checkpoints -----------------------------------------------------------------------------------------------------


def settings_of(generation, config=None):
    def file(name, values):
        return FileSettings(Path(name), values)

    written = None if generation is None else file("generation_config.json", generation)
    return AlignmentSettings.read(written, file("config.json", config or {}), layers=5, heads=2)


def test_heads_are_those_that_the_checkpoint_names():
    found = settings_of({"alignment_heads": [[4, 1], [2, 0], [4, 0]]})
    assert found.fault is None
    assert found.layers == (2, 4)
    assert found.heads_of(4) == [1, 0]


@pytest.mark.parametrize("generation", [None, {}, {"alignment_heads": None}])
def test_otherwise_they_are_all_of_the_upper_half(generation):
    found = settings_of(generation)
    assert found.layers == (2, 3, 4)
    assert found.heads_of(3) == [0, 1]
    assert found.filter_width == 7


def test_the_filters_width_is_the_generation_configs_or_the_configs():
    assert settings_of({"median_filter_width": 3}, {"median_filter_width": 9}).filter_width == 3
    assert settings_of({}, {"median_filter_width": 9}).filter_width == 9


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"alignment_heads": [[5, 0]]}, r"\[5, 0\] is not one of them; allowed: .* layers 0 to 4 and heads 0 to 1"),
        ({"alignment_heads": [[0, 0], [0, -1]]}, r"\[0, -1\] is not one of them"),
        ({"alignment_heads": [[0, 0, 0]]}, "is not one of them"),
        ({"alignment_heads": [[True, 0]]}, "is not one of them"),
        ({"alignment_heads": [3]}, "3 is not one of them"),
        ({"alignment_heads": []}, r"alignment_heads=\[\]; allowed: pairs"),
        ({"alignment_heads": "all"}, "alignment_heads='all'; allowed: pairs"),
        ({"median_filter_width": 4}, "generation_config.json has median_filter_width=4; allowed: odd"),
        ({"median_filter_width": 0}, "median_filter_width=0; allowed: odd"),
        ({"median_filter_width": True}, "median_filter_width=True; allowed: odd"),
    ],
)
def test_what_names_no_heads_is_a_fault_of_words_alone(generation, told):
    assert re.search(told, settings_of(generation).fault)


def test_a_model_with_impossible_heads_opens_and_says_so(open_driver, save, make, tmp_path, ids, sounds):
    model = make(0)
    model.generation_config.alignment_heads = [[9, 9]]
    driver = open_driver(save(tmp_path, model))
    assert "[9, 9] is not one of them" in driver.description.alignment_fault
    driver.encode(whole=sounds["whole"])
    with pytest.raises(AssertionError, match="words are aligned although"):
        run_alignments(driver, [("whole", (ids.start, 65, 66), Alignment(start=1, frames=100))])


# -- the real model --------------------------------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.skipif(
    "TRIOLET_REAL" not in os.environ, reason="set TRIOLET_REAL to a folder with real weights and speech"
)
def test_token_times_of_real_speech_are_transformers_own(open_driver):
    """whisper-base on sentences that people read: transformers' ``generate`` writes the tokens, and tells their times,
    which are those of the end of each."""
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    from triolet.api.inputs.audio import load_audio

    folder = Path(os.environ["TRIOLET_REAL"])
    model = WhisperForConditionalGeneration.from_pretrained(folder / "whisper-base").eval()
    processor = WhisperProcessor.from_pretrained(folder / "whisper-base")
    driver = open_driver(folder / "whisper-base", max_running=1)
    clips = sorted((folder / "speech").glob("*.wav"))
    assert clips, "no speech to try"
    for clip in clips:
        samples = load_audio(str(clip), sampling_rate=16_000)[: 30 * 16_000]
        inputs = processor(samples, sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
        with torch.inference_mode():
            made = model.generate(
                **inputs,
                language="en",
                task="transcribe",
                return_timestamps=True,
                return_token_timestamps=True,
                return_segments=True,
                force_unique_generate_call=True,
                num_beams=1,
            )
        written = [token for token in made["sequences"][0].tolist() if token != model.generation_config.eos_token_id]
        special = (50258, 50259, 50359)
        written = written[written.index(50359) + 1 :] if 50359 in written else written
        driver.encode(clip=samples)
        alignment = Alignment(start=len(special) + 1, frames=max(1, len(samples) // 320))
        (found,) = run_alignments(driver, [("clip", (*special, *written), alignment)], chunk=448)
        driver.executor.free(("clip",))
        times = made["token_timestamps"][0].tolist()[-len(made["sequences"][0]) :]
        ends = times[len(made["sequences"][0]) - len(written) - 1 :][: len(written)]
        far = [abs(SECONDS * ours - theirs) for ours, theirs in zip(found.frames, ends, strict=True)]
        assert max(far) <= NEAR + 1e-6, (clip.name, far)
