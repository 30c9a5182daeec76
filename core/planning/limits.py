"""The limits of a plan: the sizes that a loaded model and an engine's settings allow."""

from __future__ import annotations

from attrs import frozen

from ..config import EngineConfig
from ..model import ModelDescription


@frozen(kw_only=True)
class PlannerLimits:
    """The sizes that the planner must not exceed, and the settings that it follows."""

    max_running: int
    max_step_tokens: int
    page_size: int
    pages: int
    cross_slots: int
    states: int = 0  # 0: the model has no recurrent layers
    adapters: int = 0  # slots
    eos_token_ids: frozenset[int]
    steps_in_flight: int = 2
    crashes_alone: int = 2  # a request is poison after so many crashes alone in a step; more on a flaky device
    encoder_cache_bytes: int = 1 << 62  # each item must fit, and so must the items that one sequence acquires together
    identity: str = ""  # names the weights; part of the page keys
    prefix_caching: bool = False
    draft_tokens: int = 0  # the most for one sequence in a step
    draft_running: int = 1 << 31  # no draft tokens are proposed while more sequences run
    drafts_follow: bool = False  # none are proposed in the first step that samples: they come from the step before
    whole_prompts: bool = False  # a prompt is one chunk, and holds no pages
    headroom: int = 4  # pages that must be free for each running sequence when another one starts: a newcomer that
    # is preempted after a few tokens was fed in vain

    @property
    def acquire_ahead(self) -> int:
        """The number of waiting sequences that may have acquired encoder outputs. It is large enough to fill the next
        encode batches, and small enough that an urgent sequence finds room."""
        return self.max_running + max(self.max_running // 2, 8)

    @classmethod
    def of(cls, description: ModelDescription, config: EngineConfig) -> PlannerLimits:
        """Returns the limits of a loaded model under an engine's settings."""
        speculation = config.speculation_for(description.kind, description.device)
        return cls(
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
            page_size=description.page_size,
            pages=description.pages,
            cross_slots=description.cross_slots,
            states=description.states,
            adapters=config.adapters,
            eos_token_ids=frozenset(description.eos_token_ids),
            steps_in_flight=config.steps_in_flight,
            encoder_cache_bytes=config.encoder_cache_bytes,
            identity=description.processor_identity,
            prefix_caching=config.prefix_caching and not description.whole_prompts,
            draft_tokens=0 if speculation is None else speculation.tokens,
            draft_running=1 if speculation is None else speculation.most_running,
            drafts_follow=description.has_draft_head,
            whole_prompts=description.whole_prompts,
        )
