"""Live audio: what a session takes, what it tells, and how it ends."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from triolet.core.errors import EncodeFailed
from triolet.server.endpoints import live_turns
from triolet.server.endpoints.live_turns import MOST_SAMPLES

from .talking import COMPLETED, FAILED, RATE, PaperEngine, Talk, answered, paper_server, scope_of, talking, tone, update

SERVER = {"type": "server_vad"}
ERROR = "error"
UPDATED = "session.updated"


async def texts(talk: Talk) -> list[str]:
    return [one["transcript"] for one in await talk.of(COMPLETED)]


async def errors(talk: Talk) -> list[str]:
    return [one["error"]["message"] for one in await talk.of(ERROR)]


# -- turns -------------------------------------------------------------------------------------------------------------


async def test_a_commit_without_audio_is_an_error_each_time(autojump_clock: Any) -> None:
    """The first one, one behind a turn, and one behind audio that is not wanted. A half sample is none."""
    async with talking() as talk:
        talk.commit(event_id="first")
        assert [one["error"]["event_id"] for one in await talk.of(ERROR)] == ["first"]
        talk.append(10)
        talk.commit()
        talk.commit()
        talk.append(10)
        talk.say("input_audio_buffer.clear")
        talk.commit()
        talk.append(data=b"x")
        talk.commit()
        assert await errors(talk) == ["there is no audio to commit; append audio first"] * 4
        talk.raw(None, b"\0\1")
        assert "the message is bytes; allowed: events" in (await errors(talk))[-1]
        talk.append(3)
        talk.commit()
        assert await texts(talk) == ["10 samples", "3 samples"]


@pytest.mark.parametrize("end", ["commit", "clear", "update"])
async def test_half_a_sample_at_the_end_of_a_turn_is_not_in_the_next(autojump_clock: Any, end: str) -> None:
    async with talking() as talk:
        talk.append(data=tone(5) + b"\x7f")
        if end == "update":
            talk.update()
        else:
            talk.say(f"input_audio_buffer.{end}")
        talk.append(data=tone(3)[:3])
        talk.append(data=tone(3)[3:])
        talk.commit()
        await talk.settled()
        assert talk.engine.heard[-1].tolist() == [0, 1, 2], "a sample may be cut within a turn"


async def test_a_turn_of_tiny_pieces_takes_what_is_counted_for_its_samples(autojump_clock: Any) -> None:
    async with talking() as talk:
        talk.append(1)
        await talk.settled()
        before = sys.getallocatedblocks()
        for _ in range(3_000):
            talk.append(1)
        await talk.settled()
        assert sys.getallocatedblocks() - before < 1_000, "no object is kept for each piece"
        talk.commit()
        await talk.settled()
        assert len(talk.engine.heard[-1]) == 3_001


@pytest.mark.parametrize("turns", [None, SERVER])
async def test_a_model_that_is_none_is_one_error_a_turn(autojump_clock: Any, turns: Any) -> None:
    async with talking(turns) as talk:
        talk.update(turns, model="nobody")
        for _ in range(50):
            talk.append(RATE)
        assert await errors(talk) == ["no model 'nobody'; allowed: whisper"]
        assert await talk.of(FAILED) == [], "there is no item"
        talk.commit()
        [failed], [committed] = await talk.of(FAILED), await talk.of("input_audio_buffer.committed")
        assert failed["item_id"] == committed["item_id"], "a commit has an answer"
        assert len(await errors(talk)) == 1
        for _ in range(50):
            talk.append(RATE)
        assert len(await errors(talk)) == 2, "the next turn"
        talk.update(None, model="whisper")
        talk.append(7)
        talk.commit()
        assert await texts(talk) == ["7 samples"]


async def test_a_failure_is_told_of_its_item_with_the_first_error_of_a_group(autojump_clock: Any) -> None:
    fault = EncodeFailed("the device is out of memory")
    async with talking() as talk:
        talk.engine.faults.append(ExceptionGroup("two tasks", [ExceptionGroup("", [fault]), ValueError("later")]))
        talk.append(10)
        talk.commit()
        talk.append(20)
        talk.commit()
        [failed] = await talk.of(FAILED)
        [first, second] = await talk.of("input_audio_buffer.committed")
        assert failed["error"]["message"] == "the device is out of memory"
        assert failed["item_id"] == first["item_id"]
        assert second["previous_item_id"] == first["item_id"]
        assert await errors(talk) == []
        assert await texts(talk) == ["20 samples"]


async def test_what_an_update_leaves_out_stays_as_it_is(autojump_clock: Any) -> None:
    heard = {"model": "whisper", "language": "en", "prompt": "Ada", "keywords": None}
    pcmu = {"type": "audio/pcmu", "rate": 8_000}
    async with talking() as talk:
        told = (await talk.of(UPDATED))[-1]["session"]["audio"]["input"]
        for sent, kept in (
            ({"format": {"type": "audio/pcmu"}}, {"format": pcmu}),
            ({"transcription": heard}, {"transcription": heard}),
            ({"transcription": {**heard, "language": "auto"}}, {"transcription": {**heard, "language": None}}),
            ({"turn_detection": SERVER}, {"turn_detection": SERVER}),
            ({"turn_detection": None}, {"turn_detection": None}),
            ({}, {}),
        ):
            talk.say("session.update", session={"type": "transcription", "audio": {"input": sent}})
            told |= kept
            assert (await talk.of(UPDATED))[-1]["session"]["audio"]["input"] == told
        talk.append(10)
        talk.commit()
        await talk.settled()
        assert talk.engine.prompts == ["Ada"]


async def test_an_event_larger_than_all_that_may_be_unread_stops_no_event_after_it(autojump_clock: Any) -> None:
    sent: list[int] = []

    async def send(message: Any) -> None:
        await trio.sleep(1)
        sent.append(len(message["text"]))

    async def close(*_: object) -> None:
        await trio.lowlevel.checkpoint()

    socket: Any = SimpleNamespace(send=send, close=close)
    client = live_turns.LiveClient(socket, "live")
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.write)
            for size in (live_turns._MOST_UNREAD, 1, 1):
                await client.tell("spoken", text="x" * size)
            client.end(1000, "")
    assert len(sent) == 3


@pytest.mark.parametrize("turns", [None, SERVER])
async def test_keywords_are_the_hotwords_of_each_turn_until_they_change(autojump_clock: Any, turns: Any) -> None:
    async with talking() as talk:
        for change in ({"keywords": ["Åsa", "Ödön"]}, {"keywords": []}, {"keywords": ["Yo"] * 129}):
            talk.update(turns, model="whisper", **change)
            talk.append(10)
            talk.commit()
        assert [one["session"]["audio"]["input"]["transcription"]["keywords"] for one in await talk.of(UPDATED)][
            1:
        ] == [
            ["Åsa", "Ödön"],
            None,
        ]
        assert talk.engine.hotwords == [["Åsa", "Ödön"], None, None]
        assert "keywords" in (await errors(talk))[0]


async def test_an_engine_that_fails_hears_again_after_a_second_of_audio(autojump_clock: Any) -> None:
    """Where the server finds the turns, nobody else begins one. New settings hold behind the turn that they ended."""
    async with talking(SERVER) as talk:
        talk.engine.told += [EncodeFailed("once"), EncodeFailed("twice")]
        for _ in range(10):
            talk.append(RATE // 2)
            await talk.settled()
        assert await errors(talk) == ["once", "twice"]
        assert len(talk.engine.lives) == 3
        talk.update(None, prompt="Ada")
        talk.append(10)
        talk.commit()
        assert await texts(talk) == ["10 samples"]
        assert talk.engine.prompts == ["Ada"]


# -- what the engine tells ---------------------------------------------------------------------------------------------


async def test_speech_has_started_with_the_first_sound_and_ends_with_the_last_word(autojump_clock: Any) -> None:
    async with talking(SERVER) as talk:
        talk.engine.told += [update(1.0, provisional=" so")]
        talk.append(10)
        kinds = [one["type"] for one in await talk.settled()]
        assert kinds[-1] == "input_audio_buffer.speech_started", "before any word is final"
    async with talking(SERVER) as talk:
        talk.engine.told += [update(1.0, provisional=" so"), update(2.0, stable=" so far", start=0.5, end=1.75)]
        talk.engine.told += [update(3.0, ends_utterance=True)]
        talk.append(10)
        [started] = await talk.of("input_audio_buffer.speech_started")
        [stopped] = await talk.of("input_audio_buffer.speech_stopped")
        [whole] = await talk.of(COMPLETED)
        assert started["item_id"] == stopped["item_id"] == whole["item_id"]
        assert stopped["audio_end_ms"] == 1750
        assert whole["transcript"] == "so far"
        assert whole["usage"]["seconds"] == 2, "0.5 to 1.75 s"


async def test_every_commit_is_answered_though_nobody_speaks(autojump_clock: Any) -> None:
    """After silence, after an utterance that the server has ended, and after one that has failed."""
    so = update(1.0, stable=" so", start=0.5, end=1.0)
    async with talking(SERVER) as talk:
        for told in ([], [so, update(2.0, ends_utterance=True)], [so, EncodeFailed("no")]):
            talk.engine.told += told
            talk.append(10)
            before = len(await talk.settled())
            talk.commit()
            ends = [one for one in (await talk.settled())[before:] if one["type"] in (COMPLETED, FAILED)]
            [committed] = (await talk.of("input_audio_buffer.committed"))[-1:]
            assert [one["item_id"] for one in ends] == [committed["item_id"]]
        assert await texts(talk) == ["", "so", ""]
        assert [one["error"]["message"] for one in await talk.of(FAILED)] == ["no", "no"], "at once, and of the commit"
        assert await errors(talk) == []


@pytest.mark.parametrize("way", ["failed", "cleared", "dropped"])
async def test_times_go_on_however_a_turn_has_ended(autojump_clock: Any, way: str) -> None:
    async with talking() as talk:
        if way == "failed":
            talk.engine.faults.append(EncodeFailed("no"))
        if way == "dropped":
            talk.update(None, model="nobody")
        talk.append(2 * RATE)
        talk.append(RATE)
        talk.say(f"input_audio_buffer.{'clear' if way == 'cleared' else 'commit'}")
        talk.engine.told += [update(1.0, provisional=" so")]
        talk.update(SERVER, model="whisper")
        talk.append(RATE)
        [started] = await talk.of("input_audio_buffer.speech_started")
        assert started["audio_start_ms"] == 4_000


# -- bounds ------------------------------------------------------------------------------------------------------------


async def test_a_turn_has_so_many_samples_and_no_more_at_any_rate(
    autojump_clock: Any,
) -> None:
    """What is refused is not taken, and what was taken can be committed."""
    for rate, most in ((8_000, 4_800_000), (96_000, MOST_SAMPLES)):
        async with talking() as talk:
            talk.update(rate=rate)
            for _ in range(most // 1_200_000):
                talk.append(1_200_000)
                await talk.settled()
            assert await errors(talk) == []
            talk.append(1)
            [told] = await errors(talk)
            assert f"more than {most:,} samples; allowed: up to 14,400,000 samples and 600 s. Commit" in told
            talk.commit()
            assert await texts(talk) == [f"{most} samples"]
            talk.append(1)
            talk.commit()
            assert (await texts(talk))[1:] == ["1 samples"]


@pytest.mark.parametrize(("samples", "most"), [(1_200_000, MOST_SAMPLES), (1, 20_000)])
async def test_a_client_that_sends_faster_than_the_model_hears_is_sent_away(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch, samples: int, most: int
) -> None:
    """However small its pieces are. All is given back, though the model is not done."""
    monkeypatch.setattr(live_turns, "MOST_SAMPLES", most)
    async with talking() as talk:
        talk.engine.may_answer = trio.Event()
        talk.append(10)
        talk.commit()
        for _ in range(most // max(samples, 128)):
            talk.append(samples)
        assert await errors(talk) == [
            f"more than {most:,} samples wait to be read; send audio no faster than the model reads it"
        ]
        assert talk.closed == 1008
        await talk.over.wait()


async def test_a_client_that_reads_nothing_is_sent_away_or_missed_when_it_goes(autojump_clock: Any) -> None:
    """It asks for answers, and the reader waits for none of them to be read. Nor does the reader wait where the model
    has much to tell."""
    async with talking() as talk:
        talk.read_no_more()
        for _ in range(20):
            talk.update(prompt="x" * 100_000)
        await talk.settled()
        assert talk.engine.users == 0
        talk.read_again()
        assert "of the server's events were not read" in (await errors(talk))[-1]
        assert talk.closed == 1008
    async with talking(SERVER) as talk:
        talk.read_no_more()
        talk.engine.told += [update(1.0, stable="x" * 10_000, start=0.0, end=1.0) for _ in range(1_000)]
        for _ in range(200):
            talk.append(10)
        await talk.settled()
        assert talk.engine.users == 1
        assert talk.engine.told, "what nobody reads has a bound, too"
        talk.leave()
        await talk.settled()
        assert (talk.engine.users, len(talk.server.sockets)) == (0, 0)


# -- messages that are none --------------------------------------------------------------------------------------------


async def test_a_bug_is_logged_and_its_client_told_no_more_than_that_there_is_one(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with talking() as talk:
        talk.raw(3)  # type: ignore[arg-type]  # which hypercorn never gives
        await talk.over.wait()
        assert talk.closed == 1011
        assert "log has the reason" in talk.sent[-1]["reason"]
    [record] = [one for one in caplog.records if one.name == "triolet.server"]
    assert record.exc_info is not None
    assert record.exc_info[0] is ExceptionGroup


# -- the server stops --------------------------------------------------------------------------------------------------


async def test_a_server_that_stops_tells_every_turn_that_it_has_heard(autojump_clock: Any) -> None:
    """One that is being heard, one that waits, and one that the client has not ended; what comes later is not heard."""
    async with talking() as talk:
        talk.engine.may_answer = trio.Event()
        talk.append(10)
        talk.commit()
        talk.append(20)
        talk.commit()
        talk.append(30)
        await talk.settled()
        talk.server.stop()
        await talk.settled()
        talk.append(40)
        talk.commit()
        assert await texts(talk) == []
        talk.engine.may_answer.set()
        assert await texts(talk) == ["10 samples", "20 samples", "30 samples"]
        assert await errors(talk) == []
        assert talk.closed == 1001
        await talk.server.all_ended()
    async with talking() as talk:
        talk.stays = True
        talk.server.stop()
        await talk.settled()
        assert (talk.closed, len(talk.server.sockets)) == (1001, 1)
        await talk.server.all_ended()  # a client that does not answer the end holds it up for a while


async def test_a_session_that_overruns_the_servers_time_has_last_words(autojump_clock: Any) -> None:
    async with talking() as talk:
        talk.engine.may_answer = trio.Event()
        talk.append(10)
        talk.commit()
        await talk.settled()
        talk.server.stop()
        talk.server.cut_off()
        assert await errors(talk) == [
            "the server is stopping, and the time for open sessions is over; connect again later"
        ]
        assert talk.closed == 1001
        await talk.server.all_ended()


@pytest.mark.parametrize(
    ("way", "outcome"),
    [
        ("committed", "finished"),
        ("silent", "finished"),
        ("not committed", "aborted"),
        ("not answered", "aborted"),
        ("speaking", "aborted"),
        ("turn fails", "failed"),
        ("cut off", "failed"),
        ("raises", "failed"),
    ],
)
async def test_a_session_is_counted_by_its_outcome(autojump_clock: Any, way: str, outcome: str) -> None:
    async with talking(SERVER if way in ("silent", "speaking") else None) as talk:
        if way == "speaking":
            talk.engine.told += [update(1.0, provisional=" so")]
        if way == "turn fails":
            talk.engine.faults.append(EncodeFailed("no"))
        if way == "not answered":
            talk.engine.may_answer = trio.Event()
        talk.update(SERVER if way in ("silent", "speaking") else None, model="whisper")
        talk.append(10)
        if way not in ("silent", "not committed", "speaking"):
            talk.commit()
        await talk.settled()
        if way == "cut off":
            talk.server.cut_off()
        if way == "raises":
            talk.raw(3)  # type: ignore[arg-type]  # which hypercorn never gives
    assert talk.server.answers["whisper"] == {outcome: 1}


# -- who may enter -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "settings", "status", "headers"),
    [
        (scope_of(), {"api_keys": ["right"]}, 401, {"www-authenticate": "Bearer"}),
        (scope_of(headers={"origin": "http://evil.example"}), {}, 403, {}),
        (scope_of("/v1/nothing"), {}, 404, {}),
        (scope_of(), {"max_requests": 1}, 429, {"retry-after": "1"}),
        (scope_of(), {}, 503, {"retry-after": "5"}),
    ],
)
async def test_who_is_refused_is_answered_and_logged_as_any_request(
    caplog: pytest.LogCaptureFixture, scope: Any, settings: Any, status: int, headers: dict[str, str]
) -> None:
    caplog.set_level("INFO", "triolet.access")
    scope["headers"].append((b"x-request-id", b"mine"))
    server = paper_server(PaperEngine(), **settings)
    server.sockets.add(print)
    server.stopping = status == 503
    start, body = await answered(server, scope)
    assert (start["type"], start["status"]) == ("websocket.http.response.start", status)
    assert headers.items() | {("x-request-id", "mine")} <= {
        (name.decode(), value.decode()) for name, value in start["headers"]
    }
    line = json.loads(caplog.records[-1].message)
    assert (line["id"], line["status"]) == ("mine", status)
    code = json.loads(body["body"])["error"]["code"]
    assert line.get("error", "not_found") == code


async def test_who_is_served_has_the_id_of_its_line_in_the_access_log(
    autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "triolet.access")
    async with talking() as talk:
        [named] = [value.decode() for name, value in talk.sent[0]["headers"] if name == b"x-request-id"]
    line = json.loads(caplog.records[-1].message)
    assert (line["id"], line["status"]) == (named, 101)
