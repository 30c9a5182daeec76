"""The scheduler and block manager of nano-vllm as the subject of `examine_scheduler`. The kit stands in for its model
runner. Without a GPU, reproduce.sh makes a package `nanovllm` of the files that the adapter needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

from triolet_kit import EOS, Chunk, Limits, NewRequest, SchedulerDeclaration, Step

DECLARED = SchedulerDeclaration(
    steps_in_flight=1, items=False, priorities=False, aborts=False, decodes_all=True, page_sizes=(2, 4, 8)
)


class NanoVllm:
    """An adapter of `Scheduler`."""

    def __init__(self, limits: Limits) -> None:
        Sequence.block_size = limits.page_size
        sizes = {"num_kvcache_blocks": limits.pages, "kvcache_block_size": limits.page_size, "eos": EOS}
        sizes |= {"max_num_batched_tokens": limits.max_step_tokens, "max_num_seqs": limits.max_running}
        self.scheduler = Scheduler(SimpleNamespace(**sizes))
        self.names: dict[int, str] = {}

    def add_request(self, request: NewRequest) -> None:
        sequence = Sequence(list(request.tokens), SamplingParams(max_tokens=request.max_tokens))
        self.names[sequence.seq_id] = request.id
        self.scheduler.add(sequence)

    def schedule(self) -> Step | None:
        if self.scheduler.is_finished():
            return None
        sequences, prefill = self.scheduler.schedule()
        return Step(chunks=[self.chunk(one, prefill) for one in sequences], own=(sequences, prefill))

    def update(self, step: Step, tokens: Mapping[str, int]) -> list[str]:
        sequences, prefill = step.own
        self.scheduler.postprocess(sequences, [tokens.get(self.names[one.seq_id], -1) for one in sequences], prefill)
        return [self.names[one.seq_id] for one in sequences if one.is_finished]

    def chunk(self, sequence: Sequence, prefill: bool) -> Chunk:
        length = sequence.num_scheduled_tokens
        start = min(sequence.num_cached_tokens, len(sequence) - 1) if prefill else len(sequence) - 1
        discards = prefill and sequence.num_completion_tokens > 0 and not hasattr(sequence, "is_prefill")
        samples = start + length == len(sequence) and not discards
        return Chunk(self.names[sequence.seq_id], start, length, sequence.block_table, samples)
