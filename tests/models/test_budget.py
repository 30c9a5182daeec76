"""How much memory keys and values take where the configuration leaves it open."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.config import EngineConfig
from triolet.core.errors import DeviceOutOfMemory
from triolet.models.memory import budget
from triolet.models.memory.budget import Available, Budget, KVSizes

SMOL = KVSizes(page=46_080 * 16, slot=0, positions=8192, page_size=16)  # float32
BASE = KVSizes(page=24_576 * 16, slot=24_576 * 1500, positions=448, page_size=16)  # Whisper base, float32
GIB = 1 << 30


def taken(sizes, room, **changes):
    return Budget.choose(EngineConfig(**changes), sizes, room)


def test_on_the_cpu_as_much_as_the_weights_but_a_quarter_of_what_is_free():
    assert Available.on_cpu(weights=GIB, free=16 * GIB).most == GIB
    assert Available.on_cpu(weights=GIB, free=2 * GIB).most == GIB // 2
    assert Available.on_cpu(weights=1000, free=16 * GIB).most == GIB // 2
    assert Available.on_cpu(weights=GIB, free=None).most == GIB


def test_real_models_take_what_their_weights_take():
    smol = taken(SMOL, Available.on_cpu(weights=538_060_032, free=24 * GIB))
    assert smol.slots == 0
    assert SMOL.full <= smol.pages
    assert smol.bytes_of(SMOL) <= 538_060_032
    base = taken(BASE, Available.on_cpu(weights=290_403_936, free=24 * GIB))
    assert base.bytes_of(BASE) <= GIB // 2
    assert base.slots >= 8


def test_what_will_be_allocated_besides_is_not_free(monkeypatch):
    monkeypatch.setattr(budget, "available_memory", lambda read: 2 * GIB)
    device = torch.device("cpu")
    assert Available.of(device, GIB, GIB) == Available(most=GIB // 4, free=GIB)
    assert Available.of(device, GIB, 3 * GIB) == Available(most=0, free=0)
    monkeypatch.setattr(budget, "available_memory", lambda read: None)
    assert Available.of(device, GIB, GIB) == Available(most=GIB, free=None)


def test_states_alone_must_fit_what_is_free():
    sizes, room = KVSizes(page=0, slot=0, positions=64, page_size=16, state=GIB), Available(most=GIB, free=2 * GIB)
    with pytest.raises(DeviceOutOfMemory, match=r"keys, values and states .* only 2147483648 are free"):
        taken(sizes, room)
    assert taken(sizes, room, state_bytes=2 * GIB).states == 2


def test_the_pages_of_a_draft_head_are_part_of_the_room():
    room = Available.on_cpu(weights=538_060_032, free=24 * GIB)
    drafting = evolve(SMOL, draft=SMOL.page // 2)
    assert taken(drafting, room).bytes_of(drafting) <= 538_060_032
    assert taken(drafting, room).pages == (taken(SMOL, room).pages + 1) * 2 // 3 - 1


def test_a_large_room_is_not_filled():
    """Enough for `max_running` sequences of the usual length is enough."""
    room = Available(most=100 * GIB, free=200 * GIB)
    assert taken(SMOL, room, max_running=8) == Budget(pages=8 * 64, slots=0, positions=8192)
    assert taken(BASE, room, max_running=3) == Budget(pages=3 * 28, slots=3, positions=448)


def test_where_one_sequence_does_not_fit_it_is_told_what_to_do():
    room = Available(most=10 << 20, free=40 << 20)
    with pytest.raises(DeviceOutOfMemory, match="41943040 are free beside the weights; use a smaller max_positions"):
        taken(SMOL, room)
    assert taken(evolve(SMOL, positions=512), room).pages == 32


QWEN = KVSizes(page=229_376 * 16, slot=0, positions=40_960, page_size=16)  # Qwen3-0.6B, float32


def test_on_the_cpu_the_context_is_what_fits_unless_it_is_configured():
    """A context of 40,960 positions would take seven times as much memory as the weights."""
    room = Available.on_cpu(weights=1_192 << 20, free=20 * GIB)
    assert taken(QWEN, room) == Budget(pages=339, slots=0, positions=5424)
    assert taken(QWEN, room).bytes_of(QWEN) <= 1_192 << 20
    assert taken(QWEN, room, max_positions=40_960).positions == 40_960
    assert taken(QWEN, room, self_kv_bytes=10 * GIB).positions == 40_960
    assert taken(QWEN, evolve(room, shortens=False)).positions == 40_960  # CUDA
    assert taken(QWEN, Available.on_cpu(weights=GIB, free=GIB)).positions == 2048
    assert taken(BASE, Available(most=0, free=None)).positions == 448


@given(st.integers(0, 1 << 36), st.integers(0, 1 << 36), st.integers(1, 1 << 16), st.sampled_from([1, 16, 64]))
def test_a_shorter_context_is_a_matter_of_room_alone(most, more, positions, page_size):
    sizes = KVSizes(page=1000 * page_size, slot=0, positions=positions, page_size=page_size)
    small, large = (taken(sizes, Available(most=amount, free=None)) for amount in (most, most + more))
    assert min(positions, 2048) <= small.positions <= large.positions <= positions
    assert small.pages * page_size >= small.positions
    assert small.positions in (positions, 2048) or small.bytes_of(sizes) <= most


def test_what_is_configured_is_taken_at_its_word():
    room = Available(most=0, free=0)
    assert taken(SMOL, room, self_kv_bytes=600 * SMOL.page).pages == 599
    assert taken(BASE, room, self_kv_bytes=60 * BASE.page, cross_kv_bytes=BASE.slot) == Budget(
        pages=59, slots=1, positions=448
    )


@given(
    st.builds(
        KVSizes,
        page=st.integers(1, 1 << 22),
        slot=st.just(0) | st.integers(1, 1 << 28),
        positions=st.integers(1, 1 << 15),
        page_size=st.sampled_from([1, 4, 16, 64]),
    ),
    st.integers(0, 1 << 36),
    st.integers(1, 200),
)
def test_it_fits_the_room_or_is_the_least_that_works(sizes, most, running):
    budget = taken(sizes, Available(most=most, free=None), max_running=running)
    sizes = evolve(sizes, positions=budget.positions)
    assert budget.pages >= sizes.full
    assert budget.slots >= (1 if sizes.slot else 0)
    least = Budget(pages=sizes.full, slots=1 if sizes.slot else 0, positions=sizes.positions)
    assert budget.bytes_of(sizes) <= max(most, 0) + least.bytes_of(sizes)
    assert budget.pages <= max(sizes.full, running * sizes.usual)
    assert budget.slots <= running


@given(st.integers(0, 1 << 36), st.integers(0, 1 << 30))
def test_more_room_never_gives_less(most, more):
    small, large = (taken(BASE, Available(most=amount, free=None)) for amount in (most, most + more))
    assert small.pages <= large.pages
    assert small.slots <= large.slots
