"""An engine that has its model's encoder alone."""

from __future__ import annotations

import pytest

import triolet.demo
from triolet import Engine, EngineConfig, InvalidRequest

CONFIG = EngineConfig(part="encoder", device="cpu", threads=1, max_pending=1)


async def test_requests_are_refused_and_everything_is_given_back() -> None:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        held = engine.statistics().device.by_owner
        for _ in range(2):  # the first one has left the door
            with pytest.raises(InvalidRequest, match=r"part='encoder', which has no decoder and only lends"):
                await engine.transcribe(triolet.demo.samples()[0].path)
        assert engine.statistics().device.by_owner == held
    assert held["weights"] > 0
    assert held.keys() - {"native"} == {"weights", "features", "encoder_outputs", "rule_masks"}


def test_a_part_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="part='decoder'; allowed: 'whole' or 'encoder'"):
        EngineConfig(part="decoder")
