"""Wrong keys: how many there may be, who must wait for them, and what is told without a key."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from triolet.server.manners.limits import MOST, WrongKeys
from triolet.server.server import Server

from .talking import PaperEngine, answered, paper_server, scope_of
from .test_gate import KEY, Asked

pytestmark = pytest.mark.real_time

WRONG = {"authorization": "Bearer nonsense"}


def test_a_right_key_is_not_judged_among_too_many_wrong_ones() -> None:
    """Else the limit would hold up nobody."""
    wrong = WrongKeys(10, 6.0)
    assert [wrong.seconds_to_wait("a", None, 0.0) for _ in range(10)] == [0.0] * 10
    assert wrong.seconds_to_wait("a", None, 0.0) == wrong.seconds_to_wait("a", "key-1", 0.0) == 6.0
    assert wrong.seconds_to_wait("a", "key-1", 6.0) == 0.0
    assert wrong.seconds_to_wait("a", None, 6.0) == 0.0, "a right one does not count"


def test_nobody_is_kept_out_by_the_wrong_keys_of_others() -> None:
    wrong = WrongKeys(10, 6.0)
    assert wrong.seconds_to_wait("a", "key-1", 0.0) == 0.0
    for _ in range(1_000):
        wrong.seconds_to_wait("a", None, 0.0)
    assert wrong.seconds_to_wait("a", "key-1", 0.0) == 0.0, "it was right at this address before"
    assert wrong.seconds_to_wait("b", "key-2", 0.0) == 0.0, "another address"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("somebody", "somebody", True),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(one: str, other: str, same: bool) -> None:
    wrong = WrongKeys(1, 6.0)
    assert wrong.seconds_to_wait(one, None, 0.0) == 0.0
    assert (wrong.seconds_to_wait(other, None, 0.0) > 0.0) == same


def test_the_memory_has_a_bound() -> None:
    wrong = WrongKeys()
    for number in range(3 * MOST):
        wrong.seconds_to_wait(str(number), None, 0.0)
        wrong.seconds_to_wait(str(number), "key-1", 0.0)
    assert (len(wrong._paid_until), len(wrong._known)) == (MOST, MOST)


def test_what_was_seen_longest_ago_is_forgotten_first() -> None:
    """A flood of addresses makes neither a key in use unknown nor its own last address new."""
    wrong = WrongKeys(1, 6.0)
    wrong.seconds_to_wait("used", "key-1", 0.0)
    for number in range(MOST + 1):
        if number == MOST - 1:
            assert wrong.seconds_to_wait("used", "key-1", 0.0) == 0.0
        wrong.seconds_to_wait(str(number), "key-1", 0.0)
        wrong.seconds_to_wait(str(number), None, 0.0)
    assert wrong.seconds_to_wait(str(MOST), None, 0.0) == 6.0, "the last one is remembered"
    assert wrong.seconds_to_wait("0", None, 0.0) == 0.0, "the first one is forgotten"
    wrong.seconds_to_wait("used", None, 0.0)
    assert wrong.seconds_to_wait("used", "key-1", 0.0) == 0.0


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Server:
    return paper_server(PaperEngine(), api_keys=("secret", "second"))


async def test_who_tries_many_keys_must_wait_but_a_key_that_is_in_use_stays_open(
    server: Server, autojump_clock: Any
) -> None:
    statuses = [(await Asked(server, "GET", "/version", WRONG).run()).status for _ in range(10)]
    late = await Asked(server, "GET", "/version", WRONG).run()
    right = await Asked(server, "GET", "/version", KEY).run()
    assert statuses == [401] * 10
    assert (late.status, late.answer["retry-after"]) == (429, "6")
    assert late.message == "127.0.0.1 has sent too many wrong API keys; wait 6.0 s"
    assert (right.status, right.message) == (late.status, late.message), "nobody is told that it was right"
    assert (await Asked(server, "GET", "/version").run()).status == 401, "no key is no wrong one"
    await trio.sleep(6)
    assert (await Asked(server, "GET", "/version", KEY).run()).status == 200
    for status in (401, 429):
        assert (await Asked(server, "GET", "/version", WRONG).run()).status == status
    assert (await Asked(server, "GET", "/version", KEY).run()).status == 200


async def test_neither_a_websocket_nor_the_health_is_another_way_to_try_keys(
    server: Server, autojump_clock: Any
) -> None:
    """The health is told to everybody, and names to those with a key that was judged."""
    for _ in range(5):
        [begun, _] = await answered(server, scope_of(headers=WRONG))
        asked = await Asked(server, "GET", "/health", WRONG).run()
        assert (begun["status"], asked.status, "models" in told(asked)) == (401, 200, False)
    [begun, _] = await answered(server, scope_of(headers=WRONG))
    assert (begun["status"], dict(begun["headers"])[b"retry-after"]) == (429, b"6")
    late = await Asked(server, "GET", "/health", KEY).run()
    assert (late.status, "models" in told(late)) == (200, False)
    assert (await Asked(server, "GET", "/version", WRONG).run()).status == 429


def told(asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(b"".join(one.get("body", b"") for one in asked.got))
    return found


@pytest.mark.parametrize(
    ("keys", "headers", "named"),
    [
        (("secret",), {}, False),
        (("secret",), WRONG, False),
        (("secret",), KEY, True),
        ((), {}, True),
        ((), WRONG, True),
    ],
)
async def test_names_of_models_are_told_to_those_who_have_a_key(
    keys: tuple[str, ...], headers: dict[str, str], named: bool
) -> None:
    asked = await Asked(paper_server(PaperEngine(), api_keys=keys), "GET", "/health", headers).run()
    assert asked.status == 200
    names = {"live", "ready", "draining", "running"}
    assert set(told(asked)) == (names | {"models", "sleeping"} if named else names)
