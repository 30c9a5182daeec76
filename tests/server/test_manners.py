"""Who may use a server, and how much."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.errors import InvalidRequest
from triolet.server.manners.keys import Keys, presented_key
from triolet.server.manners.limits import RateLimit
from triolet.server.manners.origins import host_fault, origin_fault
from triolet.server.server import EndingPace
from triolet.server.settings import ServerSettings


def test_each_key_opens_and_nothing_else_does() -> None:
    keys = Keys(("one", "zwei"))
    assert keys.who("one") != keys.who("zwei")
    assert "one" not in (keys.who("one") or "")
    assert [keys.who(wrong) for wrong in ("", None, "on", "one ", "drei", "\udcff")] == [None] * 6
    assert not Keys(())


@pytest.mark.parametrize(
    ("authorization", "subprotocols", "key"),
    [
        ("Bearer abc", (), "abc"),
        ("bearer  abc ", (), "abc"),
        ("Basic abc", (), None),
        ("abc", (), None),
        (None, (), None),
        (None, ("realtime", "openai-insecure-api-key.xyz"), "xyz"),
        ("Bearer ", ("openai-insecure-api-key.xyz",), "xyz"),
    ],
)
def test_where_a_key_may_be(authorization: str | None, subprotocols: tuple[str, ...], key: str | None) -> None:
    assert presented_key(authorization, subprotocols) == key


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), max_size=30))
def test_nobody_makes_more_than_twice_the_rate_in_any_minute_and_a_wait_is_enough(
    per_minute: int, asked: list[tuple[str, float]]
) -> None:
    """A burst of a minute's requests may follow an idle minute; over any longer time the rate holds."""
    limit, now, made = RateLimit(per_minute), 0.0, []
    for who, pause in asked:
        now += pause
        wait = limit.seconds_to_wait(who, now)
        if wait:
            now += wait
            assert limit.seconds_to_wait(who, now) == 0.0, "after the wait it may"
        made.append((who, now))
    for who in "ab":
        times = [time for one, time in made if one == who]
        for start in times:
            within = [time for time in times if start <= time < start + 60.0]
            assert len(within) <= 2 * per_minute


@given(st.integers(1, 50))
def test_a_minute_s_requests_may_come_at_once(per_minute: int) -> None:
    limit = RateLimit(per_minute)
    assert [limit.seconds_to_wait("a", 5.0) for _ in range(per_minute)] == [0.0] * per_minute
    assert limit.seconds_to_wait("a", 5.0) > 0.0
    assert limit.seconds_to_wait("b", 5.0) == 0.0, "each caller has its own"


def test_callers_who_have_nothing_to_wait_for_are_forgotten() -> None:
    limit = RateLimit(60)
    for number in range(30_000):
        limit.seconds_to_wait(str(number), number / 100)
    assert len(limit._paid_until) <= 10_001


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "may"),
    [
        (None, "x", (), True),
        ("http://localhost:8000", "localhost:8000", (), True),
        ("http://LOCALHOST:8000", "localhost:8000", (), True),
        ("http://evil.example", "localhost:8000", (), False),
        ("http://localhost:9000", "localhost:8000", (), False),
        ("null", "localhost:8000", (), False),
        ("http://evil.example", None, (), False),
        ("https://app.example", "api.example", ("https://app.example",), True),
        ("https://other.example", "api.example", ("https://app.example",), False),
        ("https://other.example", "api.example", ("*",), True),
    ],
)
def test_pages_of_other_origins_may_not_use_the_server(
    origin: str | None, host: str | None, allowed: tuple[str, ...], may: bool
) -> None:
    assert (origin_fault(origin, host, allowed) is None) == may


@pytest.mark.parametrize(
    ("host", "may"),
    [
        ("localhost:8000", True),
        ("LocalHost", True),
        ("a.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        (None, True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.nip.example", False),
        ("[broken", False),
    ],
)
def test_a_local_server_answers_to_local_names_alone(host: str | None, may: bool) -> None:
    """Else a name that is made to resolve to 127.0.0.1 would let a page read it."""
    assert (host_fault(host) is None) == may


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_a_server_beyond_the_loopback_wants_a_key(host: str) -> None:
    with pytest.raises(InvalidRequest, match="no API key is set; give a key"):
        ServerSettings(host=host)
    assert not ServerSettings(host=host, api_keys=("secret",)).is_local
    assert ServerSettings(host=host, allow_anyone=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_local_server_needs_no_key(host: str) -> None:
    assert ServerSettings(host=host).is_local


def test_a_key_is_in_no_repr() -> None:
    assert "secret" not in repr(ServerSettings(api_keys=("secret",)))


@pytest.mark.parametrize("key", ["schlüssel", " secret", "secret ", "se cret", "secret\n", "\ufeffsecret", "", 5])
def test_a_key_that_no_client_can_send_is_refused_and_not_told(key: object) -> None:
    with pytest.raises(InvalidRequest, match=r"api_keys\[1\] (is|has) .*; (allowed|choose)") as raised:
        ServerSettings(api_keys=("topmost", key))
    assert "topmost" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_keys_are_a_list() -> None:
    with pytest.raises(InvalidRequest, match="api_keys is a str; allowed: a list of keys"):
        ServerSettings(api_keys="secret")  # type: ignore[arg-type]


def test_who_is_sent_away_hears_when_a_request_will_end() -> None:
    pace = EndingPace()
    assert pace.seconds_to_wait(0.0) == 1
    for end in (100.0, 103.0, 106.0):
        pace.one_ended(end)
    assert pace.seconds_to_wait(109.0) == 3
    assert pace.seconds_to_wait(1_000.0) == 1, "that was long ago"
