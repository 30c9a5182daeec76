"""Addresses that a request may name: only those of the public internet are asked, whatever they are called."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio
from attrs import define, field

from triolet.server.manners.addresses import is_public
from triolet.server.media import Media
from triolet.server.problems import Refusal
from triolet.server.settings import ServerSettings

PUBLIC = (
    "93.184.215.14", "1.1.1.1", "192.88.98.255", "192.0.1.0", "223.255.255.255",
    "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "2001:200::1", "2001:4860:4860::8888", "3ffe:ffff::1",
    "64:ff9b::5db8:d70e", "::ffff:93.184.215.14", "2606:4700::5efe:5db8:d70e",
)  # fmt: skip

SPECIAL = (
    "192.0.0.192", "192.88.99.1", "64:ff9b:1::1", "::ffff:0:93.184.215.14", "3fff::1", "5f00::1", "0.0.0.0", "0.1.2.3",
    "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.31.255.255", "192.0.0.1",
    "192.0.0.9", "192.0.2.1", "192.31.196.1", "192.52.193.1", "192.168.1.1", "192.175.48.1", "198.19.255.255",
    "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1",
    "::127.0.0.1", "::93.184.215.14", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "100::1", "100:0:0:1::1", "2001::1", "2001:0:5db8:d70e::1", "2001:2::1",
    "2001:3::1", "2001:4:112::1", "2001:10::1", "2001:20::1", "2001:30::1", "2001:db8::1", "2002:7f00:1::",
    "2002:5db8:d70e::1", "2606:4700::5efe:7f00:1", "2606:4700::200:5efe:a9fe:a9fe", "2620:4f:8000::1", "4000::1",
    "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo", "2606:4700::1%1", "fec0::1", "ff02::1", "nonsense",
)  # fmt: skip

SPELLINGS = (
    "2130706433", "0x7f000001", "0X7F.1", "017700000001", "127.1", "127.0.1", "0177.0.0.1", "0", "0x0", "169.16689662",
    "0xa9fea9fe", "0251.0376.0251.0376", "2852039166", "3232235777", "10.1", "[::1]", "[::ffff:7f00:1]",
    "[0:0:0:0:0:ffff:127.0.0.1]", "[::ffff:0:7f00:1]", "[64:ff9b::169.254.169.254]", "[fe80::1%25lo]", "[fe80::1%lo]",
    "[FD00:EC2::254]", "127.0.0.1.", "localhost.",
)  # fmt: skip
"""Hosts as an address may have them: of the system's resolver, which reads numbers as `inet_aton` does."""

ANSWERS = (
    ("192.0.0.192",),
    ("93.184.215.14", "127.0.0.1"),
    ("127.0.0.1", "93.184.215.14"),
    ("93.184.215.14", "2606:4700::1", "fe80::1%1"),
    ("2606:4700::1", "::ffff:10.0.0.1"),
    ("93.184.215.14", "1.1.1.1", "192.0.0.192"),
)


class Unreachable(OSError):
    """Where a connection would have been begun."""


@define
class Sockets(trio.abc.SocketFactory):
    """Opens none: ``opened`` has those that were asked for."""

    opened: list[tuple[Any, ...]] = field(factory=list)

    def socket(self, *args: Any) -> trio.socket.SocketType:
        self.opened.append(args)
        raise Unreachable("this network is a list")


@define
class Resolver(trio.abc.HostnameResolver):
    """Every name is at ``answers``."""

    answers: tuple[str, ...]
    asked: list[bytes] = field(factory=list)

    async def getaddrinfo(self, host: Any, port: Any, *_: Any) -> Any:
        self.asked.append(host)
        await trio.lowlevel.checkpoint()
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 1, 6, "", (one, port)) for one in self.answers]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise AssertionError("nobody asks for names of addresses")


def played(*answers: str) -> tuple[Resolver, Sockets]:
    """From now on names are at ``answers``, and nothing is connected, in this run of trio."""
    resolver, sockets = Resolver(answers), Sockets()
    trio.socket.set_custom_hostname_resolver(resolver)
    trio.socket.set_custom_socket_factory(sockets)
    return resolver, sockets


async def fetched(host: str, **settings: Any) -> str:
    """Why nothing was fetched from ``host``."""
    url = f"http://{host}/picture"
    with pytest.raises(Refusal) as raised:
        await Media(ServerSettings(url_prefixes=(url,), **settings)).fetch(url, "here", 1_000)
    return str(raised.value)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", [*SPECIAL, ""])
def test_an_address_for_a_special_purpose_is_not_public(address: str) -> None:
    assert not is_public(address)


async def test_a_public_address_is_asked() -> None:
    """Else the tests below would show nothing."""
    resolver, sockets = played(PUBLIC[0])
    assert "not a public address" not in await fetched("pictures.example")
    assert resolver.asked == [b"pictures.example"]
    assert len(sockets.opened) == 1


@pytest.mark.parametrize("answers", ANSWERS, ids="+".join)
async def test_nothing_is_sent_to_a_name_with_an_address_that_is_not_public(answers: tuple[str, ...]) -> None:
    """One such address among public ones is enough: nobody says which of them is asked."""
    resolver, sockets = played(*answers)
    assert "which is not a public address" in await fetched("pictures.example")
    assert resolver.asked == [b"pictures.example"]
    assert sockets.opened == []


@pytest.mark.parametrize("host", SPELLINGS)
async def test_nothing_is_sent_to_a_special_address_however_it_is_spelled(host: str) -> None:
    """Numbers go to the system's resolver, names to the test's."""
    _, sockets = played("127.0.0.1")
    assert await fetched(host)
    assert sockets.opened == []


async def test_who_allows_private_addresses_gets_them() -> None:
    _, sockets = played("10.0.0.1")
    assert "not a public address" not in await fetched("pictures.example", private_urls=True)
    assert len(sockets.opened) == 1
