"""`Media`: fetches images and audio that a request names by an address.

A ``data:`` address contains the file itself. Other addresses are fetched if the server's settings allow their prefix,
and only from public IP addresses: the host name is resolved here, and the connection goes to the very IP address that
was checked. So no client can make the server send requests to machines that only the server reaches.
"""

from __future__ import annotations

import base64
import binascii
import math
import socket
from collections.abc import Callable, Iterable
from contextlib import aclosing
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urljoin, urlsplit

import httpcore
import trio
from attrs import define

from ..core.budget import Account, unlimited
from ..core.errors import RequestTooLarge
from .manners.addresses import is_public
from .problems import BadBody, Problem, Refusal
from .settings import ServerSettings

_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_INLINE = 1 << 18  # characters; decoding more costs more time than a thread
_PIECE = 1 << 20  # characters that are decoded at once: other threads wait meanwhile
_MOST_QUOTED = 1 << 18  # characters of data that is not base64: each becomes an object
_LONGEST_SCHEME = 32  # characters


@define(eq=False)
class Media:
    """Fetches the files that requests name by addresses.

    Args:
        settings: the allowed addresses, and the limits of size and time.
    """

    settings: ServerSettings

    async def fetch(
        self, url: str, where: str, most: int, until: float = math.inf, account: Account | None = None
    ) -> bytes:
        """Fetches the file at ``url``, whose bytes are taken by ``account``. ``where`` is the name of the member of the
        request, for errors. The fetch is given up at the time ``until``, or after `ServerSettings.url_seconds`.

        Raises:
            BadBody: ``url`` is not an address, or is a damaged ``data:`` address.
            Overloaded: there is no memory for the file.
            Refusal: the address is not allowed, or nothing could be fetched.
            RequestTooLarge: the file has more than ``most`` bytes.
        """
        account = account or unlimited()
        scheme = url[:_LONGEST_SCHEME].partition(":")[0].lower()
        if scheme == "data":
            return await decoded(url, where, _data, account)
        if scheme not in ("http", "https"):
            raise BadBody(f"{where}: the address begins with {scheme[:20]!r}; allowed: data:, http: and https:", where)
        seconds = self.settings.url_seconds
        with trio.CancelScope(deadline=min(until, trio.current_time() + seconds)):
            return await self._follow(url, where, most, account)
        raise _refused(where, f"all addresses of a request together may take {seconds:g} s, and this time is over")

    async def _follow(self, url: str, where: str, most: int, account: Account) -> bytes:
        network = httpcore.AsyncConnectionPool(network_backend=_CheckedNetwork(private=self.settings.private_urls))
        async with network as pool:
            for _ in range(_MOST_REDIRECTS + 1):
                self._check(url, where)
                try:
                    async with pool.stream("GET", url, headers={"user-agent": "triolet", "accept": "*/*"}) as answer:
                        if answer.status not in _REDIRECTS:
                            return await _read(answer, where, most, account)
                        url = _joined(url, _header(answer, b"location"))
                except (httpcore.ProtocolError, httpcore.NetworkError, httpcore.UnsupportedProtocol, OSError) as error:
                    raise _refused(where, str(error) or type(error).__name__) from None
        raise _refused(where, f"it has more than {_MOST_REDIRECTS} redirections")

    def _check(self, url: str, where: str) -> None:
        if not _is_plain(url) or not any(map(url.startswith, self.settings.url_prefixes)):
            allowed = ", ".join(self.settings.url_prefixes) or "data: alone"
            raise Refusal(Problem(403, f"{where}: {url[:200]} may not be fetched; allowed: {allowed}", None, where))


async def decoded(text: str, where: str, decode: Callable[[str, str], bytes], account: Account) -> bytes:
    """Returns ``decode(text, where)``, whose bytes are taken by ``account``; a long text is decoded in a thread."""
    account.take(len(text))
    return decode(text, where) if len(text) <= _INLINE else await trio.to_thread.run_sync(decode, text, where)


def from_base64(text: str, where: str, start: int = 0) -> bytes:
    """Returns the bytes that ``text`` encodes from ``start`` on, perhaps in lines.

    Raises:
        BadBody: the text is not base64.
    """
    data, piece, text = bytearray(), "", text.rstrip("\r\n")
    try:
        for begin in range(start, len(text), _PIECE):
            piece += text[begin : begin + _PIECE].replace("\n", "").replace("\r", "")
            is_last = begin + _PIECE >= len(text)
            whole = len(piece) if is_last else len(piece) // 4 * 4
            data += base64.b64decode(piece[:whole], validate=True)
            if "=" in piece[:whole] and not is_last:
                raise ValueError("its padding is not at the end")
            piece = piece[whole:]
    except (binascii.Error, ValueError) as error:
        raise BadBody(f"{where} is not base64: {error}", where) from None
    return bytes(data)


async def _read(answer: httpcore.Response, where: str, most: int, account: Account) -> bytes:
    if answer.status != 200:
        raise _refused(where, f"the answer's status was {answer.status}")
    data = bytearray()
    told = _header(answer, b"content-length")
    _check_size(int(told) if told.isdigit() else 0, where, most)
    stream: Any = answer.aiter_stream()  # a generator, though its type does not say so
    async with aclosing(stream) as parts:
        async for part in parts:
            account.take(len(part))
            data += part
            _check_size(len(data), where, most)
    return bytes(data)


def _check_size(size: int, where: str, most: int) -> None:
    if size > most:
        raise RequestTooLarge(
            f"{where}: the file has {size:,} bytes or more; allowed: up to {most:,} bytes, the rest of the limit for "
            "all files of a request"
        )


def _is_plain(url: str) -> bool:
    """True if the beginning of an address can be trusted: it has a host, no user name, and no ``..`` in its path."""
    try:
        parts, path = urlsplit(url), unquote(unquote(urlsplit(url).path))
        port = parts.port  # raises if the port is invalid
    except ValueError:
        return False
    steps = path.replace("\\", "/").split("/")
    odd = any(not "!" <= letter <= "~" for letter in url) or "\\" in url
    return not (odd or ".." in steps or "." in steps) and bool(parts.hostname) and parts.username is None and port != 0


def _joined(url: str, location: str) -> str:
    """Returns the address to which a redirection leads; the next check refuses an invalid one."""
    try:
        return urljoin(url, location)
    except ValueError:
        return location


def _header(answer: httpcore.Response, wanted: bytes) -> str:
    return next((value.decode("latin-1") for name, value in answer.headers if name.lower() == wanted), "")


def _refused(where: str, why: str) -> Refusal:
    return Refusal(Problem(422, f"{where} cannot be fetched: {why}", "address_failed", where))


def _data(url: str, where: str) -> bytes:
    comma = url.find(",", 0, _MOST_QUOTED)
    if comma < 0:
        raise BadBody(f"{where}: the data address has no comma; write data:image/png;base64,...", where)
    if url[:comma].lower().endswith(";base64"):
        return from_base64(url, where, comma + 1)
    if len(url) > _MOST_QUOTED:
        raise BadBody(
            f"{where}: the data address has {len(url):,} characters without base64; allowed: up to {_MOST_QUOTED:,}. "
            "Write a longer one as data:image/png;base64,...",
            where,
        )
    return unquote_to_bytes(url[comma + 1 :])


class _CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Connects only to public addresses, unless ``private`` addresses are allowed."""

    def __init__(self, *, private: bool) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._private = private

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore's)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        address = await self._resolve(host, port)
        return await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)

    async def _resolve(self, host: str, port: int) -> str:
        try:
            found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"the name {host} cannot be resolved ({error})") from None
        addresses = [str(one[4][0]) for one in found]
        for address in addresses:
            if not self._private and not is_public(address):
                raise httpcore.ConnectError(f"{host} is at {address}, which is not a public address")
        return addresses[0]
