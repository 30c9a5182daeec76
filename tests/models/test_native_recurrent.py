"""Decoders with recurrent layers, by the native library: numbers are transformers', and the same bits whatever runs
beside a row, however its sequence was cut into chunks, and however many threads compute."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Mamba2Config,
    NemotronHConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from triolet.core.errors import EngineError
from triolet.models.memory.rows import Rows
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Library
from triolet.models.native.program import Program
from triolet.models.native.recurrences import Recurrence
from triolet.models.native.runner import Runner

from .fed import MOST_ROWS, VOCABULARY, Fed, Told, assert_same_bits, loaded, opened, packed, sequences_of

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

PAGES, POSITIONS, PAGE = 120, 400, 16
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": POSITIONS}
SHAPE |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LFM2 = {**SHAPE, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "conv_bias": True}
QWEN: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 20}
QWEN |= {"linear_value_head_dim": 40, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
QWEN |= {"num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
QWEN["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
NEMOTRON_EXPERTS = {"n_routed_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 36}
NEMOTRON_EXPERTS |= {"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.7}
MAMBA: dict[str, Any] = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
MAMBA |= {"mamba_chunk_size": 16, "mamba_d_conv": 4, "num_hidden_layers": 3}
CONFIGS = {
    "lfm2": Lfm2Config(**LFM2, block_multiple_of=32),
    "lfm2_moe": Lfm2MoeConfig(**LFM2, **EXPERTS, num_dense_layers=1, use_expert_bias=True, routed_scaling_factor=1.3),
    "lfm3": Lfm3Config(**{**LFM2, "layer_types": ["conv", "sliding_attention", "full_attention"]}, sliding_window=21),
    "qwen3_next": Qwen3NextConfig(**SHAPE, **QWEN, **EXPERTS, shared_expert_intermediate_size=64, mlp_only_layers=[1]),
    "qwen3_5": Qwen3_5TextConfig(**SHAPE, **QWEN),
    "granite hybrid": GraniteMoeHybridConfig(
        **SHAPE,
        **MAMBA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=5,
        num_experts_per_tok=3,
        shared_intermediate_size=64,
        embedding_multiplier=6.0,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "granite hybrid, dense": GraniteMoeHybridConfig(
        **SHAPE,
        **MAMBA,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        num_local_experts=0,
        shared_intermediate_size=64,
        position_embedding_type="rope",
        time_step_limit=(0.3, 1.1),
    ),
    "mamba2": Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_heads=6,
        head_dim=16,
        state_size=24,
        n_groups=2,
        chunk_size=16,
        num_hidden_layers=2,
        use_bias=True,
    ),
    "nemotron_h": NemotronHConfig(
        **SHAPE,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=24,
        chunk_size=16,
    ),
    "nemotron_h, experts": NemotronHConfig(
        **SHAPE,
        **NEMOTRON_EXPERTS,
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        mamba_num_heads=6,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=24,
        chunk_size=16,
        moe_latent_size=40,
    ),
    "falcon_h1": FalconH1Config(
        **{**SHAPE, "num_attention_heads": 3, "num_key_value_heads": 1},
        **MAMBA,
        mamba_d_ssm=96,
        mamba_rms_norm=True,
        mlp_multipliers=[0.7, 1.4],
        ssm_multipliers=[0.7, 1.3, 0.8, 1.2, 0.6],
        key_multiplier=0.6,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.9,
        embedding_multiplier=3.0,
        lm_head_multiplier=0.4,
    ),
    "falcon_h1, without norms": FalconH1Config(
        **{**SHAPE, "num_attention_heads": 3, "num_key_value_heads": 1}, **MAMBA, mamba_d_ssm=96
    ),
}


@functools.cache
def module(name: str) -> Any:
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.inference_mode():
        for key, parameter in made.named_parameters():
            if not key.endswith(("A_log", "dt_bias")):
                parameter.mul_(4.0).add_(0.02)  # biases and gains are zero and one
        for key, buffer in made.named_buffers():
            if key.endswith("expert_bias"):
                buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)))
    return made


def decoder_of(name: str) -> CausalDecoder:
    made, config = copy.deepcopy(module(name)), CONFIGS[name]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return CausalDecoder(made, made, [config.sliding_window if kind == "sliding_attention" else None for kind in kinds])


class RecurrentFed(Fed):
    most_pages, page_size = PAGES, PAGE
    most_at_once = 2**31  # also more than a call has

    def __init__(
        self,
        name: str,
        *,
        threads: int = 2,
        level: int = 0,
        most_rows: int = MOST_ROWS,
        int8: bool = False,
        again: bool = False,
    ) -> None:
        config: Any = CONFIGS[name]
        decoder = packed(decoder_of, module(name), name, int8=int8, again=again)
        width = 2 * getattr(config, "num_key_value_heads", 0) * getattr(config, "head_dim", 0)
        widths = [width if layer.attention is not None else 0 for layer in decoder.layers]
        self.pages = [torch.full((PAGES, PAGE, width), float("nan"), dtype=torch.float32) for width in widths]
        self.module, self.program = decoder.module, decoder.program(POSITIONS)
        options = {"rows": most_rows, "positions": POSITIONS, "threads": threads, "level": level}
        self.runner = Runner.open(loaded(), self.program, self.pages, **options)

    def feed(
        self,
        parts: Sequence[tuple[Told, int, int]],
        states: Sequence[Tensor] = (),
        saves: Sequence[tuple[int, Tensor]] = (),
    ) -> list[Tensor]:
        """Logits of each part's rows: positions ``start`` to ``stop`` of a sequence, whose state changes, and is saved
        behind some rows."""
        tokens = [token for one, start, stop in parts for token in one.tokens[start:stop]]
        tables: list[int] = []
        chunks = []
        for one, start, stop in parts:
            chunks.append((stop - start, len(tables), 0, self.program.kept))
            tables += one.pages[: -(-stop // PAGE)]
        positions = [position for _, start, stop in parts for position in range(start, stop)]
        wanted = range(len(tokens))
        rows = Rows(positions=positions, chunks=chunks, tables=tables, wanted=wanted, states=states, saves=saves)
        return list(self.runner.step(tokens, rows).split([stop - start for _, start, stop in parts]))


fed = functools.partial(opened, RecurrentFed)
sequences = functools.partial(sequences_of, page_size=PAGE, most=PAGES)


def whole(name: str, tokens: Sequence[int]) -> Tensor:
    """Logits of all tokens, by transformers."""
    logits: Tensor = module(name)(torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_numbers_are_those_of_transformers(name: str, level: int) -> None:
    draw = random.Random(3)
    with fed(name, level=level) as one:
        told = sequences([150, 1, 40], draw=draw)
        for sequence, found in zip(told, one.all_of(told, draw), strict=True):
            expected = whole(name, sequence.tokens)
            torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4 * float(expected.abs().max()))


def test_experts_that_are_all_unlikely_weigh_what_they_do_in_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2 adds a number to the sum of their chances, which then counts."""
    changed, draw = copy.deepcopy(module("lfm2_moe")), random.Random(3)
    with torch.inference_mode():
        changed.model.embed_tokens.weight.add_(9.0)
        for layer in changed.model.layers[1:]:
            layer.feed_forward.gate.weight.mul_(0.2).sub_(0.07)
    monkeypatch.setattr(f"{__name__}.module", lambda _: changed)
    with fed("lfm2_moe") as one:
        (sequence,) = sequences([20], draw=draw)
        expected = whole("lfm2_moe", sequence.tokens)
        (found,) = one.all_of([sequence], draw)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4 * float(expected.abs().max()))


@settings(max_examples=max(40, settings().max_examples // 2 - 200))
@given(
    name=st.sampled_from(list(CONFIGS)),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.sampled_from([1, 2, 7, 16, 33, 129, 300]), min_size=1, max_size=4),
    threads=st.tuples(st.sampled_from([1, 2, 5]), st.sampled_from([1, 3, 16])),
    most_rows=st.sampled_from([1, 7, 33, MOST_ROWS]),
    int8=st.booleans(),
)
def test_a_row_has_the_same_bits_in_every_batch_and_chunk(
    name: str, seed: int, lengths: list[int], threads: tuple[int, int], most_rows: int, int8: bool
) -> None:
    draw = random.Random(seed)
    told = sequences(lengths, draw=draw)
    with fed(name, threads=threads[0], int8=int8) as together:
        expected = together.all_of(told, draw)
    with fed(name, threads=threads[1], most_rows=most_rows, int8=int8, again=True) as alone:
        assert_same_bits(alone, told, expected, draw)


@pytest.mark.parametrize("name", ["lfm3", "qwen3_5", "granite hybrid"])
def test_a_state_is_saved_as_it_is_behind_a_row(name: str) -> None:
    """Whatever comes behind it, in one call or in several: whoever goes on from it has the same bits."""
    draw = random.Random(4)
    with fed(name, most_rows=33) as one:
        first, second = sequences([70, 9], draw=draw)
        states = [torch.zeros(one.program.state, dtype=torch.float32) for _ in range(2)]
        one.feed([(first, 0, 1), (second, 0, 5)], states)
        rows = [0, 1, 1, 31, 32, 33, 68, 69, 72]  # of the step, whose second part begins with row 69
        saves = [(row, torch.full_like(states[0], float("nan"))) for row in rows]
        expected, _ = one.feed([(first, 1, 70), (second, 5, 9)], states, saves)
        assert torch.equal(saves[1][1], saves[2][1])
        assert torch.equal(saves[6][1], states[0])
        assert torch.equal(saves[-1][1], states[1])
        for row, state in saves[:6]:
            found = one.feed([(first, row + 2, 70)], [state])[0]
            assert torch.equal(found, expected[row + 1 :])
        fresh = torch.zeros_like(states[0])
        one.feed([(second, 0, 6)], [fresh])
        assert torch.equal(fresh, saves[7][1])


def test_saves_that_two_would_write_are_refused() -> None:
    """Into one state, or into the state of a chunk."""
    told = Told(tokens=(3, 4), pages=(0,), cuts=(2,))
    with fed("lfm2") as one:
        state, other = (torch.zeros(one.program.state, dtype=torch.float32) for _ in range(2))
        for saves in ([(0, other), (1, other)], [(0, state)]):
            with pytest.raises(EngineError, match="refuses a step of 2 rows: slot"):
                one.feed([(told, 0, 2)], [state], saves)


def test_two_chunks_with_one_state_are_refused() -> None:
    told = Told(tokens=(3, 4), pages=(0,), cuts=(1, 1))
    with fed("lfm2") as one, pytest.raises(EngineError, match="refuses a step of 2 rows: slot"):
        state = torch.zeros(one.program.state, dtype=torch.float32)
        one.feed([(told, 0, 1), (told, 1, 2)], [state, state])


@pytest.mark.parametrize("rows", [(3,), (1, 0), (-1,)])
def test_saves_that_are_none_are_refused(rows: Sequence[int]) -> None:
    told = Told(tokens=(3, 4), pages=(0,), cuts=(2,))
    with fed("lfm2") as one, pytest.raises(EngineError, match="refuses a step of 2 rows: slot"):
        state = torch.zeros(one.program.state, dtype=torch.float32)
        one.feed([(told, 0, 2)], [state], [(row, state.clone()) for row in rows])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_module_computes_what_it_did(name: str) -> None:
    decoder = decoder_of(name)
    decoder.pack()
    tokens = list(range(40))
    with torch.inference_mode():
        expected, found = whole(name, tokens), decoder.module(torch.tensor([tokens]), use_cache=False).logits[0]
        torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))


def test_a_chunk_without_a_state_is_refused() -> None:
    told = Told(tokens=(3, 4), pages=(0,), cuts=(2,))
    with fed("qwen3_5") as one, pytest.raises(EngineError, match="refuses a step of 2 rows: slot"):
        one.feed([(told, 0, 2)], [])


@pytest.mark.parametrize("short", [0, 1])
def test_a_program_whose_states_are_too_small_does_not_open(short: int) -> None:
    """However many columns they have."""
    heads, depth, program = 1 << 19 | 1, 2, Program()
    source, made, gates, _ = (program.buffer(width) for width in (2 * depth + heads, heads, 2 * heads, 16))
    numbers = torch.ones(heads, dtype=torch.float32)
    told: dict[str, Any] = {"heads": heads, "groups": 1, "size": 1, "depth": depth, "first": 0, "delta": True}
    program.recur(source, made, gates, Recurrence(**told, decay=numbers, shift=numbers))
    program.state -= short
    with pytest.raises(AssertionError, match="an operation would leave") if short else nullcontext():
        pages = [torch.empty(1, PAGE, 0, dtype=torch.float32)]
        Runner.open(loaded(), program, pages, rows=1, positions=1, threads=1).release()
