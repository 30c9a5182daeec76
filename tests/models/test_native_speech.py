"""Encoders of items by the native library, of speech and of texts: a clip's numbers are transformers', and the same
bits alone and beside others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triolet.models.architectures.crossed_family import MoonshineStreaming
from triolet.models.blueprints.estimate import estimate
from triolet.models.memory.encoder_states import MOST_STATES, EncoderStates
from triolet.models.memory.module import TransformerModel
from triolet.models.memory.rows import Rows
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner
from triolet.models.native.speech_encoders import Payload, SpeechEncoder, known_encoder

from .conftest import small_config
from .fed import loaded

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

MOST = 300  # rows of a clip
MOONSHINE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "encoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 4,
}
PARAKEET = {
    "hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "num_mel_bins": 16,
    "subsampling_conv_channels": 16,
    "max_position_embeddings": 400,
    "conv_kernel_size": 5,
}
TEXTS = {
    "vocab_size": 99,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "max_position_embeddings": MOST,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 50,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 50,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
DISTANCES = {
    "vocab_size": 99,
    "d_model": 48,
    "d_kv": 20,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "moonshine": transformers.MoonshineConfig(**MOONSHINE, pad_head_dim_to_multiple_of=8),
    "parakeet": transformers.ParakeetEncoderConfig(**PARAKEET),
    "parakeet, scaled, without biases": transformers.ParakeetEncoderConfig(
        **PARAKEET, scale_input=True, attention_bias=False, convolution_bias=False
    ),
    "nemotron": transformers.NemotronAsrStreamingEncoderConfig(
        **PARAKEET, sliding_window=14, default_num_lookahead_tokens=3
    ),
    "nemotron, one by one, without biases": transformers.NemotronAsrStreamingEncoderConfig(
        **PARAKEET,
        sliding_window=71,
        default_num_lookahead_tokens=0,
        scale_input=True,
        attention_bias=False,
        convolution_bias=False,
    ),
    "moonshine streaming": transformers.MoonshineStreamingConfig(
        hidden_size=48,
        num_hidden_layers=1,
        num_key_value_heads=4,
        head_dim=12,
        intermediate_size=96,
        num_attention_heads=4,
        encoder_config={
            "hidden_size": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "sliding_windows": ((16, 4), (16, 1), (16, 0), (7, 60)),
        },
    ),
    "moonshine, turned in part": transformers.MoonshineConfig(
        **MOONSHINE,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.7},
    ),
    "bart": transformers.BartConfig(**TEXTS, scale_embedding=True),
    "mbart": transformers.MBartConfig(**TEXTS),
    "pegasus": transformers.PegasusConfig(**TEXTS, scale_embedding=True),
    "t5": transformers.T5Config(**DISTANCES),
    "mt5, gated": transformers.MT5Config(**DISTANCES, feed_forward_proj="gated-gelu"),
}


@functools.cache
def module(name: str) -> Any:
    """The encoder of a model with random weights."""
    torch.manual_seed(5)
    config = CONFIGS[name]
    plain = "sdpa" if name.startswith("nemotron") else "eager"  # which Nemotron gives masks of another kind
    made = transformers.AutoModel.from_config(config, attn_implementation=plain).eval()
    with torch.inference_mode():
        for key, parameter in made.named_parameters():
            parameter.mul_(3.0).add_(0.02)  # biases and gains are zero and one
            if key.endswith("SelfAttention.q.weight"):  # T5 scales no scores
                parameter.mul_(0.03)
        for key, buffer in made.named_buffers():
            if "running" in key:
                buffer.add_(torch.rand(buffer.shape))
    return made if "parakeet" in name or name.startswith("nemotron") else made.get_encoder()


def known(module: Any) -> SpeechEncoder:
    encoder = known_encoder(module)
    assert not isinstance(encoder, str), encoder
    return encoder


def clip(name: str, rows: int) -> Payload:
    """Noise of about ``rows`` rows."""
    generator = torch.Generator().manual_seed(rows)
    made = known(module(name)).clip(rows)
    return {
        key: torch.randn(one.shape, generator=generator) if one.is_floating_point() else one
        for key, one in made.items()
    }


def computed(module: Any, name: str, rows: int) -> Tensor:
    """The hidden states of a clip, by the module itself."""
    inputs = {key: one[None] if one.dim() else int(one) for key, one in clip(name, rows).items()}
    with torch.inference_mode():
        if name == "moonshine streaming":  # which leaves its windows out if it gets no mask
            model = SimpleNamespace(get_encoder=lambda: module, parameters=module.parameters)
            (found,) = MoonshineStreaming().encode(model, [clip(name, rows)])
            return found
        found: Tensor = module(**inputs).last_hidden_state[0]
    return found


@functools.cache
def expected_of(name: str, rows: int) -> Tensor:
    return computed(module(name), name, rows)


Encode = Callable[[Sequence[int]], list[Tensor]]


@functools.cache
def packed(name: str, int8: bool, again: bool) -> SpeechEncoder:
    """``again``: packed once more, for what is compared to the bit."""
    encoder = known(copy.deepcopy(module(name)))
    encoder.pack(MOST, int8=int8)
    return encoder


@contextmanager
def encoding(
    name: str, *, int8: bool = False, level: int = 0, threads: int = 2, rows: int = MOST, again: bool = False
) -> Iterator[Encode]:
    encoder = packed(name, int8, again)
    options = {"threads": threads, "level": level}
    runners = [Runner.open(loaded(), encoder.program(MOST), None, rows=rows, positions=MOST, **options)]
    if (written := encoder.stem_program()) is not None:
        runners.append(Runner.open(loaded(), written, None, rows=70, positions=3 * MOST, **options))

    def encode(lengths: Sequence[int]) -> list[Tensor]:
        with torch.inference_mode():
            stem = lambda windows: runners[1].step(windows, Rows.all_of(len(windows)))  # noqa: E731
            clips = [encoder.embed(clip(name, each), stem) for each in lengths]
            counts, fed = list(map(len, clips)), torch.cat(clips)
            inputs = fed if fed.is_floating_point() else fed.tolist()
            return list(runners[0].step(inputs, Rows.all_of(*counts)).split(counts))

    try:
        yield encode
    finally:
        for runner in runners:
            runner.release()


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_transformers(name: str, level: int) -> None:
    lengths = (4, 33, 150, 7)
    with encoding(name, level=level) as encode:
        for rows, found in zip(lengths, encode(lengths), strict=True):
            expected = expected_of(name, rows)
            torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_in_int8_are_nearly_those_of_transformers(name: str, level: int) -> None:
    with encoding(name, level=level, int8=True) as encode:
        expected, (found,) = expected_of(name, 90), encode([90])
    assert float((found - expected).norm() / expected.norm()) < 0.06


@given(
    name=st.sampled_from(list(CONFIGS)),
    lengths=st.lists(st.sampled_from([1, 2, 31, 32, 33, 49, 150]), min_size=1, max_size=5),
    threads=st.integers(1, 4),
    rows=st.sampled_from([160, MOST]),
    level=st.sampled_from([1, 3, 4]),
    int8=st.booleans(),
)
def test_a_clip_has_the_same_bits_beside_others(
    name: str, lengths: list[int], threads: int, rows: int, level: int, int8: bool
) -> None:
    with encoding(name, level=level, int8=int8) as alone:
        expected = [alone([each])[0] for each in lengths]
    with encoding(name, level=level, int8=int8, threads=threads, rows=rows, again=True) as together:
        for one, found in zip(expected, together(lengths), strict=True):
            assert torch.equal(one, found)


def test_convolutions_over_spectra_have_their_fast_order_from_the_start() -> None:
    """Also in large pages. They were copied for each clip."""
    encoder = known(copy.deepcopy(module("parakeet")))
    encoder.pack(MOST)
    model = TransformerModel(encoder.module)
    model.move(torch.device("cpu"), copied=True)
    model.gather()
    weights = [layer.weight for layer in model.module.subsampling.layers if isinstance(layer, torch.nn.Conv2d)]
    assert len(weights) > 1
    for weight in weights:
        assert weight.stride() == torch.empty_like(weight, memory_format=torch.channels_last).stride()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_module_computes_what_it_did(name: str) -> None:
    packed = copy.deepcopy(module(name))
    known(packed).pack(MOST)
    found = computed(packed, name, 40)
    expected = expected_of(name, 40)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "moonshine",
        "moonshine_streaming",
        "cohere_asr",
        "parakeet_ctc",
        "parakeet_rnnt",
        "parakeet_tdt",
        "nemotron3_5_asr",
        "bart",
    ],
)
def test_an_engine_encodes_clips_together_as_alone(opens: Any, folder: Any, name: str, quantization: Any) -> None:
    """By the library, with what int8 rounds."""
    executor, description = opens(folder(name), small_config(quantization=quantization))
    sounds = [torch.randn(size, generator=torch.Generator().manual_seed(size)).numpy() for size in (5000, 900, 20_000)]
    texts = ("a cat", "the dog in the hat", "that " * 20)
    prepare = description.preparer.prepare
    asked = map(prepare, texts) if name == "bart" else (prepare((), audio=[sound]) for sound in sounds)
    jobs = [one.items[0] for one in asked]
    executor.encode(tuple(jobs))
    parts = executor._open.parts
    items = getattr(parts.network, "items", None) or parts.network.encoder
    assert items.native is not None
    for job in jobs:
        executor.encode((evolve(job, key="alone"),))
        found = executor._open.outputs.get(job.key)
        assert torch.equal(found, executor._open.outputs.get("alone"))
        with torch.inference_mode():
            (expected,) = parts.network.family.encode(parts.model.module, [job.payload])
        apart = float((found - expected).abs().max() / expected.abs().max())
        assert apart < (1e-4 if quantization is None else 0.1)
        executor.free(("alone",))


def heard(executor: Any, speech: Any, sounds: Sequence[Any], cuts: Sequence[int]) -> list[Tensor]:
    """The frames of live audios whose pieces are encoded together: one call for all of them, up to each of ``cuts``."""
    found: list[list[Tensor]] = [[] for _ in sounds]
    before: list[Any] = [None] * len(sounds)
    for cut in cuts:
        before = [
            speech.hear_on(sound[:cut], one, None, last=cut == cuts[-1])
            for sound, one in zip(sounds, before, strict=True)
        ]
        jobs = tuple(one.item for one in before)
        executor.encode(jobs)
        for frames, job in zip(found, jobs, strict=True):
            frames.append(executor._open.outputs.get(job.key))
        executor.free(tuple(job.key for job in jobs))
    return list(map(torch.cat, found))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["nemotron_asr_streaming", "nemotron3_5_asr"])
def test_sixteen_live_audios_are_encoded_together_and_each_frame_once(
    opens: Any, folder: Any, name: str, quantization: Any, monkeypatch: Any
) -> None:
    executor, description = opens(folder(name), small_config(quantization=quantization))
    calls: list[list[int]] = []
    step = Runner.step

    def counted(runner: Runner, fed: Any, rows: Rows, **options: Any) -> Tensor:
        if runner.kept:
            calls.append([count for count, *_ in rows.chunks])
        return step(runner, fed, rows, **options)

    monkeypatch.setattr(Runner, "step", counted)
    draw = torch.Generator().manual_seed(3)
    sounds = [torch.randn(40_000, generator=draw).mul(0.3).numpy() for _ in range(MOST_STATES)]
    together = heard(executor, description.speech, sounds, (8_000, 21_000, 40_000))
    assert [len(call) for call in calls] == [MOST_STATES] * 3
    assert sum(map(sum, calls)) == sum(map(len, together))
    (alone,) = heard(executor, description.speech, sounds[3:4], (8_000, 21_000, 40_000))
    assert torch.equal(alone, together[3])
    (item,) = description.preparer.prepare((), audio=[sounds[5]]).items
    parts = executor._open.parts
    with torch.inference_mode():
        (expected,) = parts.network.family.encode(parts.model.module, [item.payload])
    apart = (together[5][: len(expected) - 4] - expected[:-4]).abs().max()  # the last block sees the silence behind it
    assert float(apart / expected.abs().max()) < (1e-4 if quantization is None else 0.1)


def test_states_of_an_encoder_in_bfloat16_count_as_they_are_held(opens: Any, folder: Any) -> None:
    path, config = folder("nemotron_asr_streaming"), small_config(dtype="bfloat16")
    executor, description = opens(path, config)
    executor.encode((description.speech.hear_on(torch.randn(8_000).numpy(), None, None, last=False).item,))
    held = MOST_STATES * executor.memory().by_owner["encoder_states"]
    assert held <= estimate(path, config).by_owner["encoder_states"] < held * 1.5


def test_an_audio_whose_state_is_lost_is_heard_from_its_beginning(opens: Any, folder: Any, monkeypatch: Any) -> None:
    """Even one of more rows than a call has."""
    executor, description = opens(folder("nemotron_asr_streaming"))
    sound = torch.randn(320_000, generator=torch.Generator().manual_seed(4)).mul(0.3).numpy()
    cuts = (8_000, 100_000, 200_000, 320_000)
    assert executor._open.parts.network.encoder.native.rows < 200
    (expected,) = heard(executor, description.speech, [sound], cuts)
    monkeypatch.setattr(EncoderStates, "take", lambda *_: {})
    (found,) = heard(executor, description.speech, [sound], cuts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_an_encoder_is_computed_where_its_decoder_is_unknown(changed: Any, opens: Any, quantization: Any) -> None:
    """In int8 the matrices of that decoder are quantized all the same."""
    executor, _ = opens(changed("moonshine", decoder_hidden_act="mish"), small_config(quantization=quantization))
    network = executor._open.parts.network
    assert network.native is None
    assert network.items.native is not None
    weight = network.decoder.layers[0].mlp.fc1.weight
    assert weight.dtype == (torch.float32 if quantization is None else torch.int8)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_size": 40}, "the width of its encoder is 40; known: multiples of 16"),
        ({"encoder_hidden_act": "mish"}, "the activation of its encoder is mish; known: silu"),
        ({"encoder_num_key_value_heads": 2}, "its encoder has fewer heads of keys than of queries"),
    ],
)
def test_what_the_library_does_not_know_is_told(changes: dict[str, Any], why: str) -> None:
    made = transformers.MoonshineModel(transformers.MoonshineConfig(**{**MOONSHINE, **changes}))
    told = known_encoder(made.get_encoder())
    assert isinstance(told, str)
    assert told.startswith(why)


@pytest.mark.parametrize("frames", [1, 8, 9, 127, 128, 129, 255, 300])
def test_spectra_are_convolved_part_by_part(frames: int) -> None:
    """The convolutions of a whole clip are the same, wherever it ends."""
    encoder, features = known_encoder(copy.deepcopy(module("parakeet"))), torch.randn(frames, 16)
    with torch.inference_mode():
        hidden = features[None, None]
        for layer in encoder.module.subsampling.layers:
            hidden = layer(hidden)
        expected = hidden[0].transpose(0, 1).flatten(1)
        found = encoder.embed({"input_features": features}, lambda windows: windows)
        torch.testing.assert_close(found, expected)
