"""The scheduler of mini-sglang, with its radix cache, as the subject of `examine_scheduler`. The kit stands in for the
engine. The adapter takes the turns of the scheduler's loop. It needs the folder `python` of a clone in PYTHONPATH, and
torch, transformers, msgpack and pyzmq. Here the adapter stands in for pinned memory and for the compiled comparison of
keys, which need a GPU and a compiler::

    examine_scheduler(MiniSglang, DECLARED, ignore=IGNORED)
    examine_scheduler(MiniSglang, OVERLAP, ignore=IGNORED)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve

from triolet_kit import EOS, Chunk, Limits, NewRequest, SchedulerDeclaration, Step


def first_difference(key: torch.Tensor, other: torch.Tensor) -> int:
    length = min(len(key), len(other))
    return next((at for at in range(length) if key[at] != other[at]), length)


def unpinned(make: Any) -> Any:
    return lambda *values, **more: make(*values, **{name: more[name] for name in more if name != "pin_memory"})


sys.modules["minisgl.kernel"] = SimpleNamespace(fast_compare_key=first_difference)  # type: ignore[assignment]
torch.empty, torch.tensor, torch.Tensor.pin_memory = unpinned(torch.empty), unpinned(torch.tensor), lambda self: self

from minisgl import core  # noqa: E402
from minisgl.distributed import set_tp_info  # noqa: E402
from minisgl.message import AbortBackendMsg, UserMsg  # noqa: E402
from minisgl.scheduler.cache import CacheManager  # noqa: E402
from minisgl.scheduler.decode import DecodeManager  # noqa: E402
from minisgl.scheduler.prefill import ChunkedReq, PrefillManager  # noqa: E402
from minisgl.scheduler.scheduler import Scheduler  # noqa: E402
from minisgl.scheduler.table import TableManager  # noqa: E402

set_tp_info(0, 1)
DECLARED = SchedulerDeclaration(steps_in_flight=1, items=False, priorities=False, decodes_all=True, headroom=1)
OVERLAP = evolve(DECLARED, steps_in_flight=2)
IGNORED = ("terminal once: ends early",)
"""By design: with overlap, the end by length is reported with the last token but one. A request waits until there is
room for its last token too, which is never fed: that is the ``headroom``."""


class MiniSglang:
    """An adapter of `Scheduler` and its managers."""

    def __init__(self, limits: Limits) -> None:
        core._GLOBAL_CTX = core.Context(page_size=limits.page_size)
        tokens = limits.pages * limits.page_size
        table = torch.zeros((limits.max_running + 1, tokens + limits.page_size), dtype=torch.int32)
        self.scheduler = parts = Scheduler.__new__(Scheduler)
        parts.table_manager = TableManager(limits.max_running, table)
        parts.cache_manager = CacheManager(limits.pages, limits.page_size, table, "radix")
        parts.decode_manager = DecodeManager(limits.page_size)
        parts.prefill_manager = PrefillManager(parts.cache_manager, parts.table_manager, parts.decode_manager)
        parts.finished_reqs, parts.eos_token_id, parts.prefill_budget = set(), EOS, limits.max_step_tokens
        parts.engine, parts.send_result = SimpleNamespace(max_seq_len=tokens + 1), self.take
        self.page_size, self.names, self.messages, self.ended = limits.page_size, list[str](), list[Any](), list[str]()

    def add_request(self, request: NewRequest) -> None:
        sampling = core.SamplingParams(max_tokens=request.max_tokens)
        self.messages.append(UserMsg(len(self.names), torch.tensor(request.tokens, dtype=torch.int32), sampling))
        self.names.append(request.id)

    def schedule(self) -> Step | None:
        while self.messages:
            self.scheduler._process_one_msg(self.messages.pop(0))
        prefill, decode = self.scheduler.prefill_manager, self.scheduler.decode_manager
        batch = prefill.schedule_next_batch(self.scheduler.prefill_budget) or decode.schedule_next_batch()
        if batch is None:
            return None
        self.scheduler.cache_manager.allocate_paged(batch.reqs)
        step = Step(chunks=[self.chunk(one) for one in batch.reqs], own=batch)
        for one in batch.reqs:
            one.complete_one()
        decode.filter_reqs(batch.reqs)
        return step

    def update(self, step: Step, tokens: Mapping[str, int]) -> list[str]:
        sampled = torch.tensor([tokens.get(self.names[one.uid], -1) for one in step.own.reqs])
        before, copied = len(self.ended), SimpleNamespace(synchronize=lambda: None)
        self.scheduler._process_last_data((SimpleNamespace(batch=step.own), (None, sampled, copied)))
        return self.ended[before:]

    def take(self, reply: list[Any]) -> None:
        self.ended += [name for one in reply if one.finished and (name := self.names[one.uid]) not in self.ended]

    def finish(self, request_id: str) -> None:
        self.messages.append(AbortBackendMsg(self.names.index(request_id)))

    def chunk(self, one: Any) -> Chunk:
        pages = self.scheduler.table_manager.page_table[one.table_idx, : one.device_len : self.page_size]
        samples = not isinstance(one, ChunkedReq)
        return Chunk(self.names[one.uid], one.cached_len, one.extend_len, (pages // self.page_size).tolist(), samples)
