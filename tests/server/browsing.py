"""A browser for tests of the page: Chromium, by playwright. Where there is none, the tests are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
WIDE = {"width": 1440, "height": 900}
Opened = Callable[..., AbstractContextManager[Any]]

_OBSERVE = """
window.violations = [];
addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) => {
  violations.push(`${violatedDirective}: ${blockedURI}`);
});
"""


@contextmanager
def chromium(microphone: Path | None = None) -> Iterator[Opened]:
    """Opens pages: ``with opened(url) as page``. At the end of that block nothing must have gone wrong in the page: no
    error in its console, and nothing that its policy forbids. There is one such browser at a time.

    Args:
        microphone: what the microphone hears, a file.
    """
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip(f"no browser is installed; any of: {', '.join(PROGRAMS)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=_arguments(microphone))

        @contextmanager
        def opened(url: str, *, allowed: tuple[str, ...] = (), before: Any = None, **options: Any) -> Iterator[Any]:
            context = browser.new_context(**{"viewport": WIDE, **options})
            try:
                page = context.new_page()
                faults = _faults_of(page, allowed)
                if before is not None:
                    before(page)
                page.goto(url)
                yield page
                assert faults == []
                assert page.evaluate("violations") == []
            finally:
                context.close()

        try:
            yield opened
        finally:
            browser.close()


def _arguments(microphone: Path | None) -> list[str]:
    own = ["--no-sandbox"]  # nothing but our own page is opened, and containers have none
    if microphone is not None:
        own += ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        own.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    return own


def _faults_of(page: Any, allowed: tuple[str, ...]) -> list[str]:
    """What goes wrong in ``page`` from now on, but for messages that have one of ``allowed`` in them."""
    faults: list[str] = []

    def tell(text: str) -> None:
        if not any(one in text for one in allowed):
            faults.append(text)

    page.add_init_script(_OBSERVE)
    page.on("console", lambda message: tell(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: tell(str(error)))
    return faults
