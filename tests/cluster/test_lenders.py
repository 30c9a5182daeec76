"""`RayLenders` over a handle that a test answers for; and loans on a real Ray cluster."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from ray.exceptions import ActorDiedError, ObjectLostError, RayTaskError

import triolet.demo
from triolet import Engine, InvalidRequest, SamplingParams
from triolet.actors import messages as m
from triolet.cluster import Cluster
from triolet.cluster.deployment import _only_encodes
from triolet.cluster.lenders import RayLenders
from triolet.cluster.replica import Replica
from triolet.core.errors import BorrowFailed, EncodeFailed, LenderLost
from triolet.core.plan import LentOutput
from triolet.core.request import EncoderItem
from triolet.models.speech.whisper import special_tokens
from triolet.testing.families import make_checkpoint

from .conftest import CONFIG, NAME, assert_given_back, kill, replicas, until

pytestmark = pytest.mark.real_time

ITEM = EncoderItem(key="k", payload=None, embeddings=1, size=10)
OUTPUT = LentOutput(key="k", size=10, arrays=())


class Handle:
    """A handle of Serve's, as far as `RayLenders` uses it."""

    def __init__(self, lend: Callable[..., Awaitable[LentOutput]]) -> None:
        self.back: list[tuple[tuple[str, str], ...]] = []
        self.told = asyncio.Event()
        self.lend = self
        self.remote = lend

    def broadcast(self, method: str, loans: tuple[tuple[str, str], ...]) -> Any:
        assert method == "take_back"
        self.back.append(loans)
        return self

    async def results_async(self, timeout_s: float) -> list[None]:
        assert timeout_s > 0
        self.told.set()
        return []


def borrow(lend: Callable[..., Awaitable[LentOutput]], *, withdraws: bool = False) -> tuple[list[Any], Handle]:
    """What one borrow comes to, once its loan was given back."""
    told: list[Any] = []

    async def run() -> Handle:
        handle = Handle(lend)
        lenders = RayLenders(handle, asyncio.get_running_loop(), told.append)
        lenders.ask(1, ITEM)
        if withdraws:
            await asyncio.sleep(0)
            lenders.withdraw(1)
        await handle.told.wait()
        return handle

    return told, asyncio.run(run())


def test_what_a_lender_gives_arrives_and_its_loan_is_given_back():
    asked = []

    async def lend(*arguments: Any) -> LentOutput:
        asked.append(arguments)
        return OUTPUT

    told, handle = borrow(lend)
    ((keys, loan, item),) = asked
    assert (keys, item) == (("k",), ITEM), "the router is told the key"
    assert told == [m.Arrived(1, OUTPUT)]
    assert handle.back == [((loan, "k"),)], "freed when the borrower says so"


FAILED = EncodeFailed("not finite")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (ActorDiedError(), LenderLost),  # it may have died of the item
        (TimeoutError(), BorrowFailed),
        (ObjectLostError("00", None, ""), BorrowFailed),
        (RayTaskError("lend", "there", FAILED), EncodeFailed),
    ],
)
def test_whatever_goes_wrong_a_borrow_is_answered_and_given_back(raised: Exception, told: type[Exception]):
    async def lend(*_: Any) -> LentOutput:
        raise raised

    ((broken,), handle) = borrow(lend)
    assert type(broken.error) is told
    assert raised is broken.error.__cause__ or broken.error is FAILED
    assert len(handle.back) == 1


def test_a_borrow_that_is_withdrawn_answers_nothing_and_is_given_back():
    async def lend(*_: Any) -> LentOutput:
        return await asyncio.get_running_loop().create_future()

    told, handle = borrow(lend, withdraws=True)
    assert told == []
    assert len(handle.back) == 1


async def answer(engine: Engine, sample: int = 0) -> tuple[int, ...]:
    whisper = special_tokens(engine.model)
    language, task = whisper.language_ids["en"], whisper.task_ids["transcribe"]
    prompt = (whisper.start_id, language, task, whisper.no_timestamps_id)
    audio, sampling = triolet.demo.samples()[sample].path, SamplingParams(max_tokens=20)
    return (await engine.generate(prompt_token_ids=prompt, audio=audio, sampling=sampling)).token_ids


def counted(engine: Engine) -> tuple[int, int, int]:
    """Of all replicas: encoded, borrowed, lent."""
    told = engine.statistics().encoder_cache
    return told.encoded, told.borrowed, told.loans


def weights(engine: Engine) -> int:
    """Bytes, of all replicas."""
    return engine.statistics().device.by_owner["weights"]


@pytest.mark.usefixtures("machines")
def test_on_asyncio_what_is_encoded_on_one_replica_is_decoded_on_another() -> None:
    """And all of them give everything back; a replica that only encodes says so too."""
    asyncio.run(lend_and_borrow())


async def lend_and_borrow() -> None:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        own, whole = await answer(engine), weights(engine)
    async with Engine(triolet.demo.checkpoint(), config=evolve(CONFIG, part="encoder")) as engine:
        alone = weights(engine)
    async with Cluster(triolet.demo.checkpoint(), config=CONFIG, encoders=1, cpus=0.5, name=NAME) as engine:
        assert await answer(engine) == own, "a borrowed output gives the tokens of an own one"
        async with asyncio.timeout(300):
            while not counted(engine)[1]:  # noqa: ASYNC110  (nobody tells)
                await asyncio.sleep(0.1)
        assert counted(engine) == (1, 1, 1), "encode once: there, and not here"
        assert weights(engine) == whole + alone, "one model, and one encoder"
    assert [(one.bytes_held, one.outputs_held, one.error) for one in engine.departures] == [(0, 0, None)] * 2


@pytest.mark.thorough
@pytest.mark.usefixtures("machines")
async def test_a_model_without_an_encoder_has_no_replicas_that_only_encode(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path / "llama")
    cluster = Cluster(model, config=CONFIG, encoders=1, cpus=0.5, name=NAME)
    with pytest.raises(InvalidRequest, match=r"LlamaForCausalLM, which has no encoder.*encoders=0"):
        async with cluster:
            pytest.fail("it cannot be entered")
    await assert_given_back()


@pytest.mark.thorough
@pytest.mark.usefixtures("machines")
async def test_the_cluster_scales_beside_its_encoders_and_goes_on_without_them() -> None:
    """The encoder stays when replicas are ordered; when it is killed, what it would have encoded is encoded here."""
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        own = [await answer(engine, sample) for sample in (0, 1)]
    async with Cluster(triolet.demo.checkpoint(), config=CONFIG, encoders=1, cpus=0.5, name=NAME) as engine:
        assert await answer(engine) == own[0]
        await engine.scale(2)
        await until(lambda: len(replicas()) == 3)
        [encoder] = [one for one in replicas() if ":encoder" in one.cmdline()[0]]
        kill(encoder)
        assert await answer(engine, 1) == own[1]


def test_a_cluster_has_whole_replicas_beside_those_that_only_encode() -> None:
    with pytest.raises(InvalidRequest, match=r"part='encoder', which cannot run requests; allowed: part='whole'"):
        Cluster(triolet.demo.checkpoint(), config=evolve(CONFIG, part="encoder"))


def test_a_replica_that_only_encodes_never_sleeps() -> None:
    """It gets no requests, and nothing else would wake it."""
    found = _only_encodes(evolve(CONFIG, idle_sleep=5.0))
    assert (found.part, found.idle_sleep) == ("encoder", math.inf)


def test_a_request_that_reaches_a_replica_without_a_decoder_ends_with_the_refusal() -> None:
    """And the replica goes on."""
    refusal, ends = InvalidRequest("no decoder"), []

    class Refuses:
        def _running(self) -> Refuses:
            return self

        def submit(self, *_: Any) -> None:
            raise refusal

    class Stream:
        end = ends.append

    Replica._submit(Refuses(), None, Stream())
    assert ends == [m.Failed(refusal)]
