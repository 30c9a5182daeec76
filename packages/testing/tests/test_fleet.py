"""A fleet in simulation: its numbers repeat, nothing is lost in it, and one replica of it is like one engine."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean

import pytest
import trio
from trio.testing import MockClock

from triolet import Engine, EngineConfig, SamplingParams
from triolet.actors.worker import Job
from triolet.core.request import Request
from triolet_testing import Kind, SimExecutor, SimModel, SimPreparer, sim_engine
from triolet_testing.sim_model import IMAGE, MOST_IMAGE

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # as a script of the folder has it

from simulated_fleet.fleet import Fleet, Loss, Play, play
from simulated_fleet.load import Burst, Load
from simulated_fleet.policies import POLICIES
from simulated_fleet.replica import Costs, SimRequest

SMALL = Fleet(replicas=10, routers=2, costs=Costs(outputs=8))
LOAD = Load(rate=30, seconds=10, contents=200)
LOSSES = (Loss(at=3, share=0.3, seconds=2), Loss(at=6, share=0.5, seconds=2))
ENGINE = SimModel(kind=Kind.DECODER, max_positions=400, pages=4_000)


def played(fleet: Fleet, load: Load, policy: str = "by content", *, losses: tuple[Loss, ...] = ()) -> Play:
    run = Play(fleet, POLICIES[policy], 0, losses, load.requests(0))
    run.run()
    return run


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    first, again, other = (play(SMALL, LOAD, POLICIES["by content"], seed=seed, losses=LOSSES) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("losses", [(), LOSSES], ids=["nobody dies", "some die"])
def test_every_request_ends_once_and_the_books_are_empty_then(policy: str, losses: tuple[Loss, ...]) -> None:
    """`Replica.close`, which `Play.run` calls, says whether the ledgers are drained. Each miss is one encoding."""
    run = played(SMALL, LOAD, policy, losses=losses)
    asked = list(LOAD.requests(0))
    assert Counter(one.number for one in run.ended) == Counter(one.number for one in asked)
    assert all(one.arrived < one.first <= one.ended for one in run.ended)
    assert len(run.lost) == (8 if losses else 0)
    assert any(one.sent > 1 for one in run.ended) == bool(losses)
    misses = sum(not one.hit for one in run.ended)
    assert 0 < misses < len(run.ended)
    assert losses or misses == sum(replica.encodes for replica in run.replicas.values())
    for router in run.routers:
        assert set(router.replicas) == set(run.replicas)
        for replica in run.replicas:
            router.told_load(replica, others=0)
            assert (router.load(replica), router.encodings(replica)) == (0, 0), "what a router has sent has ended"


def test_requests_of_the_warm_up_do_not_count() -> None:
    warm = Load(rate=30, seconds=10, warm_seconds=6, contents=200)
    late = [one for one in warm.requests(0) if one.arrived >= 6]
    assert play(SMALL, warm, POLICIES["by content"]).requests == len(late) < 200


def test_a_burst_is_more_requests_of_which_a_share_has_one_new_content() -> None:
    load = Load(rate=100, seconds=30, bursts=(Burst(begin=10, seconds=10),))
    keys = [one.key for one in load.requests(0) if 10 <= one.arrived < 20]
    assert 1_800 < len(keys) < 2_200
    assert 0.25 < keys.count("hit of 10") / len(keys) < 0.35
    assert 800 < sum(one.arrived < 10 for one in load.requests(0)) < 1_200


def test_a_burst_is_spread_where_plain_hashing_has_everybody_wait() -> None:
    load = Load(rate=60, seconds=10, contents=2_000, bursts=(Burst(begin=4, seconds=4),))
    fleet = Fleet(replicas=10, routers=2, full=True)
    ours, hashed = (play(fleet, load, POLICIES[policy]) for policy in ("by content", "by hash"))
    assert ours.p99 < hashed.p99 / 2
    assert ours.hit_rate > hashed.hit_rate - 0.06
    assert ours.imbalance < hashed.imbalance


# -- one replica against the engine itself -----------------------------------------------------------------------------


def engine_on(requests: list[SimRequest], costs: Costs) -> tuple[int, float]:
    """Encoder launches, and the mean latency, of a real engine over a simulated device. Without the prefix cache, which
    the fleet leaves out; each item is of `MOST_IMAGE` embeddings, so that a launch encodes one."""
    executor = SimExecutor(ENGINE)
    seconds: list[float] = []
    item = MOST_IMAGE * ENGINE.encoder_bytes // ENGINE.encoder_embeddings
    config = EngineConfig(
        max_running=costs.places,
        encoder_cache_bytes=costs.outputs * item,
        encode_batch_embeddings=MOST_IMAGE,
        encoder_idle_seconds=min(1000000.0, costs.idle_seconds),
        prefix_caching=False,
    )

    async def ask(engine: Engine, one: SimRequest, begun: float) -> None:
        await trio.sleep_until(begun + one.arrived)
        image = MOST_IMAGE * int(one.key.split()[1]) + MOST_IMAGE - 1
        prompt = SimPreparer(model=ENGINE).prepare((1, IMAGE, 5), images=[image])
        request = Request(
            id=str(one.number),
            prompt_token_ids=prompt.token_ids,
            items=prompt.items,
            max_tokens=one.tokens,
            sampling=SamplingParams(max_tokens=one.tokens, ignore_eos=True),
        )
        async with engine.inside._submitted(request, trio.current_time(), wait=True) as mailbox:
            await mailbox.wait_end()
        seconds.append(trio.current_time() - begun - one.arrived)

    async def main() -> None:
        async with sim_engine(executor, config=config) as engine, trio.open_nursery() as nursery:
            begun = trio.current_time()
            for one in requests:
                nursery.start_soon(ask, engine, one, begun)

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert len(seconds) == len(requests)
    return executor.calls.count(Job.ENCODE), fmean(seconds)


@pytest.mark.parametrize(
    ("rate", "contents", "costs"),
    [
        (1, 50, Costs()),
        (3, 400, Costs()),
        (3, 50, Costs(outputs=16)),
        (3, 50, Costs(places=4)),
        (30, 20, Costs()),
        (1, 50, Costs(idle_seconds=3)),
    ],
    ids=["idle", "encodings", "a small cache", "few places", "more than it can do", "idle outputs are freed"],
)
def test_one_replica_launches_as_many_encodings_as_an_engine_and_takes_as_long(
    rate: float, contents: int, costs: Costs
) -> None:
    """Within 2 %: messages take no time here, nor do frees."""
    load = Load(rate=rate, seconds=20, contents=contents)
    encodes, mean = engine_on(list(load.requests(0)), costs)
    ours = play(Fleet(replicas=1, routers=1, costs=costs), load, POLICIES["by content"])
    assert ours.encodes == encodes
    assert ours.mean == pytest.approx(mean, rel=0.02)


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(code, {})
    assert re.fullmatch(r"0\.\d+ \d+\.\d+ 1\.\d+\n", capsys.readouterr().out)
