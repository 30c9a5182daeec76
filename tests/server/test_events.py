"""``/events`` and ``/`` over HTTP: what a watcher gets, from whom it is kept, and that it holds nothing up."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import trio

from triolet.core import events as e
from triolet.server.view import page
from triolet.server.view.page import plain, read_page, scripts
from triolet.server.view.watchers import MOST_CHANGES

from .openai_client import openai_client
from .served import PATIENCE, Served, served
from .talking import PaperEngine, paper_server
from .test_gate import Asked

pytestmark = pytest.mark.real_time

Message = dict[str, Any]


@contextmanager
def asked(service: Served, path: str, key: str | None = None) -> Iterator[HTTPResponse]:
    """The answer to a GET, while it comes."""
    with closing(HTTPConnection(urlsplit(service.url).netloc, timeout=PATIENCE)) as connection:
        connection.request("GET", path, headers={} if key is None else {"authorization": f"Bearer {key}"})
        yield connection.getresponse()


@contextmanager
def watching(service: Served, key: str = "none") -> Iterator[Iterator[Message]]:
    """What a watcher is told."""
    with asked(service, "/events", key) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))


def until(events: Iterator[Message], wanted: Any) -> list[Message]:
    """The events up to the first that is ``wanted``."""
    found = []
    for event in events:
        found.append(event)
        if wanted(event):
            return found
    raise AssertionError(f"the stream ended after {found}")


def until_ended(events: Iterator[Message], model: str, name: str) -> list[Message]:
    """The events up to the figures that follow the end of the request ``name``, whenever these come."""

    def ended(one: Message) -> bool:
        return any(
            each.get("request", "").startswith(f"{name}#") and each["stage"] == "finished" for each in changes([one])
        )

    def idle(one: Message) -> bool:
        return one["type"] == "figures" and one["models"][model]["users"] == 0

    return until(events, ended) + until(events, idle) + until(events, idle)


def changes(events: list[Message]) -> list[Message]:
    return [change for event in events for change in event.get("changes", ())]


# -- what is told ------------------------------------------------------------------------------------------------------


def test_the_state_comes_first_then_figures_and_changes(models: dict[str, str], speech: Path) -> None:
    """Of a transcription: its stages, its encoder output, and the model, which is absent before its first use."""
    only = {name: models[name] for name in ("whisper", "bert")}
    with served(only) as service, openai_client(service) as client, watching(service) as events:
        first, figures = next(events), next(events)
        assert first["type"] == "state"
        assert figures["type"] == "figures"
        can = {name: one["can"] for name, one in figures["models"].items()}
        assert can == {"whisper": ["transcribe", "words"], "bert": []}, "by their files"
        named = {"x-request-id": "mine"}
        text = client.audio.transcriptions.create(model="whisper", file=speech, extra_headers=named).text
        seen = until_ended(events, "whisper", "mine")
        with pytest.raises(openai.APIStatusError):
            client.audio.transcriptions.create(model="whisper", file=b"no audio")
        with watching(service) as later:
            state, figures = next(later), next(later)
    assert {one["request"].partition("#")[0] for one in state["recent"]} == {"mine"}
    assert [stage for stage, _ in state["recent"][-1]["stages"]][-2:] == ["decoding", "finished"]
    assert figures["models"]["whisper"]["ended"] == {"finished": 1, "failed": 1}, "by clients' requests"
    of_mine = [one for one in changes(seen) if one.get("request", "").startswith("mine#")]
    assert {one["stage"] for one in of_mine} >= {"queued", "encoding", "decoding", "finished"}
    assert {one["state"] for one in changes(seen) if "entry" in one} >= {"reserved", "encoding", "held", "idle"}
    whisper = seen[-1]["models"]["whisper"]
    assert whisper["can"] == ["transcribe", "words"]
    assert whisper["engine"]["cache"]["by_state"]["idle"] == whisper["engine"]["cache"]["taken"] > 0
    assert text.split()[0] not in json.dumps(seen)


def test_what_others_say_is_not_told(service: Served, client: openai.OpenAI) -> None:
    """Neither what they ask, nor what they are answered, nor what a refused request quotes."""
    secret = "xylophone"
    with watching(service) as events:
        answer = client.chat.completions.create(
            model="llama",
            messages=[{"role": "user", "content": secret}],
            max_tokens=8,
            seed=1,
            extra_headers={"x-request-id": "mine"},
        )
        bad = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": secret}}}
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "hi"}], response_format=bad, max_tokens=8
            )
        seen = until_ended(events, "llama", "mine")
    assert secret not in json.dumps(seen)
    assert (answer.choices[0].message.content or "?") not in json.dumps(seen)
    assert seen[-1]["models"]["llama"]["can"] == ["chat"]
    assert seen[-1]["models"]["llama"]["engine"]["cache"]["capacity"] == 0


def test_a_watcher_that_missed_changes_is_told_how_many_and_gets_the_state(service: Served) -> None:
    more = 100
    names = [f"many-{number}" for number in range(MOST_CHANGES + more)]

    def tell(make: Any) -> None:
        now = trio.current_time()
        for name in names:
            service.server.watchers.hear("bert", make(name, now))

    with watching(service) as events:
        next(events)
        service.ask(lambda: tell(lambda name, now: e.RequestQueued(name, time=now)))
        *_, lost = until(events, lambda one: one["type"] == "lost")
        state = next(events)
        service.ask(lambda: tell(lambda name, now: e.RequestEnded(name, "aborted", time=now)))
    assert lost["count"] == more
    assert state["type"] == "state"
    assert [one["request"] for one in state["requests"]] == names


# -- who is told, and what it costs ------------------------------------------------------------------------------------


def test_with_a_key_only_who_has_it_watches_and_the_page_needs_none(models: dict[str, str]) -> None:
    with served(models, api_keys=["sesame"]) as service:
        for key in (None, "wrong"):
            with asked(service, "/events", key) as refused:
                assert refused.status == 401
        with asked(service, "/") as page:
            assert page.status == 200
            assert b"sesame" not in page.read()
        with watching(service, "sesame") as events:
            assert next(events)["type"] == "state"


def test_a_watcher_is_no_request_and_does_not_hold_up_the_end(models: dict[str, str]) -> None:
    """It is told of the end. The server would wait for a request without limit."""
    with served(models, drain_seconds=1e9, max_requests=1) as service:
        with watching(service) as events:
            next(events)
            assert service.ask(lambda: len(service.server.exchanges)) == 0
            with asked(service, "/health") as health:
                assert json.load(health)["running"] == 0
            service.ask(service.server.stop)
            assert until(events, lambda one: one["type"] == "end")
            assert list(events) == []


class Stuck(Asked):
    """Reads nothing of its answer."""

    async def _say(self, message: Any) -> None:
        await super()._say(message)
        if message["type"] == "http.response.body":
            await self.leaves.wait()


async def test_a_watcher_that_reads_nothing_does_not_hold_up_the_end(autojump_clock: Any) -> None:
    """What it is sent does not leave; nobody waits for that."""
    server = paper_server(PaperEngine())
    watcher = Stuck(server, "GET", "/events")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watcher.run)
        await trio.testing.wait_all_tasks_blocked()
        assert len(watcher.got) == 2
        server.stop()
        await server.all_ended()
        watcher.leaves.set()


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_page_allows_its_own_script_and_style_alone(service: Served) -> None:
    with asked(service, "/") as answer:
        html, policy = answer.read().decode(), answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        ((_, text),) = re.findall(rf"<{tag}( [^>]*)?>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rules[rule]
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)""", html) == []
    assert re.findall(r" on\w+=", html.partition("<script")[0]) == []


def test_all_scripts_are_one_module_in_which_no_name_is_there_twice() -> None:
    """Each is behind those that it imports."""
    assert set(scripts()) == {path.name for path in (Path(page.__file__).parent / "page").glob("*.js")}
    names: list[str] = []
    for index, (script, text) in enumerate(scripts().items()):
        assert set(re.findall(r'from "\./(.*?)";', text)) <= set(list(scripts())[:index]), script
        code = re.sub(r"/\*.*?\*/", "", plain(text), flags=re.DOTALL)
        assert "import" not in code.split(), f"{script} imports in another form"
        names += re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", plain(text), re.MULTILINE)
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    assert "</script" not in read_page().html.partition("<script")[2].rpartition("</script>")[0]
