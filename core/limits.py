"""What the planner plans against: the sizes of a loaded model under an engine's settings."""

from __future__ import annotations

from attrs import frozen

from .model import ModelDescription


@frozen(kw_only=True)
class PlannerLimits:
    """What the planner plans against."""

    max_running: int
    max_step_tokens: int
    page_size: int
    pages: int
    cross_slots: int
    eos_token_ids: frozenset[int]
    steps_in_flight: int = 2
    crashes_alone: int = 2  # a request whose step fails this often, alone, is poison; more where the device is flaky
    encoder_cache_bytes: int = 1 << 62  # each item, and those that one acquires together, must fit
    identity: str = ""  # of the weights: goes into the keys of pages
    prefix_caching: bool = False
    draft_tokens: int = 0  # most draft tokens of a step, for one sequence
    whole_prompts: bool = False  # a prompt is one chunk, and holds no pages
    headroom: int = 4  # pages that everybody who runs must find free when another one starts: a newcomer that is
    # preempted after a few tokens is read for nothing

    @property
    def acquire_ahead(self) -> int:
        """Waiting sequences that may have acquired encoder outputs: enough to fill the next encode batches, few enough
        that an urgent one finds room."""
        return self.max_running + max(self.max_running // 2, 8)

    @classmethod
    def of(
        cls,
        description: ModelDescription,
        *,
        max_running: int,
        max_step_tokens: int,
        steps_in_flight: int,
        encoder_cache_bytes: int = 1 << 62,
        prefix_caching: bool = False,
        draft_tokens: int = 0,
    ) -> PlannerLimits:
        """The limits of a loaded model under an engine's settings."""
        return cls(
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            page_size=description.page_size,
            pages=description.pages,
            cross_slots=description.cross_slots,
            eos_token_ids=frozenset(description.eos_token_ids),
            steps_in_flight=steps_in_flight,
            encoder_cache_bytes=encoder_cache_bytes,
            identity=description.processor_identity,
            prefix_caching=prefix_caching and not description.whole_prompts,
            draft_tokens=draft_tokens,
            whole_prompts=description.whole_prompts,
        )
