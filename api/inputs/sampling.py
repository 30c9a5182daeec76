"""Reads the sampling of a request from its caller's arguments: `SamplingParams`, or their fields by name."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from attrs import evolve, fields_dict

from ...core.checks import demand, shown, unknown_name
from ...core.errors import InvalidRequest
from ...core.request import ELSEWHERE, SamplingParams

_FIELDS = tuple(fields_dict(SamplingParams))


def read_sampling(sampling: object, given: Mapping[str, Any], *, beside: tuple[str, ...]) -> SamplingParams:
    """Returns the sampling that a caller gave, as `SamplingParams` or by the names of its fields. Without either it is
    greedy.

    Args:
        given: fields of `SamplingParams` by name.
        beside: the other keywords of the call. An unknown name may be a misspelling of one of them.

    Raises:
        InvalidRequest: `SamplingParams` together with fields, another type, an unknown name, or a value that is not
            allowed.
    """
    for name in given:
        if name not in _FIELDS:
            raise unknown_name(name, (*_FIELDS, *beside), ELSEWHERE, owner="a request")
    if sampling is None:
        return SamplingParams(**given)
    if not isinstance(sampling, SamplingParams):
        allowed = "SamplingParams(max_tokens=...), or its fields by name, as in max_tokens=5"
        raise InvalidRequest(f"sampling={shown(sampling)}; allowed: {allowed}")
    if given:
        name = next(iter(given))
        raise InvalidRequest(f"{name}= and sampling= are both given; give it in sampling=SamplingParams({name}=...)")
    return sampling


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NOT_GREEDY = ("temperature", "beam_size", "structure", "logit_bias", "min_tokens", "ignore_eos", *_PENALTIES)


def check_greedy(sampling: SamplingParams, architecture: str) -> None:
    """Raises `InvalidRequest` if ``sampling`` would change the tokens of a model that reads frames greedily."""
    usual = SamplingParams()
    for name in _NOT_GREEDY:
        value, allowed = getattr(sampling, name), getattr(usual, name)
        demand(
            value == allowed, f"{name}={shown(value)} for {architecture}, which reads frames greedily", shown(allowed)
        )


def resolved(sampling: SamplingParams, *, tools: bool) -> SamplingParams:
    """Returns ``sampling`` with a fresh seed if it has none. If the request has tools, special tokens stay in the text,
    unless ``sampling`` says otherwise.
    """
    if sampling.seed is None:
        sampling = evolve(sampling, seed=secrets.randbits(63))
    if tools and sampling.skip_special_tokens is None:
        sampling = evolve(sampling, skip_special_tokens=False)
    return sampling
