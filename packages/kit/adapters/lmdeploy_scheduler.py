"""The scheduler of lmdeploy's PyTorch engine (commit 1263d5cd8), with its pages, its block trie and the maker of its
inputs, as the subject of `examine_scheduler`. The kit stands in for the model, and the adapter for the loop of the
engine. It needs `pip install lmdeploy`, or a clone in PYTHONPATH with what it imports::

    examine_scheduler(Lmdeploy, DECLARED)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lmdeploy.pytorch.config import CacheConfig, SchedulerConfig
from lmdeploy.pytorch.disagg.config import EngineRole
from lmdeploy.pytorch.engine.inputs_maker import InputsMakerAsync, InputsMakerConfig
from lmdeploy.pytorch.engine.model_agent import BatchedOutputs
from lmdeploy.pytorch.messages import MessageStatus, SamplingParam, SequenceMeta
from lmdeploy.pytorch.paging import Scheduler
from lmdeploy.pytorch.strategies.ar.engine import AREngineStrategy
from lmdeploy.pytorch.strategies.ar.model_agent import ARModelAgentStrategy
from lmdeploy.pytorch.strategies.ar.sequence import ARSequenceStrategy

from triolet_kit import EOS, Chunk, Limits, NewRequest, SchedulerDeclaration, Step

DECLARED = SchedulerDeclaration(items=False, priorities=False, decodes_all=True, headroom=1, discards=True, fair=False)
RUNNING = (MessageStatus.RUNNING,)
"""A sequence that stopped or gave way while its step ran gets no token of that step."""


class Lmdeploy:
    """An adapter of `Scheduler` and `InputsMakerAsync`. It takes the turns of `EngineLoop.main_loop`, and stands in for
    the executor and the manager of LoRA adapters, of which the maker asks one attribute each.
    """

    device_type, num_adapters = "cpu", staticmethod(int)

    def __init__(self, limits: Limits) -> None:
        places, tokens = limits.max_running, limits.max_step_tokens
        sizes = {"block_size": limits.page_size, "num_cpu_blocks": 0, "num_gpu_blocks": limits.pages}
        cache = CacheConfig(places, max_prefill_token_num=tokens, enable_prefix_caching=True, **sizes)
        config = SchedulerConfig(places, limits.pages * limits.page_size + 1, prefill_interval=1)
        sampling = SimpleNamespace(make_sampling_inputs=lambda _: None, on_session_end=lambda _: None)
        meta = SequenceMeta(limits.page_size, ARSequenceStrategy(), sampling)
        self.scheduler = Scheduler(config, cache, meta)
        self.strategy = meta.strategy
        strategies = AREngineStrategy(config, cache), sampling, ARModelAgentStrategy()
        made = InputsMakerConfig(places, tokens, EngineRole.Hybrid, prefill_interval=1)
        self.maker: Any = InputsMakerAsync(self, self.scheduler, self, *strategies, made)
        self.flights, self.names, self.fed = list[Any](), dict[int, str](), dict[int, int]()

    def add_request(self, request: NewRequest) -> None:
        number = len(self.names)
        self.names[number] = request.id
        sampling = SamplingParam(max_new_tokens=request.max_tokens)
        self.scheduler.add_session(number).add_sequence(np.array(request.tokens), sampling)

    def schedule(self) -> Step | None:
        """The loop plans a step while another one runs ("prefetch"), and begins it when that one has run."""
        plan = self.maker._make_forward_inputs(self.maker.do_prefill(), bool(self.flights))
        if plan is None:
            return None
        self.maker._last_forward_kind = self.maker._forward_kind(plan["inputs"], plan["delta"])
        self.flights.append(plan)
        if len(self.flights) == 1:
            self.begin()
        return Step(chunks=[chunk for row, one in enumerate(plan["running"]) for chunk in self.chunks(plan, row, one)])

    def begin(self) -> None:
        running = self.flights[0]["running"]
        self.scheduler.activate_seqs(running)
        self.maker.update_running_seqs(running, self.flights[0]["inputs"])

    def update(self, step: Step, tokens: Mapping[str, int]) -> list[str]:  # noqa: ARG002  (what is in flight is known)
        """As `EngineLoop._finish_forward_output`, and then the end of the session, which its client asks for."""
        plan, ended = self.flights.pop(0), []
        if self.samples(plan["inputs"]):
            sampled = [tokens.get(self.names[one.session_id], EOS) for one in plan["running"]]
            rows = list(zip(plan["running"], sampled, strict=True))
            stopped = [got == EOS or one.num_new_tokens + 1 >= one.sampling_param.max_new_tokens for one, got in rows]
            ended = [one for (one, _), stops in zip(rows, stopped, strict=True) if stops and one.status in RUNNING]
            out = BatchedOutputs(torch.tensor(sampled), torch.tensor(stopped))
            self.strategy.update_running(plan["running"], out, plan["inputs"], plan["delta"])
            for one in ended:
                self.scheduler.end_session(one.session_id)
        self.maker.deactivate_evict_seqs()
        if self.flights:
            self.begin()
        return [self.names[one.session_id] for one in ended]

    def finish(self, request_id: str) -> None:
        (number,) = [number for number, name in self.names.items() if name == request_id]
        if number in self.scheduler.sessions:
            self.scheduler.end_session(number)

    def samples(self, inputs: Any) -> bool:
        return inputs is None or not inputs.is_chunk or inputs.is_last_chunk

    def chunks(self, plan: Any, row: int, one: Any) -> list[Chunk]:
        """A sequence may run once more behind its last token. That chunk is left out: nobody waits for it."""
        inputs, number = plan["inputs"], one.session_id
        start, length = self.fed.get(number, 0), 1
        if inputs is not None:
            start, length = int(inputs.history_lengths[row]), int(inputs.seq_length[row])
        self.fed[number] = start + length
        if self.fed[number] >= one.output_start_pos + one.sampling_param.max_new_tokens:
            return []
        pages = self.scheduler.block_manager.get_block_table(one).tolist()
        return [Chunk(self.names[number], start, length, pages, self.samples(inputs))]
