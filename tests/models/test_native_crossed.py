"""Encoder-decoders by the native library: a step's numbers are transformers', and the same bits whatever runs beside a
row, however its sequence was cut into chunks, wherever its pages and its slot lie, and however many threads compute."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from triolet.core.errors import EngineError
from triolet.core.plan import Chunk
from triolet.models.architectures.crossed_family import find_crossed_family
from triolet.models.memory.encoder_outputs import EncoderOutputs
from triolet.models.memory.kv import PagedKV
from triolet.models.memory.module import TransformerModel
from triolet.models.memory.rows import Rows
from triolet.models.memory.slots import CrossKV
from triolet.models.native.crossed_decoder import CrossedDecoder
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner
from triolet.models.networks.encoder_decoder import EncoderDecoderNetwork
from triolet.models.networks.item_encoder import ItemEncoder
from triolet.models.networks.network import Feed, Record

from .fed import VOCABULARY, Fed, Told, assert_same_bits, loaded, opened, sequences_of
from .native_decoders import KEPT
from .texts import start_of

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

PAGES, SLOTS, POSITIONS = 200, 5, 700
SHAPE = {
    "d_model": 48,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 100,
    "max_position_embeddings": POSITIONS,
    "vocab_size": VOCABULARY,
}
T5 = {
    "d_model": 48,
    "d_kv": 20,
    "num_heads": 3,
    "d_ff": 96,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "n_positions": POSITIONS,
    "vocab_size": VOCABULARY,
}
MOONSHINE = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "encoder_num_hidden_layers": 1,
    "encoder_num_attention_heads": 4,
    "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4,
}
STREAMING = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
FAST_CONFORMER = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20, "num_mel_bins": 8}
COHERE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 100,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    "encoder_config": {**FAST_CONFORMER, "hidden_size": 32},
}
CONFIGS = {
    "bart": transformers.BartConfig(**SHAPE, scale_embedding=True),
    "bart with a head of its own": transformers.BartConfig(**SHAPE, tie_word_embeddings=False),
    "bart, heads of 16": transformers.BartConfig(**{**SHAPE, "decoder_attention_heads": 3}, activation_function="relu"),
    "mbart": transformers.MBartConfig(**SHAPE, scale_embedding=True),
    "pegasus": transformers.PegasusConfig(**{**SHAPE, "d_model": 80}, scale_embedding=True),
    "t5": transformers.T5Config(**{**T5, "d_ff": 90}),
    "t5 1.1 in 16 bits": transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "t5, far distances": transformers.T5Config(**{**T5, "relative_attention_max_distance": 400}),
    "mt5": transformers.MT5Config(**T5),
    "moonshine": transformers.MoonshineConfig(**MOONSHINE, pad_head_dim_to_multiple_of=8),
    "moonshine, turned in part": transformers.MoonshineConfig(
        **MOONSHINE,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.7},
    ),
    "moonshine streaming": transformers.MoonshineStreamingConfig(
        **STREAMING, encoder_config={**STREAMING, "hidden_size": 32, "num_attention_heads": 2}
    ),
    "cohere": transformers.CohereAsrConfig(**COHERE),
    "canary": transformers.CanaryConfig(
        encoder_config={**FAST_CONFORMER, "hidden_size": 48},
        decoder_config={**COHERE, "num_key_value_heads": 4, "head_dim": 12},
        vocab_size=VOCABULARY,
    ),
}


@functools.cache
def module(name: str) -> Any:
    torch.manual_seed(5)
    config: Any = CONFIGS[name]
    family = find_crossed_family(config.model_type)
    assert family is not None
    made = getattr(transformers, family.loader)._from_config(config, attn_implementation="eager").eval()
    with torch.inference_mode():
        for parameter in made.parameters():
            parameter.mul_(1.0 if "t5" in name else 4.0).add_(0.02)  # biases and gains are zero and one
            if "16 bits" in name:
                parameter.copy_(parameter.bfloat16())
        if hasattr(made, "final_logits_bias"):
            made.final_logits_bias.copy_(torch.randn(1, VOCABULARY))
    return made


@functools.cache
def output(name: str, number: int) -> Tensor:
    """An encoder output, of another length for each number."""
    length = (1, 40, 129, 300, POSITIONS)[number]
    config = module(name).config
    width = getattr(config, "encoder_config", config).hidden_size
    return torch.randn(length, width, generator=torch.Generator().manual_seed(number))


@functools.cache
def expected_of(tokens: tuple[int, ...], number: int, name: str, module: Any) -> Tensor:
    """Logits of all tokens about an output, by transformers' ``module``."""
    told: Any = BaseModelOutput(last_hidden_state=output(name, number)[None].clone())  # some add to it
    told.attention_mask = None
    with torch.inference_mode():
        logits: Tensor = module(encoder_outputs=told, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0]


class CrossedFed(Fed):
    """A model that was opened, and what it answered."""

    most_pages = PAGES

    def __init__(
        self,
        name: str,
        draw: random.Random,
        *,
        page_size: int = 16,
        threads: int = 2,
        level: int = 0,
        rows: int = 80,
        kept: torch.dtype = torch.float32,
    ) -> None:
        self.page_size = page_size
        made = copy.deepcopy(module(name))
        decoder, family = CrossedDecoder(made), find_crossed_family(made.config.model_type)
        assert family is not None
        assert decoder.unknown() is None
        decoder.pack()
        shape, place = family.shape(Path(), made.config), torch.device("cpu")
        sizes = {"dtype": kept, "device": place}
        paged = PagedKV.allocate(**sizes, layers=shape.kv, pages=PAGES, page_size=page_size)
        heads = {"layers": shape.layers, "heads": shape.kv_heads, "head_dim": shape.head_dim}
        cross = CrossKV.allocate(**sizes, **heads, slots=SLOTS, embeddings=POSITIONS)
        for tensor in (*paged.tensors(), *cross.tensors()):
            tensor.fill_(torch.nan)
        options = {"rows": rows, "positions": POSITIONS, "threads": threads, "level": level}
        self.program, model = decoder.program(POSITIONS, family.distances(made, POSITIONS)), TransformerModel(made)
        self.runner = Runner.open(loaded(), self.program, list(paged.parts()), *cross.tensors(), **options)
        self.crossing = Runner.open(loaded(), decoder.crossing(), None, **options)
        self.network = EncoderDecoderNetwork(
            model=model,
            family=family,
            items=ItemEncoder(model=model, family=family),
            paged=paged,
            cross=cross,
            positions=POSITIONS,
            hidden=shape.hidden,
            device=place,
            native=self.runner,
            crossing=self.crossing,
        )
        self.slots = draw.sample(range(SLOTS), SLOTS)  # of each encoder output
        for number, slot in enumerate(self.slots):
            self.network.write_cross(slot, output(name, number))
        self.crossing.release()

    def feed(self, parts: Sequence[tuple[Told, int, int]], states: Sequence[Tensor] = ()) -> list[Tensor]:
        """Logits of each part's rows: positions ``start`` to ``stop`` of a sequence."""
        feeds = [self._feed(number, *part) for number, part in enumerate(parts)]
        wanted = [(index, row) for index, feed in enumerate(feeds) for row in range(feed.part.length)]
        logits = self.network.logits(feeds, wanted, EncoderOutputs())
        return list(logits.split([stop - start for _, start, stop in parts]))

    def _feed(self, number: int, one: Told, start: int, stop: int) -> Feed:
        part = Chunk(
            sequence_id=number,
            start=start,
            length=stop - start,
            page_table=one.pages,
            cross_slot=self.slots[one.output],
            samples=False,
        )
        return Feed(part=part, record=Record(start_of(number, one.tokens), list(one.tokens)))


fed = functools.partial(opened, CrossedFed)
sequences = functools.partial(sequences_of, most=PAGES, outputs=SLOTS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("level", [1, 3, 4])
def test_numbers_are_those_of_transformers(name: str, level: int) -> None:
    draw = random.Random(3)
    with fed(name, draw, level=level) as one:
        told = sequences([150, 1, 40, 600, 2, 3], 16, draw)
        for sequence, found in zip(told, one.all_of(told, draw), strict=True):
            expected = expected_of(sequence.tokens, sequence.output, name, module(name))
            torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("slot", "length"), [(-1, 9), (SLOTS, 9), (0, 0), (0, -1), (0, POSITIONS + 1)])
def test_a_slot_that_is_none_is_refused(slot: int, length: int) -> None:
    """Before anything is touched: pages are as they were."""
    with fed("bart", random.Random(3)) as one:
        rows = Rows(positions=[0], chunks=[(1, 0, slot, length)], tables=[5], wanted=[0])
        with pytest.raises(EngineError, match="refuses a step of 1 rows: slot"):
            one.runner.step([0], rows)
        assert all(tensor.isnan().all() for tensor in one.network.paged.tensors())


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "level"),
    [("bart", 1), ("bart", 3), ("bart", 4), ("t5", 4), ("moonshine, turned in part", 3), ("cohere", 1)],
)
def test_slots_and_pages_of_16_bits_cost_what_they_round(name: str, level: int, kept: torch.dtype) -> None:
    draw = random.Random(3)
    told = sequences([150, 1, 40, 300], 16, draw)
    with fed(name, random.Random(2), level=level) as one:
        plain = one.all_of(told, random.Random(1))
    with fed(name, random.Random(2), level=level, kept=kept) as one:
        found = one.all_of(told, random.Random(1))
    for before, now in zip(plain, found, strict=True):
        apart = (now - before).abs().amax(1) / before.abs().max()
        assert 0.0 < float(apart.median()) < 8 * torch.finfo(kept).eps


@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_module_computes_what_it_did(name: str) -> None:
    packed = copy.deepcopy(module(name))
    CrossedDecoder(packed).pack()
    tokens = tuple(range(40))
    expected, found = expected_of(tokens, 1, name, module(name)), expected_of(tokens, 1, name, packed)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))


@settings(max_examples=max(12, settings().max_examples // 2 - 200))
@given(
    name=st.sampled_from(list(CONFIGS)),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.sampled_from([1, 2, 7, 16, 33, 129, 140, 300]), min_size=1, max_size=5),
    page_sizes=st.tuples(st.sampled_from([16, 32]), st.sampled_from([9, 16, 64])),
    threads=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    rows=st.sampled_from([1, 7, 33, 80]),
    kept=KEPT,
)
def test_a_row_has_the_same_bits_in_every_batch_chunk_and_layout(
    name: str,
    seed: int,
    lengths: list[int],
    page_sizes: tuple[int, int],
    threads: tuple[int, int],
    rows: int,
    kept: torch.dtype,
) -> None:
    draw = random.Random(seed)
    told = sequences(lengths, page_sizes[0], draw)
    with fed(name, draw, page_size=page_sizes[0], threads=threads[0], kept=kept) as together:
        expected = together.all_of(told, draw)
    with fed(name, draw, page_size=page_sizes[1], threads=threads[1], rows=rows, kept=kept) as alone:
        assert_same_bits(alone, told, expected, draw)


def test_a_decoder_that_is_no_program_says_why() -> None:
    config = transformers.BartConfig(**{**SHAPE, "d_model": 40})
    made = transformers.AutoModelForSeq2SeqLM.from_config(config)
    expected = "its widths are 40 and 100; known: multiples of 16, and of 32 with gates"
    assert CrossedDecoder(made).unknown() == expected
