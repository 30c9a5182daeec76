"""Addresses of the public internet, the only ones that a client may make the server fetch from.

The tables are those of IANA, as of 2026: the special-purpose registries of IPv4 and IPv6 (RFC 6890, 8190), the space of
multicast (RFC 5771), and the space of IPv6, where only 2000::/3 is public (RFC 4291). The tables of Python's
``ipaddress`` are older. Some special addresses are global by the registries, such as anycast to a nearby relay. No
files lie there, and they are not public here.
"""

from __future__ import annotations

import ipaddress

_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        (
            "0.0.0.0/8",  # "this network", RFC 791
            "10.0.0.0/8",  # private use, RFC 1918
            "100.64.0.0/10",  # shared by carriers, RFC 6598
            "127.0.0.0/8",  # loopback, RFC 1122
            "169.254.0.0/16",  # link-local, RFC 3927; the metadata of clouds
            "172.16.0.0/12",  # private use, RFC 1918
            "192.0.0.0/24",  # protocol assignments, RFC 6890; 192.0.0.192 is a cloud's metadata
            "192.0.2.0/24",  # documentation, RFC 5737
            "192.31.196.0/24",  # AS112, RFC 7535
            "192.52.193.0/24",  # AMT relays, RFC 7450
            "192.88.99.0/24",  # 6to4 relays, deprecated by RFC 7526; 6a44 relays, RFC 6751
            "192.168.0.0/16",  # private use, RFC 1918
            "192.175.48.0/24",  # AS112, RFC 7534
            "198.18.0.0/15",  # benchmarks, RFC 2544
            "198.51.100.0/24",  # documentation, RFC 5737
            "203.0.113.0/24",  # documentation, RFC 5737
            "224.0.0.0/4",  # multicast, RFC 5771
            "240.0.0.0/4",  # reserved, RFC 1112; limited broadcast, RFC 8190
            "2001::/23",  # protocol assignments, RFC 2928: Teredo, benchmarks, AMT, AS112, ORCHID, DRIP
            "2001:db8::/32",  # documentation, RFC 3849
            "2002::/16",  # 6to4, RFC 3056, deprecated by RFC 7526
            "2620:4f:8000::/48",  # AS112, RFC 7534
            "3fff::/20",  # documentation, RFC 9637
        ),
    )
)
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")  # an IPv4 address in an API of IPv6, RFC 4291
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address in a network of IPv6 alone, RFC 6052
_ISATAP = frozenset({0x00005EFE, 0x02005EFE})  # before an IPv4 address, in the last 64 bits, RFC 5214


def is_public(address: str) -> bool:
    """True if ``address``, in the form that ``getaddrinfo`` returns, belongs to the public internet.

    Some IPv6 addresses contain an IPv4 address and are judged by it: mapped ones and NAT64 with the well-known prefix,
    which systems use for the public internet, and ISATAP, where a system would send to the IPv4 address. All other
    transition addresses are out of use and always refused: 6to4, Teredo, IPv4-compatible, translated by SIIT
    (``::ffff:0:a.b.c.d``), and NAT64 with the prefix for local use. An address with a zone belongs to a single link,
    and is refused.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv4Address):
        return _is_ordinary(found)
    if found.scope_id is not None:
        return False
    inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    if found in _MAPPED or found in _NAT64:
        return _is_ordinary(inner)
    if found not in _PUBLIC_IPV6 or not _is_ordinary(found):
        return False
    return (int(found) >> 32) & 0xFFFFFFFF not in _ISATAP or _is_ordinary(inner)


def _is_ordinary(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    return not any(address in network for network in _SPECIAL)
