"""Snapshots of the planner's figures, as values."""

from __future__ import annotations

from attrs import define, frozen


@define(kw_only=True)
class Counters:
    """The planner's counters since the start of the engine."""

    cross_written: int = 0
    cross_shared: int = 0  # starts whose cross KV was resident already
    steps: int = 0
    tokens_fed: int = 0  # draft tokens included
    tokens_cached: int = 0  # need not be fed, since their KV was cached
    tokens_drafted: int = 0  # draft tokens that steps made room for
    tokens_accepted: int = 0  # draft tokens that proved right
    tokens_committed: int = 0
    preemptions: int = 0
    failed_steps: int = 0


@frozen(kw_only=True)
class PlannerStatistics(Counters):
    """A snapshot of the planner's figures."""

    waiting: int
    running: int
    leaving: int
    steps_in_flight: int
    pages: int
    pages_free: int  # cached ones among them
    pages_cached: int  # kept for their content, used by no sequence
    states: int  # recurrent ones; 0: the model has none
    states_free: int  # kept ones among them
    states_cached: int  # kept for sequences with the same prefix
    cross_slots: int
    cross_slots_used: int
    cross_slots_idle: int
    step_tokens: int  # most tokens of a step now: fewer than ``max_step_tokens`` after a step was too large for memory
