"""The native library: a step's numbers are transformers', and the same bits whatever runs beside a row, however its
sequence was cut into chunks, wherever its pages lie, and however many threads compute."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    OPTConfig,
    StableLmConfig,
)

from triolet.models.linear.modules import exactly, quantize_modules
from triolet.models.memory.rows import Rows
from triolet.models.native.decoder_layers import DecoderLayer
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Library
from triolet.models.native.panels import GROUP, in_groups
from triolet.models.native.parts import PackedLinear
from triolet.models.native.runner import Runner

from . import native_decoders
from .fed import MOST_ROWS, Told, assert_same_bits, loaded, sequences_of
from .native_decoders import CONFIGS, EVEN, HEADS, KEPT, LEVELS, PADS, SHAPE, decoder_of, expected_of, fed, module

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_numbers_are_those_of_transformers(name: str, level: int) -> None:
    draw = random.Random(3)
    with fed(name, level=level) as one:
        sequences = sequences_of([150, 1, 40, 900], 16, draw)
        for sequence, found in zip(sequences, one.all_of(sequences, draw), strict=True):
            expected = expected_of(sequence.tokens, name)
            torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_experts_that_are_equally_likely_are_chosen_as_torch_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its topk sorts few of many in another way than many of few."""
    decoder, tokens = decoder_of(name), (3, 1, 4, 1, 5)
    with torch.inference_mode():
        for layer in decoder.layers:
            if layer.experts is not None:
                layer.router.weight.zero_()
        expected = decoder.module(torch.tensor([tokens])).logits[0]
    monkeypatch.setattr(native_decoders, "decoder_of", lambda _: decoder)
    with fed(name) as one:
        (found,) = one.feed([(Told(tokens, pages=(5,)), 0, len(tokens))])
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4 * float(expected.abs().max()))


def rounded(inputs: Tensor) -> Tensor:
    """What int8 holds of ``inputs`` [..., inputs]."""
    values, scales = in_groups(inputs.reshape(-1, inputs.shape[-1]))
    return (values * scales.repeat_interleave(GROUP, 1)[:, : values.shape[1]]).view(inputs.shape)


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_numbers_in_int8_are_those_of_the_packed_module(name: str, level: int) -> None:
    """An input that lies between two values of int8 may be rounded to either, and these models magnify it: so not all
    rows are alike."""
    draw = random.Random(3)
    with fed(name, level=level, int8=True) as one:
        for linear in one.module.modules():
            if isinstance(linear, PackedLinear) and linear.panels().in_int8:
                linear.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]), *inputs[1:]))
        *short, long = sequences = sequences_of([1] * 20 + [90], 16, draw)
        asked = ([one.tokens for one in short], [long.tokens])  # the short ones at once
        known = [expected for tokens in asked for expected in one.module(torch.tensor(tokens)).logits]
        apart = []
        for found, expected in zip(one.all_of(sequences, draw), known, strict=True):
            apart.append(((found - expected).abs() / expected.abs().max()).amax(1))
        assert float((torch.cat(apart[:-1]) < 1e-4).float().mean()) > 0.6
        assert float(apart[-1].median()) < 0.2


@settings(max_examples=max(30, settings().max_examples // 2 - 200))
@given(
    name=st.sampled_from(list(CONFIGS)),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.sampled_from([1, 2, 7, 16, 33, 129, 140, 513, 1_100]), min_size=1, max_size=4),
    page_sizes=st.tuples(st.sampled_from([16, 32]), st.sampled_from([9, 16, 64])),
    threads=st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([1, 3, 16])),
    most_rows=st.sampled_from([1, 7, 33, MOST_ROWS]),
    int8=st.booleans(),
    kept=KEPT,
)
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_layout(
    name: str,
    seed: int,
    lengths: list[int],
    page_sizes: tuple[int, int],
    threads: tuple[int, int],
    most_rows: int,
    int8: bool,
    kept: torch.dtype,
) -> None:
    draw = random.Random(seed)
    lengths = [min(length, 500) for length in lengths] if page_sizes[1] == 9 else lengths
    sequences = sequences_of(lengths, page_sizes[0], draw)
    with fed(name, page_size=page_sizes[0], threads=threads[0], int8=int8, kept=kept) as together:
        expected = together.all_of(sequences, draw)
    options = {"most_rows": most_rows, "int8": int8, "kept": kept, "again": True}
    with fed(name, page_size=page_sizes[1], threads=threads[1], **options) as alone:
        assert_same_bits(alone, sequences, expected, draw)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_module_computes_what_it_did(name: str) -> None:
    decoder = decoder_of(name)
    decoder.pack()
    tokens = torch.arange(40)[None]
    with torch.inference_mode():
        expected, found = module(name)(tokens).logits, decoder.module(tokens).logits
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["llama", "neox", "opt"])
def test_matrices_in_int8_keep_their_values(name: str) -> None:
    """Each output's scale goes where its weights go."""
    decoder, tokens = decoder_of(name), torch.arange(40)[None]
    for layer in decoder.layers:
        quantize_modules(layer.module, layer.module)
    with torch.inference_mode(), exactly(decoder.module):
        expected = decoder.module(tokens).logits
        decoder.pack()
        assert torch.equal(decoder.module(tokens).logits, expected)


def test_a_model_that_is_no_program_says_why() -> None:
    opt = {**SHAPE, **PADS, **EVEN, "ffn_dim": 70}
    for config, told in (
        (LlamaConfig(**{**SHAPE, "hidden_size": 60}, **HEADS), "its width is 60; known: multiples of 16"),
        (LlamaConfig(**{**SHAPE, "intermediate_size": 80}, **HEADS), "its feed-forward part has a width of 80; known"),
        (LlamaConfig(**SHAPE, **HEADS, hidden_act="mish"), "its activation is mish; known: silu"),
        (CohereConfig(**SHAPE, **HEADS, **PADS, use_qk_norm=True), "its heads have layer norms"),
        (StableLmConfig(**SHAPE, **HEADS), "its layers are StableLmDecoderLayer; known: BambaDecoderLayer"),
        (MixtralConfig(**{**SHAPE, "intermediate_size": 80}, **HEADS), "its feed-forward part has a width of 80"),
        (
            Glm4MoeConfig(**SHAPE, **HEADS, **PADS, n_group=2, n_routed_experts=4, moe_intermediate_size=32),
            "its experts are chosen from groups that have fewer",
        ),
        (OlmoeConfig(**SHAPE, **EVEN, **PADS, clip_qkv=5.0), "its queries, keys and values are clipped"),
        (
            OPTConfig(**opt, word_embed_proj_dim=48, do_layer_norm_before=False),
            "its norms have no weights, or there is",
        ),
        (
            OPTConfig(**opt, word_embed_proj_dim=32),
            "its width is 48; known: multiples of 16, which embeddings have, too",
        ),
    ):
        made = AutoModelForCausalLM.from_config(config)
        assert str(CausalDecoder(made, made, [None] * 2).unknown()).startswith(told)


def test_pieces_of_a_step_have_their_own_pages() -> None:
    """Of more sequences than one call has rows, each with many pages."""
    with fed("llama", most_rows=3) as one:
        draw = random.Random(1)
        sequences = [evolve(sequence, cuts=(899, 1)) for sequence in sequences_of([900] * 4, 16, draw)]
        for sequence in sequences:
            one.feed([(sequence, 0, 899)])
        together = one.feed([(sequence, 899, 900) for sequence in sequences])
        for sequence, found in zip(sequences, together, strict=True):
            expected = module("llama")(torch.tensor([sequence.tokens])).logits[0, -1:]
            torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", [1, 3, 4])
def test_numbers_that_are_broken_stay_broken(broken: float, int8: bool, kept: torch.dtype, level: int) -> None:
    with fed("llama", int8=int8, kept=kept, level=level) as one:
        rows = Rows(positions=[0], chunks=[(1, 0, 0, 0)], tables=[5], wanted=[0])
        assert one.runner.step(torch.full((1, 48), broken), rows).isnan().all()


def test_neighbours_that_are_in_int8_in_part_are_no_program() -> None:
    decoder = decoder_of("qwen3")
    linear: Any = decoder.base.layers[1].self_attn.k_proj
    linear.weight = torch.nn.Parameter(torch.zeros(linear.weight.shape, dtype=torch.int8), requires_grad=False)
    linear.scales = torch.ones(len(linear.weight))
    assert decoder.unknown() == "its linear layers are in int8 in part"


def test_a_layer_costs_as_much_to_write_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of a deep model asked all layers for their matrices once."""
    calls, plain = list[int](), DecoderLayer.panels
    monkeypatch.setattr(DecoderLayer, "panels", lambda layer: calls.append(1) or plain(layer))
    asked = list[int]()
    for layers in (2, 6):
        made = AutoModelForCausalLM.from_config(LlamaConfig(**{**SHAPE, **HEADS, "num_hidden_layers": layers}))
        decoder = CausalDecoder(made, made, [None] * layers)
        decoder.pack()
        calls.clear()
        decoder.program(64)
        asked.append(len(calls))
    assert asked[1] == 3 * asked[0]


def test_caps_that_a_class_ignores_are_ignored() -> None:
    """Whatever its file says."""
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS, final_logit_softcapping=0.01)).eval()
    packed = copy.deepcopy(made)
    decoder = CausalDecoder(packed, packed, [None] * 2)
    decoder.pack()
    pages = torch.zeros(2, 4, 16, 2 * 2 * 16)
    with torch.inference_mode():
        runner = Runner.open(loaded(), decoder.program(64), pages, rows=8, positions=64, threads=1)
        rows = Rows(positions=[0], chunks=[(1, 0, 0, 0)], tables=[1], wanted=[0])
        found = runner.step(made.get_input_embeddings()(torch.tensor([3])), rows)
        runner.release()
        torch.testing.assert_close(found, made(torch.tensor([[3]])).logits[0], rtol=0.0, atol=1e-5)
