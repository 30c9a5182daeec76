"""Makes the pictures of the server's page anew, by ``make pictures``: a server with two models, the page in a browser,
and other clients that keep the server busy meanwhile."""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
from PIL import Image
from playwright.sync_api import expect, sync_playwright

IMAGES = Path(__file__).parents[1] / "images"
SAMPLES = Path(__file__).parents[2] / "demo" / "samples"
OWN, OTHERS = ("en-many.flac", "en-command.flac"), ("en-noisy.flac", "en-many.flac", "en-command.flac")
QUESTIONS = ("What is the capital of France?", "And what is it known for?")
BUSY_SECONDS = 60.0  # as many as the lanes show
COLOURS = 256  # of a picture, which keeps its file small
NEAR = 6  # levels: colours that differ by no more in any channel count as one, so that rare ones have a place
Colour = tuple[int, int, int]
WIDE, PHONE = {"width": 1400, "height": 780}, {"width": 390, "height": 844}


@contextmanager
def serving(models: dict[str, str]) -> Iterator[str]:
    """Runs ``triolet serve`` for the block; gives its address."""
    options = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    command = [str(Path(sys.executable).with_name("triolet")), "serve", *options, "--port", "0", "--no-access-log"]
    with subprocess.Popen([*command, "--max-model-len", "chat=2048"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None, "it was asked for"
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                if found := re.search(r"http://\S+", line):
                    threading.Thread(target=process.stderr.read, daemon=True).start()  # else the pipe fills
                    yield found[0]
                    return
            raise SystemExit("the server did not start; its last words are above")
        finally:
            process.terminate()


@contextmanager
def busy(address: str) -> Iterator[None]:
    """Sends requests of others during the block: recordings and conversations, with pauses."""
    over = threading.Event()
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)

    def repeat(ask: Callable[[int], Any], pause: float) -> None:
        for turn in range(1_000):
            if over.wait(pause):
                return
            with contextlib.suppress(openai.APIConnectionError):  # the server ends first
                ask(turn)

    def transcribe(turn: int) -> Any:
        return client.audio.transcriptions.create(model="speech", file=SAMPLES / OTHERS[turn % len(OTHERS)])

    def chat(turn: int) -> Any:
        said: Any = [{"role": "user", "content": f"Tell me {turn + 2} facts about the sea."}]
        return client.chat.completions.create(model="chat", messages=said, max_tokens=40 + 20 * (turn % 3))

    threads = [threading.Thread(target=repeat, args=args) for args in ((transcribe, 3.0), (chat, 2.0), (chat, 5.0))]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def use(page: Any) -> None:
    """Transcribes and chats as a person does."""
    page.set_input_files("#speech-file", [SAMPLES / name for name in OWN])
    expect(page.locator("#speech-list li", has_text="took")).to_have_count(len(OWN))
    page.fill("#chat-tokens", "60")
    page.fill("#chat-temperature", "0")
    for question in QUESTIONS:
        page.fill("#chat-text", question)
        page.keyboard.press("Enter")
        expect(page.locator("#chat-send")).to_have_text("Send")
        time.sleep(BUSY_SECONDS / 6)
    page.evaluate("document.activeElement.blur()")


def save(name: str, *shots: bytes) -> None:
    """Writes screenshots side by side, in few colours."""
    parts = [Image.open(BytesIO(shot)).convert("RGB") for shot in shots]
    gap = 40
    whole = Image.new("RGB", (sum(one.width + gap for one in parts) - gap, parts[0].height), "white")
    for number, one in enumerate(parts):
        whole.paste(one, (number * (one.width + gap), 0))
    path = IMAGES / f"page-{name}.png"
    found: Any = whole.getcolors(whole.width * whole.height)
    palette = Image.new("P", (1, 1))
    palette.putpalette(
        [part for colour in spread([colour for _, colour in sorted(found, reverse=True)]) for part in colour]
    )
    whole.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    sys.stdout.write(f"{path}: {path.stat().st_size // 1024} KiB\n")


def spread(colours: Sequence[Colour]) -> list[Colour]:
    """Returns up to `COLOURS` of ``colours``, the first ones that are not like one before them."""
    chosen: list[Colour] = []
    for colour in colours:
        if all(any(abs(a - b) > NEAR for a, b in zip(colour, one, strict=True)) for one in chosen):
            chosen.append(colour)
    return chosen[:COLOURS]


def take(page: Any, phone: Any) -> None:
    """Takes all pictures."""
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        time.sleep(0.5)  # until the lanes are drawn anew
        save(scheme, page.screenshot())
    page.emulate_media(color_scheme="light")
    page.click("#inside summary")
    time.sleep(0.5)
    save("inside", page.locator("#inside").screenshot())
    first = phone.screenshot()
    phone.evaluate("document.querySelector('.figures').scrollIntoView()")
    save("phone", first, phone.screenshot())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--speech", required=True, help="a model of speech: a folder, or a hub id")
    options.add_argument("--chat", required=True, help="a model that chats")
    given = options.parse_args()
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        raise SystemExit("no browser is installed; install Chromium")
    expect.set_options(timeout=180_000)
    with serving({"speech": given.speech, "chat": given.chat}) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page, phone = (
            browser.new_context(viewport=size, has_touch=size is PHONE, device_scale_factor=1.5).new_page()
            for size in (WIDE, PHONE)
        )
        for one in (page, phone):
            one.goto(address)
            expect(one.locator("#connection")).to_have_text("live")
        use(phone)  # which loads the models
        with busy(address):
            time.sleep(BUSY_SECONDS / 2)
            use(page)
            take(page, phone)
        browser.close()


if __name__ == "__main__":
    main()
