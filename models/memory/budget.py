"""The memory for keys and values: the configured one, or else a share of the memory that is free when weights are
loaded.
"""

from __future__ import annotations

import torch
from attrs import evolve, frozen

from ...core.config import EngineConfig
from ...core.errors import DeviceOutOfMemory, InvalidRequest
from ..machine.host import available_memory, read_file

_USUAL_POSITIONS = 1024  # of a running sequence, prompt and answer; longer sequences use pages that others do not need
_LEAST_POSITIONS = 2048  # of a sequence on the CPU, however little room there is
_LEAST_ROOM = 512 << 20  # bytes on the CPU if the weights are smaller
_CPU_SHARE = 4  # one part in 4 of the free memory is used; the rest is for the program that the engine lives in
_CUDA_SHARE = 2  # one part in 2; the rest is for activations, encoder outputs, and other users of the device
_STATES = 3  # recurrent states for each running sequence: its own, one for draft tokens, and a kept one
_LEAST_STATES = 4
_SELF_SHARE = 4  # self-attention gets one part in 4 if there is cross-attention, which gets the rest


@frozen(kw_only=True)
class Available:
    """The memory for keys and values when the weights are loaded."""

    most: int  # bytes that are used at most unless more are configured
    free: int | None  # bytes that are free; None: the system does not say
    shortens: bool = True  # True: sequences are no longer than `most` holds, unless their length is configured

    @classmethod
    def of(cls, device: torch.device, weights: int, beside: int = 0) -> Available:
        """Returns the memory now, but for ``beside`` bytes, which will be allocated for something else. On the CPU it
        is as much as the weights take, 512 MiB at least, but no more than a quarter of the free memory; on CUDA it is
        half of the free memory."""
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] - beside
            return cls(most=free // _CUDA_SHARE, free=free, shortens=False)
        there = available_memory(read_file)
        return cls.on_cpu(weights, None if there is None else max(0, there - beside))

    @classmethod
    def at_most(cls, device: torch.device, weights: int, beside: int = 0) -> Available:  # noqa: ARG003
        """Returns the most that `of` could return, however much memory is free."""
        if device.type == "cuda":
            whole = torch.cuda.mem_get_info(device)[1]
            return cls(most=whole // _CUDA_SHARE, free=None, shortens=False)
        return cls.on_cpu(weights, None)

    @classmethod
    def on_cpu(cls, weights: int, free: int | None) -> Available:
        """Returns the memory on the CPU by the rule of `of`. ``free`` is ``None`` if the system does not say."""
        wanted = max(weights, _LEAST_ROOM)
        return cls(most=wanted if free is None else min(wanted, free // _CPU_SHARE), free=free)


@frozen(kw_only=True)
class KVSizes:
    """The sizes of a model's keys and values."""

    page: int  # bytes of a page; 0: the model has none
    slot: int  # bytes of the cross-attention KV of one window; 0: the model has none
    positions: int  # of the longest sequence
    page_size: int  # positions of a page
    state: int = 0  # bytes of a recurrent state; 0: the model has none
    draft: int = 0  # bytes that a draft head has for each page; 0: there is none

    @property
    def full(self) -> int:
        """Number of pages of the longest sequence."""
        return -(-self.positions // self.page_size)

    @property
    def usual(self) -> int:
        """Number of pages of a sequence of usual length."""
        return -(-min(self.positions, _USUAL_POSITIONS) // self.page_size)

    @property
    def whole_page(self) -> int:
        """Bytes of a page, with those of the draft head."""
        return self.page + self.draft


@frozen(kw_only=True)
class Budget:
    """The numbers of pages and slots that are allocated."""

    pages: int  # for sequences; the page of zeros is allocated in addition
    slots: int
    positions: int  # of the longest sequence
    states: int = 0

    @classmethod
    def choose(cls, config: EngineConfig, own: KVSizes, available: Available) -> Budget:
        """Chooses the numbers for a model with its ``own`` sizes: those that are configured, else what fits
        ``available``.

        Raises:
            DeviceOutOfMemory: there is no memory for one sequence of full length and one window.
        """
        states = _states(config, own, available)
        if not own.page:  # all layers are recurrent, or prompts are read whole
            pages = max(own.full, config.max_running * own.usual) if states else 0
            budget = cls(pages=pages, slots=0, positions=own.positions, states=states)
            _check_room(config, budget, own, available)
            return budget
        left = available.most - (0 if config.state_bytes else states * own.state)
        share = left // _SELF_SHARE if own.slot else left
        if available.shortens and own.full > 1 and not (config.max_positions or config.self_kv_bytes):
            fitting = max(_LEAST_POSITIONS, (share // own.whole_page - 1) * own.page_size)
            own = evolve(own, positions=min(own.positions, fitting))
        pages, slots = _configured(config, own)
        pages = pages or max(own.full, min(config.max_running * own.usual, share // own.whole_page - 1))
        if own.slot and not slots:
            slots = max(1, min(config.max_running, (available.most - share) // own.slot))
        budget = cls(pages=pages, slots=slots, positions=own.positions, states=states)
        _check_room(config, budget, own, available)
        return budget

    def bytes_of(self, sizes: KVSizes) -> int:
        """Returns the bytes of these pages, slots and states, the page of zeros included."""
        return (self.pages + 1) * sizes.whole_page + self.slots * sizes.slot + self.states * sizes.state


def check_sizes(config: EngineConfig, own: KVSizes) -> None:
    """Raises `InvalidRequest` if one sequence of full length, or one window, does not fit the configured bytes."""
    if own.page and config.self_kv_bytes and _configured(config, own)[0] < own.full:
        raise InvalidRequest(
            f"self_kv_bytes={config.self_kv_bytes}; allowed: {(own.full + 1) * own.page} or more (the pages of one "
            f"sequence of {own.positions} positions, and a page of zeros), or 0 for as many as the memory has room "
            "for. Or give a smaller max_positions"
        )
    if 0 < config.cross_kv_bytes < own.slot:
        raise InvalidRequest(
            f"cross_kv_bytes={config.cross_kv_bytes}; allowed: {own.slot} or more (the bytes of one window), or 0"
        )


def _states(config: EngineConfig, own: KVSizes, available: Available) -> int:
    if not own.state:
        return 0
    if config.state_bytes:
        return max(1, config.state_bytes // own.state)
    return max(_LEAST_STATES, min(_STATES * config.max_running, available.most // 2 // own.state))


def _configured(config: EngineConfig, own: KVSizes) -> tuple[int, int]:
    """Returns the configured numbers of pages and slots; 0: not configured."""
    pages = config.self_kv_bytes // own.page - 1 if config.self_kv_bytes else 0
    slots = config.cross_kv_bytes // own.slot if own.slot else 0
    return pages, slots


def _check_room(config: EngineConfig, budget: Budget, sizes: KVSizes, available: Available) -> None:
    """Raises `DeviceOutOfMemory` if the chosen numbers exceed the free memory. Configured bytes are not checked."""
    pages = 0 if config.self_kv_bytes else (budget.pages + 1) * sizes.whole_page
    needed = pages + (0 if config.cross_kv_bytes else budget.slots * sizes.slot)
    needed += 0 if config.state_bytes else budget.states * sizes.state
    if available.free is not None and needed > available.free:
        raise DeviceOutOfMemory(
            f"keys, values and states of {budget.positions} positions take {needed} bytes, but only "
            f"{available.free} are free beside the weights; use a smaller max_positions, a smaller dtype or model, "
            "or free some memory"
        )
