"""The rules for pages of other origins: they decide whether a browser may use the server for such a page.

A server on the loopback without a key could be used by every page that a browser on this machine shows. Any page can
send a form to the server. A page can also read from the server if the page's own host name is made to resolve to
127.0.0.1 (DNS rebinding). So a request that names an origin must come from the server's own pages or from an allowed
origin, and a local server answers only to local names.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit


def origin_fault(origin: str | None, host: str | None, allowed: Collection[str]) -> str | None:
    """Returns the reason why a page of ``origin`` may not use the server, which the client calls ``host``; ``None``:
    the page may use it."""
    if origin is None or origin in allowed or "*" in allowed:
        return None
    if host is not None and _place(origin) == host.lower():
        return None
    return f"a page of the origin {origin} may not use this server; allow it by --cors-origin {origin}"


def _place(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def host_fault(host: str | None) -> str | None:
    """Returns the reason why a server on the loopback does not answer to the name ``host``; ``None``: it answers."""
    name = _name(host or "")
    if name is None or name == "localhost" or name.endswith(".localhost") or _is_address(name):
        return None
    return f"this server is for this machine, and does not answer to the name {name}; use 127.0.0.1 or localhost"


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
