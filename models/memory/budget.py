"""The memory that keys and values take: as configured, or by the memory that is free when weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from ...core.config import EngineConfig
from ...core.errors import DeviceOutOfMemory, InvalidRequest
from ..machine.host import available_memory, read_file

_USUAL_POSITIONS = 1024  # of a running sequence, prompt and answer; longer ones use what others leave
_LEAST_ROOM = 512 << 20  # bytes on the CPU, where the weights are small
_CPU_SHARE = 4  # the part of the free memory is one in so many; the rest is the program's that the engine lives in
_CUDA_SHARE = 2  # the rest is for activations, encoder outputs, and whoever shares the device
_SELF_SHARE = 4  # of the memory, where cross-attention takes the rest


@frozen(kw_only=True)
class Available:
    """The memory for keys and values when the weights are loaded."""

    most: int  # bytes to take of our own accord
    free: int | None  # bytes that can be had at all; None: the system does not say

    @classmethod
    def of(cls, devices: Sequence[torch.device], weights: int) -> Available:
        """The memory: on the CPU as much as the weights, 512 MiB at least, but no more than a quarter of what is free;
        on CUDA half of what is free."""
        if devices[0].type == "cuda":
            free = min(torch.cuda.mem_get_info(device)[0] for device in devices) * len(devices)
            return cls(most=free // _CUDA_SHARE, free=free)
        return cls.on_cpu(weights, available_memory(read_file))

    @classmethod
    def at_most(cls, devices: Sequence[torch.device], weights: int) -> Available:
        """The most that `of` gives, however much is free."""
        if devices[0].type == "cuda":
            whole = min(torch.cuda.mem_get_info(device)[1] for device in devices) * len(devices)
            return cls(most=whole // _CUDA_SHARE, free=None)
        return cls.on_cpu(weights, None)

    @classmethod
    def on_cpu(cls, weights: int, free: int | None) -> Available:
        """The memory on the CPU, by `of`; ``free`` is ``None`` where the system does not say."""
        wanted = max(weights, _LEAST_ROOM)
        return cls(most=wanted if free is None else min(wanted, free // _CPU_SHARE), free=free)


@frozen(kw_only=True)
class KVSizes:
    """The units of a model's keys and values, in bytes; 0 where it has none."""

    page: int
    slot: int  # cross-attention of one window
    positions: int  # of the longest sequence
    page_size: int

    @property
    def full(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.positions // self.page_size)

    @property
    def usual(self) -> int:
        """Pages of a sequence of usual length."""
        return -(-min(self.positions, _USUAL_POSITIONS) // self.page_size)

    def beside(self, draft: KVSizes) -> KVSizes:
        """The sizes with those of a draft model, which has as many pages and slots."""
        return KVSizes(
            page=self.page + draft.page,
            slot=self.slot + draft.slot,
            positions=self.positions,
            page_size=self.page_size,
        )


@frozen(kw_only=True)
class Budget:
    """The numbers of pages and slots that are taken."""

    pages: int  # of sequences; one more of zeros is allocated
    slots: int

    @classmethod
    def choose(cls, config: EngineConfig, own: KVSizes, together: KVSizes, available: Available) -> Budget:
        """Chooses the sizes. Configured bytes hold ``own`` KV alone. What is left open shares ``available`` with a
        draft model.

        Raises:
            DeviceOutOfMemory: there is no memory for one sequence of full length and one window.
        """
        if not own.page:
            return cls(pages=0, slots=0)
        share = available.most // _SELF_SHARE if own.slot else available.most
        pages, slots = _configured(config, own)
        pages = pages or max(own.full, min(config.max_running * own.usual, share // together.page - 1))
        if own.slot and not slots:
            slots = max(1, min(config.max_running, (available.most - share) // together.slot))
        budget = cls(pages=pages, slots=slots)
        _check_room(config, budget, together, available)
        return budget

    def bytes_of(self, sizes: KVSizes) -> int:
        """Bytes that they take."""
        return (self.pages + 1) * sizes.page + self.slots * sizes.slot


def check_sizes(config: EngineConfig, own: KVSizes) -> None:
    """Raises `InvalidRequest` where one sequence of full length, or one window, would not fit what is configured."""
    if own.page and config.self_kv_bytes and _configured(config, own)[0] < own.full:
        raise InvalidRequest(
            f"self_kv_bytes={config.self_kv_bytes}; allowed: {(own.full + 1) * own.page} or more, the pages of a "
            f"sequence of {own.positions} positions and one of zeros, 0 for as many as the memory has room for, or a "
            "smaller max_positions"
        )
    if 0 < config.cross_kv_bytes < own.slot:
        raise InvalidRequest(
            f"cross_kv_bytes={config.cross_kv_bytes}; allowed: {own.slot} or more, the bytes of one window"
        )


def _configured(config: EngineConfig, own: KVSizes) -> tuple[int, int]:
    """Pages and slots as configured; 0: left open."""
    pages = config.self_kv_bytes // own.page - 1 if config.self_kv_bytes else 0
    slots = config.cross_kv_bytes // own.slot if own.slot else 0
    return pages, slots


def _check_room(config: EngineConfig, budget: Budget, sizes: KVSizes, available: Available) -> None:
    """Raises `DeviceOutOfMemory` if chosen sizes exceed the free memory. Configured sizes are not checked."""
    pages = 0 if config.self_kv_bytes else (budget.pages + 1) * sizes.page
    needed = pages + (0 if config.cross_kv_bytes else budget.slots * sizes.slot)
    if available.free is not None and needed > available.free:
        raise DeviceOutOfMemory(
            f"keys and values of one sequence of {sizes.positions} positions take {needed} bytes, and "
            f"{available.free} are free beside the weights; use a smaller max_positions, a smaller dtype or model, or "
            "free memory"
        )
