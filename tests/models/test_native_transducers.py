"""Prediction and joint networks by the native library: scores are transformers', and the same bits alone and beside
others."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from triolet.core.errors import EngineError
from triolet.models.memory.rows import Rows
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner
from triolet.models.native.transducers import pack_transducer, transducer_program, unknown_transducer

from .fed import loaded

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

WIDTH, TOKENS, MOST = 40, 70, 32
ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SETTINGS = {"vocab_size": TOKENS, "blank_token_id": 0, "decoder_hidden_size": WIDTH, "encoder_config": ENCODER}


@functools.cache
def module(name: str) -> Any:
    torch.manual_seed(6)
    others = {"durations": [0, 1, 2]} if name == "TDT" else {"hidden_act": "silu", "num_decoder_layers": 3}
    made = getattr(transformers, f"ParakeetFor{name}")(
        getattr(transformers, f"Parakeet{name}Config")(**SETTINGS, **others)
    ).eval()
    with torch.inference_mode():
        for parameter in made.parameters():
            parameter.mul_(3.0).add_(0.02)
    return made


@frozen
class Text:
    """The tokens that are fed to a sequence one by one, and the frames that are read after each."""

    tokens: tuple[int, ...]
    frames: Tensor  # [tokens, frames, width]


def drawn(seed: int) -> Text:
    draw = torch.Generator().manual_seed(seed)
    count, frames = 1 + seed % 5, 1 + seed % 4
    tokens = torch.randint(TOKENS, (count,), generator=draw).tolist()
    return Text(tuple(tokens), torch.randn(count, frames, WIDTH, generator=draw))


@functools.cache
def packed(name: str, int8: bool) -> Any:
    made = copy.deepcopy(module(name))
    pack_transducer(made, int8=int8)
    assert unknown_transducer(made) is None
    return made


@contextmanager
def reading(name: str, *, int8: bool = False, level: int = 0, threads: int = 2) -> Iterator[Runner]:
    program = transducer_program(packed(name, int8))
    runner = Runner.open(loaded(), program, None, rows=MOST, positions=1, threads=threads, level=level)
    try:
        yield runner
    finally:
        runner.release()


def read(runner: Runner, sequences: Sequence[Text]) -> list[list[Tensor]]:
    """The scores of each sequence after each token. Where a sequence has no token left, its last frames are read
    again."""
    states = [runner.new_state().zero_() for _ in sequences]
    found: list[list[Tensor]] = [[] for _ in sequences]
    for offset in range(max(len(one.tokens) for one in sequences)):
        frames, tokens, wanted, chunks = list[Tensor](), list[int](), list[int](), list[tuple[int, int, int, int]]()
        for one in sequences:
            rows = one.frames[min(offset, len(one.tokens) - 1)]
            if offset < len(one.tokens):
                wanted.append(len(tokens))
            tokens += [*one.tokens[offset : offset + 1], *[0] * len(rows)][: len(rows)]
            frames.append(rows)
            chunks.append((len(rows), 0, 0, 0))
        rows = Rows(positions=[0] * len(tokens), chunks=chunks, tables=(), wanted=wanted, states=states)
        scores = runner.read(torch.cat(frames), tokens, rows, scores=True)
        for parts, part in zip(found, torch.split(scores, [count for count, *_ in chunks]), strict=True):
            parts.append(part)
    return found


def expected_of(name: str, one: Text) -> Tensor:
    made = module(name)
    with torch.inference_mode():
        predicted = made.decoder(torch.tensor([one.tokens]))[0]
        scores: Tensor = made.joint(decoder_hidden_states=predicted[:, None], encoder_hidden_states=one.frames)
    return scores


@pytest.mark.parametrize("level", [1, 3, 4])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("name", ["RNNT", "TDT"])
def test_scores_are_those_of_transformers(name: str, int8: bool, level: int) -> None:
    sequences = list(map(drawn, (3, 4, 8)))
    with reading(name, level=level, int8=int8) as runner:
        for one, found in zip(sequences, read(runner, sequences), strict=True):
            expected = expected_of(name, one)
            scores = torch.stack(found[: len(one.tokens)])
            assert float((scores - expected).abs().max() / expected.abs().max()) < (0.1 if int8 else 2e-5)
            assert all(torch.equal(again, scores[-1]) for again in found[len(one.tokens) :])


@given(
    name=st.sampled_from(["RNNT", "TDT"]),
    seeds=st.lists(st.integers(0, 19), min_size=1, max_size=6),
    level=st.sampled_from([1, 3, 4]),
    int8=st.booleans(),
)
@settings(max_examples=20)
def test_a_sequence_has_the_same_bits_beside_others(name: str, seeds: list[int], level: int, int8: bool) -> None:
    sequences = list(map(drawn, seeds))
    with reading(name, level=level, int8=int8) as runner:
        alone = [torch.stack(read(runner, [one])[0]) for one in sequences]
    with reading(name, level=level, int8=int8, threads=3) as runner:
        for one, found in zip(alone, read(runner, sequences), strict=True):
            assert torch.equal(one, torch.stack(found[: len(one)]))


def test_two_tokens_of_one_state_in_a_step_are_refused() -> None:
    with reading("TDT") as runner:
        states = [runner.new_state().zero_()]
        rows = Rows(positions=[0] * 3, chunks=[(3, 0, 0, 0)], tables=(), wanted=[0, 2], states=states)
        with pytest.raises(EngineError, match="refuses a step of 3 rows: rows"):
            runner.read(torch.zeros(3, WIDTH), [4, 5, 6], rows, scores=True)
        assert not states[0].any()


def test_an_activation_that_the_library_does_not_know_is_told() -> None:
    made = copy.copy(module("RNNT"))
    made.config = copy.copy(made.config)
    made.config.hidden_act = "mish"
    assert str(unknown_transducer(made)).startswith("the activation of its joint network is mish; known: silu")
