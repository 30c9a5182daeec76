"""The continuous batching of transformers as the subject of `examine_scheduler`: its manager, scheduler and paged
cache, without the manager's thread. The kit stands in for the model. The scheduler waits for each step, and has no
priorities::

    findings = examine_scheduler(TransformersScheduler, DECLARED)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from triolet_kit import Chunk, Limits, NewRequest, SchedulerDeclaration, Step
from triolet_kit.paged_device import EOS

DECLARED = SchedulerDeclaration(steps_in_flight=1, items=False, priorities=False, fair=False, page_sizes=(4,))
"""The declaration. It is not ``fair``, since any request that fits is admitted, so that a large request waits while
small ones come."""


class TransformersScheduler:
    """An adapter of `ContinuousBatchingManager`. It runs each turn of the manager's loop in two halves."""

    def __init__(self, limits: Limits) -> None:
        sizes: dict[str, Any] = {"page_size": limits.page_size, "num_blocks": limits.pages}
        sizes |= {"max_batch_tokens": limits.max_step_tokens, "max_requests_per_batch": limits.max_running}
        settings = ContinuousBatchingConfig(use_async_batching=False, auto_switch_to_flash=False, **sizes)
        self.manager = ContinuousBatchingManager(_model(), _model().generation_config, settings)
        self.processor: Any = self.manager._create_batch_processor()

    def add_request(self, request: NewRequest) -> None:
        self.manager.add_request(list(request.tokens), request.id, max_new_tokens=request.max_tokens)

    def schedule(self) -> Step | None:
        if not self.processor.prepare_next_batch():
            return None
        return Step(chunks=[self.chunk(part) for part in self.processor.inputs_and_outputs.requests_in_batch])

    def update(self, _: Step, tokens: Mapping[str, int]) -> list[str]:
        for row, token in enumerate(tokens.values()):
            self.processor.inputs_and_outputs.output_ids[0, row] = token
        self.processor.update_batch()
        ended = self.manager.output_router.output_queue
        return [ended.get().request_id for _ in range(ended.qsize())]

    def finish(self, request_id: str) -> None:
        self.manager.cancel_request(request_id)

    def chunk(self, part: Any) -> Chunk:
        name, start = part.state.request_id, part.state.position_offset - part.query_length
        pages = self.processor.cache.cache_allocators["full_attention"].block_table[name]
        return Chunk(name, start, part.query_length, pages, part.has_new_token)


@cache
def _model() -> Any:
    """Makes a model that never runs. Only its sizes matter, and this attention implementation needs no masks."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    model: Any = LlamaForCausalLM(config)
    model.config._attn_implementation_internal = "paged|flash_attention_2"
    model.generation_config.eos_token_id = EOS
    return model
