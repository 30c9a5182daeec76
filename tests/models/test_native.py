"""The native library: a step's numbers are transformers', and the same bits whatever runs beside a row, however its
sequence was cut into chunks, wherever its pages lie, and however many threads compute."""

from __future__ import annotations

import copy
import ctypes
import functools
import math
import random
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from triolet.core.errors import EngineError
from triolet.models.architectures.layer_sizes import layer_sizes
from triolet.models.linear.modules import exactly, quantize_modules
from triolet.models.memory.rows import Rows
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Library, _check_sources
from triolet.models.native.panels import GROUP, PANEL, Panels, in_groups
from triolet.models.native.parts import PackedLinear
from triolet.models.native.runner import Runner

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

PAGES, POSITIONS, MOST_ROWS, VOCABULARY = 280, 1_200, 80, 83
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": POSITIONS}
KINDS = ["sliding_attention", "full_attention"]
EVEN = {"num_attention_heads": 3}  # as many heads of keys
PADS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
ASKED = {"num_experts_per_tok": 3}  # experts of a row
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 14,
    "v_head_dim": 21,
    "num_key_value_heads": 3,
    **EVEN,
}
ROUTED = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
KEPT = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])  # what pages and slots hold
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, **HEADS, attention_bias=True),
    "mistral": MistralConfig(**SHAPE, **HEADS, sliding_window=21),
    "far window": MistralConfig(**SHAPE, **HEADS, sliding_window=700),
    "qwen2": Qwen2Config(**SHAPE, **{**HEADS, "head_dim": 32, "num_attention_heads": 4}, tie_word_embeddings=True),
    "heads of 12": LlamaConfig(**SHAPE, **{**HEADS, "head_dim": 12}),
    "heads of 40": MistralConfig(**SHAPE, **{**HEADS, "head_dim": 40}, sliding_window=21),
    "norms of heads of 20": Qwen3Config(**SHAPE, **{**HEADS, "head_dim": 20}),
    "qwen3": Qwen3Config(**SHAPE, **{**HEADS, "num_key_value_heads": 6}),
    "gemma2": Gemma2Config(**SHAPE, **HEADS, sliding_window=21, final_logit_softcapping=9.0, query_pre_attn_scalar=9),
    "gemma3": Gemma3TextConfig(**SHAPE, **HEADS, sliding_window=21, sliding_window_pattern=2),
    "phi3": Phi3Config(
        **{**SHAPE, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
    "smollm3": SmolLM3Config(**SHAPE, **HEADS, no_rope_layers=[1, 0], pad_token_id=0),
    "gemma": GemmaConfig(**SHAPE, **HEADS),
    "helium": HeliumConfig(**SHAPE, **{**HEADS, "head_dim": 8}, pad_token_id=0),
    "seed": SeedOssConfig(**SHAPE, **HEADS, **PADS, attention_bias=True),
    "ernie": Ernie4_5Config(**SHAPE, **HEADS, **PADS, use_bias=True),
    "ministral3": Ministral3Config(
        **SHAPE,
        **HEADS,
        **PADS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 128,
        },
    ),
    "granite": GraniteConfig(
        **SHAPE,
        **HEADS,
        **PADS,
        embedding_multiplier=6.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.5,
        tie_word_embeddings=True,
    ),
    "olmo2": Olmo2Config(**SHAPE, **HEADS, **PADS),
    "olmo3": Olmo3Config(**SHAPE, **HEADS, **PADS, sliding_window=21, layer_types=KINDS),
    "exaone4": Exaone4Config(**SHAPE, **HEADS, **PADS, sliding_window=21, layer_types=KINDS),
    "glm": GlmConfig(**SHAPE, **HEADS, **PADS, attention_bias=True),
    "glm4": Glm4Config(**SHAPE, **HEADS, **PADS),
    "starcoder2": Starcoder2Config(**SHAPE, **HEADS, **PADS, sliding_window=21, use_bias=True),
    "cohere": CohereConfig(**SHAPE, **HEADS, **PADS, logit_scale=0.3, attention_bias=True),
    "cohere2": Cohere2Config(**SHAPE, **HEADS, **PADS, logit_scale=0.3, sliding_window=21, layer_types=KINDS),
    "phi": PhiConfig(**SHAPE, **HEADS, **PADS),
    "neox": GPTNeoXConfig(**SHAPE, **EVEN, **PADS, max_position_embeddings=POSITIONS),
    "neox, one after the other": GPTNeoXConfig(
        **SHAPE, **EVEN, **PADS, max_position_embeddings=POSITIONS, use_parallel_residual=False, hidden_act="relu"
    ),
    "gpt2": GPT2Config(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=3, n_positions=POSITIONS),
    "mixtral": MixtralConfig(**SHAPE, **HEADS, num_local_experts=5),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, **HEADS, **ASKED, num_experts=40, moe_intermediate_size=32, shared_expert_intermediate_size=64
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, **HEADS, num_experts=70, num_experts_per_tok=1, moe_intermediate_size=64, mlp_only_layers=[1]
    ),
    "olmoe": OlmoeConfig(**SHAPE, **EVEN, **PADS, **ASKED, num_experts=9, max_position_embeddings=POSITIONS),
    "granitemoeshared": GraniteMoeSharedConfig(
        **SHAPE,
        **HEADS,
        **PADS,
        **ASKED,
        num_local_experts=6,
        shared_intermediate_size=64,
        embedding_multiplier=6.0,
        residual_multiplier=0.7,
        logits_scaling=2.5,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **SHAPE, **HEADS, **PADS, moe_k=3, moe_num_experts=7, moe_intermediate_size=32, moe_layer_start_index=1
    ),
    "glm4_moe": Glm4MoeConfig(
        **SHAPE,
        **HEADS,
        **PADS,
        **ASKED,
        n_routed_experts=7,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE, **HEADS, **PADS, **ASKED, num_local_experts=7, sliding_window=21, swiglu_limit=0.7, layer_types=KINDS
    ),
    "deepseek_v2": DeepseekV2Config(
        **SHAPE,
        **LATENT,
        **PADS,
        **ASKED,
        **ROUTED,
        n_routed_experts=7,
        q_lora_rank=None,
        topk_method="greedy",
        max_position_embeddings=POSITIONS,
    ),
    "deepseek_v3": DeepseekV3Config(
        **SHAPE,
        **LATENT,
        **PADS,
        **ASKED,
        **ROUTED,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        q_lora_rank=32,
        max_position_embeddings=POSITIONS,
    ),
    "opt": OPTConfig(
        **{**SHAPE, **PADS}, **EVEN, ffn_dim=70, max_position_embeddings=POSITIONS, word_embed_proj_dim=48
    ),
}
ALIKE = {
    "gemma",
    "helium",
    "seed",
    "ernie",
    "olmo3",
    "exaone4",
    "glm",
    "glm4",
    "starcoder2",
    "cohere2",
    "phi",
    "neox",
    "opt",
}
ALIKE |= {"neox, one after the other", "gpt2", "qwen3_moe", "olmoe", "granitemoeshared", "ernie4_5_moe"}
ALIKE |= {"glm4_moe", "deepseek_v2"}
"""Families whose operations others have, too: the best level is enough."""
LEVELS = [(name, level) for name in CONFIGS for level in ([0] if name in ALIKE else [1, 3, 4])]


def loaded() -> Library:
    library = Library.load()
    assert library is not None
    return library


@functools.cache
def module(name: str) -> Any:
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.inference_mode():
        for parameter in made.parameters():
            parameter.mul_(4.0).add_(0.02)  # biases and gains are zero and one
    return made


def windows(name: str) -> list[int | None]:
    """Of each layer, as transformers' attention is asked for them."""
    config = CONFIGS[name]
    shared = config.sliding_window if isinstance(config, (MistralConfig, Starcoder2Config)) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if shared else "full_attention"] * 2
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def decoder_of(name: str) -> CausalDecoder:
    made = copy.deepcopy(module(name))
    return CausalDecoder(made, made, windows(name))


@frozen
class Told:
    """Tokens, the pages that they lie in, the lengths of the chunks that they are fed in, and the number of the encoder
    output that they are about."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    output: int = 0


class Fed:
    """A model that was opened, and what it answered: logits of each position."""

    most_pages = PAGES

    def __init__(
        self,
        name: str,
        *,
        page_size: int = 16,
        threads: int = 2,
        level: int = 0,
        most_rows: int = MOST_ROWS,
        int8: bool = False,
        kept: torch.dtype = torch.float32,
    ) -> None:
        self.page_size = page_size
        config = CONFIGS[name]
        decoder = decoder_of(name)
        assert decoder.unknown() is None
        sizes = [(PAGES, page_size, layer.numbers) for layer in layer_sizes(Path(), config)]
        self.pages = [torch.full(size, float("nan"), dtype=kept) for size in sizes]
        decoder.pack(int8=int8)
        self.module = decoder.module
        options = {"rows": most_rows, "positions": POSITIONS, "threads": threads, "level": level}
        self.runner = Runner.open(loaded(), decoder.program(POSITIONS), self.pages, **options)

    def feed(self, parts: Sequence[tuple[Told, int, int]]) -> list[Tensor]:
        """Logits of each part's rows: positions ``start`` to ``stop`` of a sequence."""
        tokens = [token for one, start, stop in parts for token in one.tokens[start:stop]]
        placed = isinstance(self.module.config, (GPT2Config, OPTConfig))  # its positions are looked up, too
        inputs = tokens if placed else self.module.get_input_embeddings()(torch.tensor(tokens))
        tables: list[int] = []
        chunks = []
        for one, start, stop in parts:
            chunks.append((stop - start, len(tables), 0, 0))
            tables += one.pages[: -(-stop // self.page_size)]
        positions = [position for _, start, stop in parts for position in range(start, stop)]
        rows = Rows(positions=positions, chunks=chunks, tables=tables, wanted=range(len(tokens)))
        return list(self.runner.step(inputs, rows).split([stop - start for _, start, stop in parts]))

    def all_of(self, sequences: Sequence[Told], draw: random.Random) -> list[Tensor]:
        """Feeds all of them, some of their next chunks in each step. Logits of each sequence."""
        found: list[list[Tensor]] = [[] for _ in sequences]
        at = [0] * len(sequences)
        left = [list(one.cuts) for one in sequences]
        while waiting := [index for index, cuts in enumerate(left) if cuts]:
            chosen: list[tuple[int, int]] = []
            for index in draw.sample(waiting, draw.randint(1, len(waiting))):
                if sum(count for _, count in chosen) + left[index][0] <= MOST_ROWS:
                    chosen.append((index, left[index].pop(0)))
            parts = [(sequences[index], at[index], at[index] + count) for index, count in chosen]
            for (index, count), logits in zip(chosen, self.feed(parts) if parts else [], strict=True):
                found[index].append(logits)
                at[index] += count
        return [torch.cat(parts) for parts in found]


@contextmanager
def fed(name: str, *given: Any, kind: type[Fed] = Fed, **options: Any) -> Iterator[Fed]:
    with torch.inference_mode():
        one = kind(name, *given, **options)
        try:
            yield one
        finally:
            one.runner.release()


def cut(length: int, draw: random.Random) -> tuple[int, ...]:
    """Chunks of up to the most rows, often of one."""
    cuts: list[int] = []
    while left := length - sum(cuts):
        cuts.append(min(left, draw.choice([1, draw.randint(1, 12), draw.randint(1, MOST_ROWS)])))
    return tuple(cuts)


def sequences_of(
    lengths: Sequence[int], page_size: int, draw: random.Random, *, most: int = PAGES, outputs: int = 1
) -> list[Told]:
    pages = draw.sample(range(most), most)
    made = []
    for length in lengths:
        own = [pages.pop() for _ in range(-(-length // page_size))]
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(length))
        made.append(Told(tokens, tuple(own), cut(length, draw), draw.randrange(outputs)))
    return made


@functools.cache
def expected_of(tokens: tuple[int, ...], name: str) -> Tensor:
    """Logits of all tokens, by transformers."""
    logits: Tensor = module(name)(torch.tensor([tokens])).logits
    return logits[0]


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
    monkeypatch.setattr(sys.modules[__name__], "decoder_of", lambda _: decoder)
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


def assert_same_bits(alone: Fed, sequences: Sequence[Told], bits: Sequence[Tensor], draw: random.Random) -> None:
    """That each sequence alone, in other pages and chunks, has the same logits."""
    for sequence, expected in zip(sequences, bits, strict=True):
        length = len(sequence.tokens)
        pages = draw.sample(range(alone.most_pages), -(-length // alone.page_size))
        other = evolve(sequence, pages=tuple(pages), cuts=cut(length, draw))
        assert torch.equal(alone.all_of([other], draw)[0], expected)


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
    options = {"most_rows": most_rows, "int8": int8, "kept": kept}
    with fed(name, page_size=page_sizes[1], threads=threads[1], **options) as alone:
        assert_same_bits(alone, sequences, expected, draw)


NUMBERS = st.one_of(
    st.integers(-2, 90), st.sampled_from([-(2**31), PAGES - 1, PAGES, POSITIONS - 1, POSITIONS, 2**31 - 1])
)


@st.composite
def plans(draw: st.DrawFn) -> Rows:
    """A plan, of which up to two numbers are others."""
    positions: list[int] = []
    chunks: list[tuple[int, int, int, int]] = []
    tables: list[int] = []
    lasts: list[int] = []  # the last position of each row's chunk
    for first, length in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=3)):
        positions += range(first, first + length)
        lasts += [first + length - 1] * length
        chunks.append((length, len(tables), 0, 0))
        pages = -(-(first + length) // 16)
        tables += draw(st.lists(st.integers(0, PAGES - 1), min_size=pages, max_size=pages))
    wanted = draw(st.lists(st.integers(0, len(positions) - 1), max_size=3))
    seen = draw(st.sampled_from([[], positions.copy(), lasts]))
    for _ in range(draw(st.integers(0, 2))):
        told = draw(st.sampled_from([positions, tables, wanted, seen]))
        if told:
            told[draw(st.integers(0, len(told) - 1))] = draw(NUMBERS)
    if draw(st.booleans()):
        chunks[draw(st.integers(0, len(chunks) - 1))] = draw(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS))
    return Rows(positions=positions, chunks=chunks, tables=tables, wanted=wanted, seen=seen)


@functools.cache
def llama() -> Fed:
    """One for all plans."""
    return Fed("llama")


@settings(max_examples=200)
@given(rows=plans())
def test_a_plan_that_is_none_is_refused(rows: Rows) -> None:
    """Before anything is touched."""
    with torch.inference_mode():
        one = llama()
        before, inputs = (
            [part.clone() for part in one.pages],
            torch.zeros(max(1, len(rows.positions)), SHAPE["hidden_size"]),
        )
        if is_plan(rows):
            found = one.runner.step(inputs, rows)
            assert found.isfinite().all() or any(rows.positions)  # pages before are not written
            return
        with pytest.raises(EngineError, match="the native library refuses a step"):
            one.runner.step(inputs, rows)
        torch.testing.assert_close(one.pages, before, rtol=0.0, atol=0.0, equal_nan=True)


def test_a_library_of_other_sources_is_refused(tmp_path: Path) -> None:
    """After a pull in a checkout. An installed package has no sources beside it; an older library does not tell."""
    calls, sources = ctypes.CDLL(loaded()._calls._name), tmp_path / "native"
    _check_sources(calls, sources)
    shutil.copytree(Path(__file__).parents[2] / "native", sources)
    (sources / "step.cpp.orig").write_text("what an editor or a merge leaves", encoding="utf-8")
    _check_sources(calls, sources)
    told = f"other sources than those in {sources}; compile it anew: pip install --no-deps --editable {tmp_path}"
    with pytest.raises(EngineError, match=re.escape(told)):
        _check_sources(ctypes.CDLL(None), sources)
    with (sources / "step.h").open("a") as header:
        header.write("\n")
    with pytest.raises(EngineError, match=re.escape(told)):
        _check_sources(calls, sources)


def test_a_program_that_would_leave_its_buffers_does_not_open() -> None:
    decoder = decoder_of("llama")
    decoder.pack()
    program = decoder.program(POSITIONS)
    program.widths[1] -= 1
    with pytest.raises(AssertionError, match="an operation would leave the buffers"):
        Runner.open(loaded(), program, torch.empty(2, 4, 16, 64), rows=8, positions=64, threads=1)


def is_plan(rows: Rows, page_size: int = 16) -> bool:
    """Whether every number is in its range, and each chunk's positions are one behind the other."""
    count = len(rows.positions)
    within = 1 <= count <= MOST_ROWS and rows.tables and all(0 <= page < PAGES for page in rows.tables)
    if not within or len(rows.wanted) > count or not all(0 <= row < count for row in rows.wanted):
        return False
    at = 0
    for length, begin, _, _ in rows.chunks:
        if not 1 <= length <= count - at or not 0 <= begin < len(rows.tables):
            return False
        first = rows.positions[at]
        if list(rows.positions[at : at + length]) != list(range(first, first + length)):
            return False
        if (
            not 0 <= first <= first + length - 1 < POSITIONS
            or (first + length - 1) // page_size >= len(rows.tables) - begin
        ):
            return False
        seen, last = rows.seen[at : at + length], first + length - 1
        least = map(max, rows.positions[at : at + length], (0, *seen[:-1])) if seen else ()
        if not all(low <= one <= last for low, one in zip(least, seen, strict=True)):
            return False
        at += length
    return at == count


@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_panels_hold_the_matrix_exactly(outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype).float()
    packed = Panels.of(weight)
    assert torch.finfo(packed.packed.dtype).bits <= torch.finfo(dtype).bits
    assert torch.equal(packed.part(0, outputs), weight)
    assert torch.equal(packed.part(outputs // 3, outputs), weight[outputs // 3 :])
    places = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(places), weight[places])
    pairs = Panels.of(weight.bfloat16())
    assert torch.equal(pairs.rows(places), weight.bfloat16().float()[places])


@given(
    outputs=st.integers(1, 70),
    inputs=st.integers(1, 150),
    power=st.sampled_from([-60, -22, -9, 0, 40]),
    uneven=st.booleans(),
    seed=st.integers(0, 99),
)
def test_panels_hold_the_matrix_in_int8(outputs: int, inputs: int, power: int, uneven: bool, seed: int) -> None:
    """Within half of a step of each group's scale, even if float16 holds few of the scales well."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    weight[outputs // 2] *= 1e-4 if uneven else 1.0
    weight[outputs // 3] = 0.0
    packed = Panels.of(weight, dtype=torch.int8)
    slack = 2.0**-25 if packed.packed.shape[-1] == PANEL * (2 + GROUP) else 0.0  # of a scale that is rounded
    held = packed.part(0, outputs)
    assert held.shape == weight.shape
    for start in range(0, inputs, GROUP):
        own, kept = weight[:, start : start + GROUP], held[:, start : start + GROUP]
        step = own.abs().amax(1, keepdim=True) / 127
        assert bool(((own - kept).abs() <= step * 0.501 + slack).all())
    places = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(places), held[places])


@pytest.mark.parametrize("place", [128.0, 128.49, 128.5, 128.51, 129.5, 200.4999])
def test_the_largest_value_stays_it_where_float16_is_coarse(place: float) -> None:
    """Its scale is rounded up: 128 would be -128."""
    row = torch.linspace(-1.0, 1.0, GROUP)[None] * (127.0 * place * 2.0**-24)
    packed = Panels.of(row, dtype=torch.int8)
    assert packed.packed.shape[-1] == PANEL * (2 + GROUP)
    torch.testing.assert_close(packed.part(0, 1), row, rtol=0.0, atol=0.501 * math.ceil(place) * 2.0**-24)


@pytest.mark.parametrize(("factor", "of_scale"), [(1.0, 2), (0.0, 2), (1e-3, 4), (float("nan"), 4)])
def test_experts_of_unequal_size_have_one_format(factor: float, of_scale: int) -> None:
    weights = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    weights[1] *= factor
    packed = Panels.of_each(weights, dtype=torch.int8)
    assert packed.packed.shape == (6, 2, 32 * (of_scale + 32))
    for index, weight in enumerate(weights):
        held = packed.part(64 * index, 64 * index + 40)
        size = factor if index == 1 and not math.isnan(factor) else 1.0
        torch.testing.assert_close(held, weight, rtol=0.0, atol=4e-4 * size, equal_nan=True)


@pytest.mark.parametrize(("scale", "of_scale"), [(0.25, 2), (0.1, 4)])
def test_scales_of_a_checkpoint_are_held_exactly(scale: float, of_scale: int) -> None:
    values = torch.randint(-127, 128, (40, 70), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    packed = Panels.of_int8(values, torch.full((40, 1), scale))
    assert packed.packed.shape == (2, 3, 32 * (of_scale + 32))
    assert torch.equal(packed.part(0, 40), values * torch.tensor(scale))


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


def test_rows_that_see_each_other_are_in_one_piece() -> None:
    rows = Rows(
        positions=range(12), chunks=[(12, 0, 0, 0)], tables=(0, 1), wanted=(), seen=[0, 1, *[6] * 5, *range(7, 12)]
    )
    pieces = list(rows.pieces(6, 6))
    assert [(start, stop) for start, stop, _, _ in pieces] == [(0, 2), (2, 8), (8, 12)]
    assert [list(piece.seen) for _, _, piece, _ in pieces] == [[0, 1], [*[6] * 5, 7], [8, 9, 10, 11]]
    with pytest.raises(AssertionError, match="more than 4 rows see each other"):
        list(rows.pieces(4, 6))


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
