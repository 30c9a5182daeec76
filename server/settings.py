"""`ServerSettings`: the address of a server, the clients that it admits, and its limits."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Iterable
from typing import Any

from attrs import frozen

from ..api.tools.formats import SYNTAXES
from ..core.checks import Check, Refused, checked, flag, integer, number, one_of, settle, several
from ..core.errors import InvalidRequest
from .manners.keys import key_fault

_MUCH = 2**50
_POSITIVE = number(0, math.inf, above=True)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Refused
    return value


def _prefix(value: Any) -> str:
    """Checks a prefix of addresses. A prefix without a slash after its host is refused: it would also match longer host
    names."""
    scheme, _, rest = _text(value).partition("://")
    if scheme not in ("http", "https") or not rest.partition("/")[0] or "/" not in rest:
        raise Refused
    return str(value)


def _keys(value: Any) -> tuple[str, ...]:
    """Checks API keys. The errors do not show them."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequest(f"api_keys is a {type(value).__name__}; allowed: a list of keys")
    keys = tuple(value)
    for place, key in enumerate(keys):
        if fault := key_fault(key):
            raise InvalidRequest(f"api_keys[{place}] {fault}")
    return keys


@frozen(kw_only=True)
class ServerSettings:
    """The settings of a server.

    Args:
        host: the address to listen on.
        port: the port; 0 chooses a free one.
        api_keys: the keys, of visible ASCII characters. Each request needs a key, as ``Authorization: Bearer KEY``; if
            there are no keys, anybody is served.
        allow_anyone: allow a server without keys to listen beyond the loopback.
        max_body_bytes: the most bytes of one request; a larger one is refused with 413.
        spool_bytes: larger uploads are written to a file, which has no name and is deleted when the request ends.
        max_audio_seconds: the longest audio, in a file or in a conversation; longer audio is refused with 413.
        max_media: the most images and audio parts of one conversation; more are refused with 413.
        max_media_seconds: the most seconds of all audio of one conversation together; more is refused with 413. All of
            it is in memory at once: 64 kB for each second at 16 kHz.
        max_media_pixels: the most pixels of all images of one conversation together, 3 or 4 bytes each; more are
            refused with 413.
        max_requests: the most requests that run or wait at the same time; more are refused with 429.
        request_memory: the most bytes that all requests together may make the server hold: bodies and files as they
            come, images and audio as they are decoded, live audio that waits, long answers. A request beyond that is
            refused with 429, and one that needs more than that alone with 413. ``None``: a quarter of the free memory,
            but no more than 2 GiB. Compiled structures that are kept take up to an eighth more.
        requests_per_minute: the most requests a minute with one key, or from one address if there are no keys; more are
            refused with 429.
        max_connections: the most open connections; more are closed at once, with 503.
        body_seconds: a client that sends nothing for so long before its request is complete gets 408.
        keep_alive_seconds: a connection on which no request begins for so long is closed. A request begins when its
            whole head has come. Clients keep idle connections for a shorter time: OpenAI's for 5 s.
        send_seconds: the connection of a client that reads nothing for so long is closed.
        drain_seconds: the time that running requests have to end when the server stops.
        url_prefixes: images and audio are fetched only from addresses that begin with one of these prefixes; ``data:``
            addresses are always allowed.
        url_seconds: the time in which all addresses of one request must be fetched.
        private_urls: true: fetch from addresses in private networks, too.
        cors_origins: the origins whose pages may use the server from a browser.
        certfile: the file of the TLS certificate, PEM; it needs ``keyfile``.
        keyfile: the file of the certificate's key, PEM.
        tool_format: the format in which the models write tool calls, see `ToolFormat`; ``None``: it is found for each
            checkpoint.
        access_log: log a line for each request, in JSON, by the logger ``triolet.access``.

    Raises:
        InvalidRequest: a value is not allowed, or the server would listen beyond the loopback without keys.
    """

    host: str = checked("127.0.0.1", Check(_text, "a host name or an IP address"))
    port: int = checked(8000, integer(0, 65_535, "; 0 chooses a free one"))
    api_keys: tuple[str, ...] = checked((), Check(_keys, "a list of keys"), repr=False)
    allow_anyone: bool = checked(False, flag())
    max_body_bytes: int = checked(512 * 2**20, integer(1, _MUCH))
    spool_bytes: int = checked(4 * 2**20, integer(0, _MUCH))
    max_audio_seconds: float = checked(6 * 3600.0, _POSITIVE)
    max_media: int = checked(256, integer(1, 1_000_000))
    max_media_seconds: float = checked(1_800.0, _POSITIVE)
    max_media_pixels: int = checked(256_000_000, integer(1, _MUCH))
    max_requests: int = checked(512, integer(1, 1_000_000))
    request_memory: int | None = checked(None, integer(1, _MUCH).or_none("a quarter of the free memory, up to 2 GiB"))
    requests_per_minute: int | None = checked(None, integer(1, 1_000_000).or_none("no limit"))
    max_connections: int = checked(2_000, integer(1, 1_000_000))
    body_seconds: float = checked(30.0, _POSITIVE)
    keep_alive_seconds: float = checked(20.0, _POSITIVE)
    send_seconds: float = checked(30.0, _POSITIVE)
    drain_seconds: float = checked(30.0, number(0, math.inf))
    url_prefixes: tuple[str, ...] = checked(
        (), several(_prefix, 10_000, "a list of prefixes that have a whole host, such as https://example.org/")
    )
    url_seconds: float = checked(20.0, _POSITIVE)
    private_urls: bool = checked(False, flag())
    cors_origins: tuple[str, ...] = checked((), several(_text, 10_000, "a list of origins"))
    certfile: str | None = checked(None, Check(_text, "a file").or_none("no TLS"))
    keyfile: str | None = checked(None, Check(_text, "a file").or_none("no TLS"))
    access_log: bool = checked(True, flag())
    tool_format: str | None = checked(None, one_of(*SYNTAXES).or_none("as each checkpoint says"))

    def __attrs_post_init__(self) -> None:
        settle(self)
        if (self.certfile is None) != (self.keyfile is None):
            raise InvalidRequest("one of certfile and keyfile is missing; give both for TLS, or neither")
        if not (self.is_local or self.api_keys or self.allow_anyone):
            raise InvalidRequest(
                f"host={self.host!r} can be reached from other machines, and no API key is set; give a key, a host "
                "of the loopback such as 127.0.0.1, or allow_anyone=True"
            )

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
