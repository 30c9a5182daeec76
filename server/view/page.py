"""The page at ``/``: one HTML file, put together from the files in ``page/``.

The scripts there are modules that import each other, for editors and for tests. Here their imports and exports are
removed, and they are joined into one module, each behind those that it imports. The page's policy allows only this
script and this style, by their hashes, and nothing from elsewhere.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from attrs import frozen

HEADERS = {
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(self)",
}

_IMPORTED = re.compile(r'^import [^;]*? from "\./(.*?)";', re.MULTILINE)
_IMPORT = re.compile(r"^import .*?;\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


@frozen
class HtmlPage:
    """The page and its policy.

    Args:
        html: the whole page.
        policy: its Content-Security-Policy.
    """

    html: str
    policy: str


def read_page() -> HtmlPage:
    """Reads the page from its files."""
    style = _read("page.css")
    script = "\n".join(map(plain, scripts().values()))
    html = _read("page.html").replace("/* style */", style).replace("/* script */", script)
    return HtmlPage(html, policy_of(style, script))


def scripts() -> dict[str, str]:
    """Returns the text of each script by its name, behind those that it imports."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        text = _read(name)
        for imported in _IMPORTED.findall(text):
            if imported not in found:
                add(imported)
        found[name] = text

    add("main.js")
    return found


def plain(script: str) -> str:
    """Returns the text of a module without the imports and exports."""
    return _EXPORT.sub("", _IMPORT.sub("", script))


def _read(name: str) -> str:
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def policy_of(style: str, script: str | None = None) -> str:
    """Returns the policy of a page that has this style and this script alone."""
    allowed = {
        "default-src": "'none'",
        "script-src": "'none'"
        if script is None
        else f"{_hash(script)} blob:",  # for the microphone's worklet, whose text is in the script
        "style-src": _hash(style),
        "connect-src": "'self'",
        "img-src": "data: blob:",
        "media-src": "blob:",  # for the recordings that the user chose
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {sources}" for name, sources in allowed.items())


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
