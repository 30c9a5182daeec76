"""Snapshots of the planner, as values."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class PlannerStatistics:
    """A snapshot of the planner. Counters since the start."""

    waiting: int
    running: int
    leaving: int
    steps_in_flight: int
    pages: int
    pages_free: int  # cached ones among them
    pages_cached: int  # kept for their content, used by nobody
    cross_slots: int
    cross_slots_used: int
    cross_slots_idle: int
    cross_written: int
    cross_shared: int  # starts that found their cross-attention KV resident
    steps: int
    tokens_fed: int  # guesses included
    tokens_cached: int  # that need not be fed, since their KV was cached
    tokens_drafted: int  # by speculation
    tokens_accepted: int  # guesses that proved right
    tokens_committed: int
    preemptions: int
    failed_steps: int
    step_tokens: int  # what a step may feed now; less than ``max_step_tokens`` after one was too large for the memory
