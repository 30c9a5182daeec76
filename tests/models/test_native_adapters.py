"""Adapters of rows in the native library: what would leave the slots is refused. Numbers are compared in
tests/api/test_adapters.py."""

from __future__ import annotations

import pytest
import torch

from triolet.core.errors import EngineError
from triolet.models.memory.rows import Rows
from triolet.models.native.adapters import AdapterSlots
from triolet.models.native.decoders import CausalDecoder
from triolet.models.native.library import Kind
from triolet.models.native.runner import Runner

from .test_native import decoder_of, loaded

ROWS = 8


def opened(slots: AdapterSlots, decoder: CausalDecoder, *, narrower: int | None = None) -> Runner:
    program = decoder.program(64, slots)
    if narrower is not None:
        adapted = [one.to for one in program._operations if one.kind == Kind.ADAPT]
        program.widths[adapted[narrower]] -= 1
    pages = [torch.empty(5, 16, 64) for _ in decoder.layers]
    return Runner.open(loaded(), program, pages, rows=ROWS, positions=64, threads=1)


def test_a_slot_that_is_none_and_a_buffer_that_is_too_narrow_are_refused() -> None:
    decoder = decoder_of("llama")
    decoder.pack()
    slots = AdapterSlots.allocate(decoder.adapted(), slots=2, rank=3)
    with torch.inference_mode():
        runner = opened(slots, decoder)
        for adapters, right in (([], True), ([-1, 1, 0], True), ([-1, 2, 0], False), ([-2, 0, 0], False)):
            rows = Rows(positions=[0, 1, 2], chunks=[(3, 0, 0, 0)], tables=[0], wanted=[2], adapters=adapters)
            if right:
                assert runner.step([5, 6, 7], rows).isfinite().all()
                continue
            with pytest.raises(EngineError, match="refuses a step of 3 rows: slot"):
                runner.step([5, 6, 7], rows)
        for narrower in (0, 1):  # the buffer of ranks, and that of what is added
            with pytest.raises(AssertionError, match="an operation would leave the buffers"):
                opened(slots, decoder, narrower=narrower)
        runner.release()
