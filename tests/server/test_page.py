"""The page at ``/`` in a browser, over a real server: what one sees and does there."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
from PIL import Image

from triolet.api.inputs.audio import load_audio
from triolet.core import events as e

from .browsing import Opened, chromium
from .served import Served, served

expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
expect.set_options(timeout=120_000)
pytestmark = [pytest.mark.browser, pytest.mark.real_time]

SENTENCE = "Please set the temperature in the cellar to eighteen degrees."
SIZES = {"wide": (1440, 900), "tablet": (820, 1100), "phone": (360, 780)}


@pytest.fixture(scope="module")
def opened(speech: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """The browser hears `speech` when it listens to the microphone."""
    spoken = tmp_path_factory.mktemp("microphone") / "spoken.wav"
    silence = np.zeros(16_000, np.float32)
    soundfile.write(spoken, np.concatenate([silence[:4_000], load_audio(speech), silence]), 16_000)
    with chromium(microphone=spoken) as opens:
        yield opens


@pytest.fixture
def page(opened: Opened, service: Served) -> Iterator[Any]:
    """The page of `service`, which is connected."""
    with opened(service.url) as page:
        expect(page.locator("#connection")).to_have_text("live")
        yield page


def tell(service: Served, model: str, *events: e.Event) -> None:
    """As if these had happened in the engine of ``model``, now."""

    def heard() -> None:
        for event in events:
            object.__setattr__(event, "time", trio.current_time())
            service.server.observers.of(model)(event)

    service.ask(heard)


# -- watching ----------------------------------------------------------------------------------------------------------


def test_a_file_gives_its_text_and_is_seen_as_a_lane_and_in_the_encoder_cache(page: Any, speech: Path) -> None:
    page.set_input_files("#speech-file", speech)
    expect(page.locator("#speech-list .text")).to_have_text(SENTENCE)
    expect(page.locator("#speech-list .state")).to_have_text(re.compile(r"took [\d.]+ m?s"))
    lane = page.locator("#requests-lanes .row.own")
    expect(lane.locator(".name")).to_have_text(speech.name)
    expect(lane.locator(".model")).to_have_text("whisper")
    expect(lane.locator(".count")).to_have_text(re.compile(r"\d+ tok"))
    expect(lane.locator(".state")).to_contain_text("finished")
    expect(page.locator("#cache-states")).to_contain_text(re.compile(r"idle\s*1 entry\s*750 KiB"))
    expect(page.locator("#figure-cache .value")).to_have_text("750 KiB")
    page.reload()
    expect(lane).to_contain_text(speech.name)  # the server tells what has ended, and the tab knows what is its own
    expect(lane).to_contain_text("finished")
    assert page.evaluate(_DRAWN, "#requests-lanes .bars") > 0


def test_each_box_offers_what_can_answer_there_and_the_words_of_engines_are_a_click_away(page: Any) -> None:
    """Also while no model is loaded."""
    assert page.locator("#speech-model option").all_text_contents() == ["whisper", "whisper_random"]
    assert page.locator("#chat-model option").all_text_contents() == ["llama", "qwen3", "qwen2_vl", "qwen2_audio"]
    expect(page.locator("#figure-slots")).to_be_hidden()
    expect(page.locator("#requests-legend")).not_to_contain_text("suspected")
    page.click("#inside summary")
    expect(page.locator("#figure-slots")).to_be_visible()
    expect(page.locator("#requests-legend")).to_contain_text("suspected")


def test_an_encoder_output_is_seen_to_its_end(service: Served, page: Any) -> None:
    """Of a model that is unloaded meanwhile, too: nothing of it is left."""
    before = page.locator("#cache-lanes .row", has_text="freed").count()
    tell(service, "qwen2_vl", e.EntryReserved("deadbeef", 3 * 2**20), e.EncodeDispatched(("deadbeef",), 1))
    row = page.locator("#cache-lanes .row", has_text="deadbeef")
    expect(row).to_contain_text("encoding")
    expect(page.locator("#cache-states")).to_contain_text(re.compile(r"encoding\s*1 entry\s*3.0 MiB"))
    tell(service, "qwen2_vl", e.EncodeDone(("deadbeef",)), e.FreeSent(("deadbeef",)))
    expect(row).to_contain_text("freeing")
    tell(service, "qwen2_vl", e.StageReached("channels closed"))
    expect(row).to_contain_text("freed")
    assert page.locator("#cache-lanes .row", has_text="freed").count() == before + 1


def test_what_began_before_the_page_was_opened_is_there(opened: Opened, service: Served) -> None:
    tell(service, "llama", e.RequestQueued("earlier/1"))
    with opened(service.url) as page:
        row = page.locator("#requests-lanes .row", has_text="earlier")
        expect(row).to_contain_text("waiting")
        tell(service, "llama", e.RequestStarted("earlier/1", 3))
        expect(row).to_contain_text("reading")
        tell(service, "llama", e.RequestEnded("earlier/1", "aborted"))
        expect(row).to_contain_text("stopped")


def test_a_failure_is_shown_with_its_text(service: Served, page: Any) -> None:
    fault = "PoisonRequest: it crashes its step every time, <b>even</b> alone"
    tell(service, "llama", e.RequestQueued("bad#0/1"), e.RequestEnded("bad#0/1", "failed", fault))
    row = page.locator("#requests-lanes .row", has_text="bad")
    expect(row.locator(".state")).to_contain_text("failed")
    expect(page.locator("#failures-list")).to_contain_text(fault)
    row.hover()
    expect(page.locator("#requests-detail")).to_contain_text(fault)
    page.click("#failures-clear")
    expect(page.locator("#failures")).to_be_hidden()


def test_lanes_are_walked_by_keys_and_those_of_a_model_that_is_not_chosen_are_not_shown(
    service: Served, page: Any
) -> None:
    tell(service, "llama", e.RequestQueued("first/1"), e.RequestEnded("first/1", "finished"))
    tell(service, "bert", e.RequestQueued("second/1"), e.RequestEnded("second/1", "finished"))
    rows = page.locator("#requests-lanes .row:not(.empty)")
    expect(rows.filter(has_text="second")).to_have_count(1)
    names = page.locator("#requests-lanes .row .name").all_text_contents()
    page.locator("#requests-lanes .row").first.focus()
    for name in names[1:3]:
        page.keyboard.press("ArrowDown")
        if name:
            expect(page.locator("#requests-detail")).to_contain_text(name)
    page.keyboard.press("Home")
    expect(page.locator("#requests-detail")).to_contain_text(names[0])
    chip = page.get_by_role("button", name="bert")
    chip.click()
    expect(chip).to_have_attribute("aria-pressed", "false")
    expect(rows.filter(has_text="second")).to_have_count(0)
    expect(rows.filter(has_text="first")).to_have_count(1)
    chip.click()
    expect(rows.filter(has_text="second")).to_have_count(1)


def test_after_the_server_has_stopped_the_page_says_so_and_finds_the_next_one(
    opened: Opened, models: dict[str, str]
) -> None:
    """What the first one had told is forgotten: its clock was another one. Its port is bound all the time, so that no
    other program gets it in between."""
    with socket.socket() as holder, ExitStack() as ending:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        first = ending.enter_context(served(models, port=port))
        with opened(first.url, allowed=("Failed to load resource", "ERR_")) as page:
            tell(first, "llama", e.RequestQueued("old/1"))
            expect(page.locator("#requests-lanes")).to_contain_text("old")
            ending.close()
            expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
            with served(models, port=port):
                expect(page.locator("#connection")).to_have_text("live")
                expect(page.locator("#requests-lanes")).not_to_contain_text("old")


# -- asking ------------------------------------------------------------------------------------------------------------


def test_a_file_is_dropped_and_a_word_plays_the_recording_from_where_it_is_said(page: Any, speech: Path) -> None:
    data = base64.b64encode(speech.read_bytes()).decode()
    dropped = page.evaluate_handle(_DROPPED, [data, "dropped.flac", "audio/flac"])
    page.dispatch_event("#speech-drop", "drop", {"dataTransfer": dropped})
    item = page.locator("#speech-list li", has_text="dropped.flac")
    expect(item.locator(".text")).to_have_text(SENTENCE)
    word = item.locator(".word", has_text="temperature")
    expect(word).to_have_attribute("title", re.compile(r"[\d.]+ to [\d.]+ s"))
    word.click()
    begin = float(word.get_attribute("data-start"))
    assert page.evaluate("document.querySelector('#speech-list audio').currentTime") >= begin
    expect(page.locator("#speech-list .word.now").first).to_be_visible()
    expect(item.get_by_role("button", name="Copy")).to_be_visible()
    with page.expect_download() as saved:
        item.get_by_role("link", name="SRT").click()
    assert saved.value.suggested_filename == "dropped.srt"
    lines = Path(saved.value.path()).read_text(encoding="utf-8").split("\n")
    assert re.fullmatch(r"00:00:0\d,\d{3} --> 00:00:0\d,\d{3}", lines[1])
    assert (lines[0], lines[2]) == ("1", SENTENCE)


def test_a_file_that_is_cut_short_says_so_beside_its_text(page: Any, speech: Path) -> None:
    data = speech.read_bytes()
    page.set_input_files("#speech-file", {"name": "cut.flac", "mimeType": "", "buffer": data[: len(data) // 2]})
    item = page.locator("#speech-list li", has_text="cut.flac")
    expect(item.locator(".state")).to_contain_text(re.compile(r"took .*, \d warning"))
    expect(item.locator(".warning").first).to_contain_text("cut short")


def test_a_file_that_is_no_audio_says_why(opened: Opened, service: Served, tmp_path: Path) -> None:
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"this is no audio")
    with opened(service.url, allowed=("415",)) as page:
        page.set_input_files("#speech-file", broken)
        expect(page.locator("#speech-list .problem")).to_contain_text("audio")
        expect(page.locator("#speech-list .state")).to_have_text("failed")
        expect(page.locator("#failures-list")).to_contain_text("audio")  # which no engine has heard of
        expect(page.locator("#figure-requests dd").nth(1)).not_to_have_text("0")
        expect(page.locator("#speech-list audio")).to_have_count(0)


def test_a_conversation_goes_on_with_what_was_said(page: Any) -> None:
    page.select_option("#chat-model", "llama")
    page.fill("#chat-tokens", "6")
    for count in (1, 2):
        page.fill("#chat-text", "Hello")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.press("Enter")
        expect(page.locator("#chat-send")).to_have_text("Send")
        expect(page.locator("#chat-log .assistant .text").nth(count - 1)).not_to_be_empty()
        body = json.loads(asked.value.post_data)
        assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"][: 2 * count - 1]
        assert (body["max_completion_tokens"], body["temperature"]) == (6, 0.7)
    page.click("#chat-clear")
    expect(page.locator("#chat-log .message")).to_have_count(0)


def wave_of(samples: int) -> bytes:
    """A file of silence."""
    file = io.BytesIO()
    soundfile.write(file, np.zeros(samples, np.float32), 16_000, format="WAV")
    return file.getvalue()


@contextmanager
def answered(opened: Opened, service: Served, text: str, *, thought: str = "", **options: Any) -> Iterator[Any]:
    """A page that asks llama, which answers with ``text``, after a ``thought``; its text is written."""
    deltas = [{"reasoning_content": one} for one in thought] + [{"content": text}]
    chunks = "".join(f"data: {json.dumps({'choices': [{'index': 0, 'delta': one}]})}\n\n" for one in deltas)
    answer = {"body": f"{chunks}data: [DONE]\n\n", "content_type": "text/event-stream"}

    def mocked(page: Any) -> None:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))

    with opened(service.url, before=mocked, **options) as page:
        page.select_option("#chat-model", "llama")
        page.fill("#chat-text", "Hello")
        yield page


def test_an_answer_is_shown_as_markdown_and_copied_as_it_was_written(opened: Opened, service: Served) -> None:
    written = "# So\n\n- **one**\n- `two`\n\n<b>no</b> [x](javascript:alert(1)) https://example.com/a."
    with answered(opened, service, written, permissions=["clipboard-read", "clipboard-write"]) as page:
        page.click("#chat-send")
        text = page.locator("#chat-log .assistant .text")
        expect(text.locator("h3")).to_have_text("So")
        expect(text.locator("li strong")).to_have_text("one")
        expect(text.locator("li code")).to_have_text("two")
        expect(text.locator("p")).to_have_text("<b>no</b> [x](javascript:alert(1)) https://example.com/a.")
        assert [one.get_attribute("href") for one in text.locator("a").all()] == ["https://example.com/a"]
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == written


def test_reasoning_is_folded_away_above_its_answer_and_goes_back_with_it(opened: Opened, service: Served) -> None:
    with answered(opened, service, "**No**", thought="<b>hm</b>") as page:
        for count in (1, 2):
            page.fill("#chat-text", "Hello")
            with page.expect_request("**/v1/chat/completions") as asked:
                page.click("#chat-send")
            expect(page.locator("#chat-log .note")).to_have_count(count)
        assert [one.get("reasoning_content") for one in asked.value.post_data_json["messages"]] == [
            None,
            "<b>hm</b>",
            None,
        ]
        expect(page.locator("#chat-log .assistant .text strong")).to_have_text(["No", "No"])
        expect(page.locator("#chat-log .thought").first).to_be_hidden()
        page.locator("#chat-log summary").first.click()
        expect(page.locator("#chat-log .thought").first).to_have_text("<b>hm</b>")
        page.reload()
        expect(page.locator("#chat-log .thought")).to_have_text(["<b>hm</b>"] * 2)


def test_what_was_said_and_transcribed_stays_over_a_reload_until_it_is_cleared(page: Any, speech: Path) -> None:
    """The conversation goes on, and its lanes have the names of the questions."""
    page.set_input_files("#speech-file", speech)
    item = page.locator("#speech-list li")
    expect(item.locator(".state")).to_contain_text("took")
    page.select_option("#chat-model", "llama")
    page.fill("#chat-tokens", "6")
    page.fill("#chat-text", "Say it again")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-log .note")).to_contain_text(re.compile(r"6 tokens \(the limit\), the first after"))
    said = page.locator("#chat-log").inner_text()
    expect(page.locator("#requests-lanes .row.own .name", has_text="Say it again")).to_have_count(1)
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    assert page.locator("#chat-log").inner_text() == said
    expect(item.locator(".text")).to_have_text(SENTENCE)
    expect(item.locator(".state")).to_contain_text("took")
    expect(item.get_by_role("link", name="SRT")).to_be_visible()
    expect(item.locator("audio")).to_have_count(0)
    page.select_option("#chat-model", "llama")
    page.fill("#chat-text", "And again")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    assert [one["role"] for one in json.loads(asked.value.post_data)["messages"]] == ["user", "assistant", "user"]
    expect(page.locator("#chat-send")).to_have_text("Send")
    page.click("#chat-clear")
    page.click("#speech-clear")
    expect(page.locator("#speech-clear")).to_be_hidden()
    page.reload()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#chat-log .message, #speech-list li")).to_have_count(0)


def test_a_question_is_there_after_a_reload_while_its_answer_is_written(opened: Opened, service: Served) -> None:
    """Its answer is called off. It can be asked again, behind what was said before."""
    with opened(service.url) as page:
        page.select_option("#chat-model", "llama")
        page.fill("#chat-tokens", "6")
        page.fill("#chat-text", "Hello")
        page.keyboard.press("Enter")
        expect(page.locator("#chat-log .note")).to_have_count(1)
        page.route("**/v1/chat/completions", lambda _: None)  # the answer is to come
        page.fill("#chat-text", "And again")
        with page.expect_request("**/v1/chat/completions"):
            page.keyboard.press("Enter")
        page.reload()
        expect(page.locator("#chat-text")).to_have_value("And again")
        expect(page.locator("#chat-log .message")).to_have_count(2)
        page.unroute("**/v1/chat/completions")
        page.select_option("#chat-model", "llama")
        with page.expect_request("**/v1/chat/completions") as asked:
            page.click("#chat-send")
        assert [one["role"] for one in json.loads(asked.value.post_data)["messages"]] == ["user", "assistant", "user"]
        expect(page.locator("#chat-log .note")).to_have_count(2)


FILL = """() => {
  let [text, size] = ["", 2 ** 22];
  while (size > 300) {
    try {
      sessionStorage.setItem("rest", text + "a".repeat(size));
      text += "a".repeat(size);
    } catch {
      size /= 2;
    }
  }
  sessionStorage.setItem("rest", text.slice(300));
}"""
"""Leaves room for a few hundred characters, of the five million that a browser keeps for a tab."""


def test_what_is_too_much_for_the_browser_costs_the_oldest(opened: Opened, service: Served) -> None:
    """All of the conversation was gone after a reload."""
    with answered(opened, service, "half of") as page:
        for count, question in enumerate(("first " * 100, "second" * 100), 1):
            page.fill("#chat-text", question)
            page.click("#chat-send")
            expect(page.locator("#chat-log .note")).to_have_count(count)
            page.evaluate(FILL)
        page.reload()
        expect(page.locator("#chat-log .note")).to_have_count(1)
        expect(page.locator("#chat-log .user .text")).to_have_text("second" * 100)


def test_an_answer_that_is_cut_off_has_no_count(opened: Opened, service: Served) -> None:
    with answered(opened, service, "half of") as page:
        page.click("#chat-send")
        expect(page.locator("#chat-log .note")).to_have_text(re.compile(r"^unfinished, the first .* after [\d.]+ m?s"))


def test_transcripts_have_the_height_of_a_page_without_chat(opened: Opened, models: dict[str, str]) -> None:
    with served({"whisper": models["whisper"]}) as service, opened(service.url) as page:
        expect(page.locator("#chat")).to_be_hidden()
        silent = {"name": "silent.wav", "mimeType": "audio/wav", "buffer": wave_of(16_000)}
        page.set_input_files("#speech-file", [silent] * 12)
        expect(page.locator("#speech-list li", has_text="took")).to_have_count(12)
        assert page.evaluate("document.querySelector('#speech-list').clientHeight") > 600
        assert page.evaluate("document.querySelector('.ask').getBoundingClientRect().bottom") <= 900


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (1024, 768), (390, 844)])
def test_the_place_to_write_stays_in_view_however_long_the_answer_is(
    opened: Opened, service: Served, width: int, height: int
) -> None:
    with answered(opened, service, "a line\n\n" * 200, viewport={"width": width, "height": height}) as page:
        silent = {"name": "silent.wav", "mimeType": "audio/wav", "buffer": wave_of(16_000)}
        page.click("#chat-send")
        expect(page.locator("#chat-log .note")).to_be_visible()
        page.set_input_files("#speech-file", [silent] * 4)  # which makes the conversation lower
        expect(page.locator("#speech-list li", has_text="took")).to_have_count(4)
        expect(page.locator("#chat-send")).to_be_in_viewport(ratio=1)
        expect(page.locator("#chat-text")).to_be_in_viewport(ratio=1)
        assert page.evaluate("document.querySelector('#chat-log').clientHeight") <= height * 0.56
        page.wait_for_function(_END_IS_SEEN)
        page.evaluate(_SCROLL_AND_LOWER)
        page.wait_for_function(_END_IS_SEEN)


def test_images_are_sent_where_the_model_reads_them(page: Any, tmp_path: Path) -> None:
    Image.new("RGB", (56, 56), "red").save(tmp_path / "red.png")
    page.fill("#chat-tokens", "4")
    page.select_option("#chat-model", "qwen2_vl")
    page.fill("#chat-text", "Load, please")  # what a model can do is known when it is loaded
    page.keyboard.press("Enter")
    expect(page.locator("#chat-images-pick")).to_be_visible()
    expect(page.locator("#chat-send")).to_have_text("Send")
    page.set_input_files("#chat-file", tmp_path / "red.png")
    expect(page.locator("#chat-images .thumb")).to_have_count(1)
    page.fill("#chat-text", "What is it?")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-log .user img")).to_have_count(1)
    expect(page.locator("#chat-log .assistant .text").nth(1)).not_to_be_empty()
    expect(page.locator("#chat-problem")).to_be_hidden()


def test_a_chat_that_is_refused_says_why_and_can_be_asked_again(opened: Opened, service: Served) -> None:
    with opened(service.url, allowed=("400", "413")) as page:
        page.select_option("#chat-model", "llama")
        page.fill("#chat-text", "many words " * 2_000)
        page.click("#chat-send")
        expect(page.locator("#chat-problem")).to_contain_text("tokens")
        expect(page.locator("#chat-send")).to_have_text("Send")
        expect(page.locator("#chat-log .message")).to_have_count(0)
        expect(page.locator("#chat-text")).to_have_value(re.compile("many words"))


def test_a_key_is_asked_for_and_kept_for_this_tab(opened: Opened, models: dict[str, str]) -> None:
    """And a box for which the server has no model is not shown."""
    with served({"whisper": models["whisper"]}, api_keys=["sesame"]) as service:
        with opened(service.url, allowed=("401",)) as page:
            expect(page.locator("#key-dialog")).to_be_visible()
            page.keyboard.press("Escape")
            page.set_input_files("#speech-file", [{"name": "a.wav", "mimeType": "audio/wav", "buffer": wave_of(9)}])
            expect(page.locator("#speech-problem")).to_contain_text("asks for an API key")
            page.click("#key-open")
            page.fill("#key-field", "wrong")
            page.keyboard.press("Enter")
            expect(page.locator("#key-fault")).to_contain_text("does not know this key")
            page.fill("#key-field", "sesame")
            page.keyboard.press("Enter")
            expect(page.locator("#connection")).to_have_text("live")
            page.reload()
            expect(page.locator("#connection")).to_have_text("live")
            expect(page.locator("#chat")).to_be_hidden()
            expect(page.locator("#speech")).to_be_visible()
            assert page.evaluate("Object.keys(localStorage)") == []
            assert "sesame" not in page.content()


# -- the microphone ----------------------------------------------------------------------------------------------------


def test_what_is_spoken_comes_as_text(page: Any) -> None:
    page.click("#speech-microphone")
    expect(page.locator("#speech-microphone")).to_have_text("Stop")
    expect(page.locator("#speech-list .text")).to_contain_text("temperature in the cellar")
    expect(page.locator("#requests-lanes .row.own", has_text="Microphone")).to_have_count(1)
    page.click("#speech-microphone")
    expect(page.locator("#speech-microphone")).to_have_text("Speak")
    expect(page.locator("#speech-list .state")).to_have_text("")
    expect(page.locator("#speech-problem")).to_be_hidden()


def test_the_microphone_speaks_as_openais_clients_do_and_tells_errors(opened: Opened, service: Served) -> None:
    sent: list[dict[str, Any]] = []

    def answer(talk: Any) -> None:
        def take(text: str) -> None:
            sent.append(json.loads(text))
            if len(sent) == 2:
                item = {"item_id": "i", "content_index": 0}
                kind = "conversation.item.input_audio_transcription"
                talk.send(json.dumps({"type": f"{kind}.delta", **item, "delta": "so"}))
                talk.send(json.dumps({"type": f"{kind}.delta", **item, "delta": " far"}))
                talk.send(json.dumps({"type": "triolet.provisional", "item_id": "i", "text": " perhaps"}))
                talk.send(json.dumps({"type": "error", "error": {"message": "the line is bad"}}))

        talk.on_message(take)

    with opened(service.url, before=lambda page: page.route_web_socket(re.compile("/v1/realtime"), answer)) as page:
        expect(page.locator("#connection")).to_have_text("live")
        page.click("#speech-microphone")
        expect(page.locator("#speech-list .text")).to_contain_text("so far perhaps")
        expect(page.locator("#speech-list .running")).to_have_text(" perhaps")
        expect(page.locator("#speech-problem")).to_have_text("the line is bad")
    first, second, *_ = sent
    assert first["type"] == "session.update"
    assert first["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 24_000}
    assert second["type"] == "input_audio_buffer.append"
    assert len(base64.b64decode(second["audio"])) == 2 * 2_400


# -- how it looks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "scheme"), [("wide", "dark"), ("tablet", "light"), ("phone", "light"), ("phone", "dark")]
)
def test_nothing_is_cut_off_or_lies_on_something_else(opened: Opened, service: Served, size: str, scheme: str) -> None:
    """With long names, many requests, and failures; in the dark texts are light."""
    width, height = SIZES[size]
    long = "a-very-long-name-of-a-request-that-somebody-chose-for-reasons-of-their-own"
    names = [f"{long}-{number}/1" for number in range(12)]
    look = {"viewport": {"width": width, "height": height}, "color_scheme": scheme}
    with opened(service.url, allowed=("415",), **look) as page:
        expect(page.locator("#connection")).to_have_text("live")
        broken = {"name": f"{long}.wav", "mimeType": "audio/wav", "buffer": b"this is no audio"}
        page.set_input_files("#speech-file", broken)
        expect(page.locator("#speech-list .problem")).to_contain_text("audio")
        tell(service, "llama", *(e.RequestQueued(name) for name in names))
        tell(service, "llama", e.RequestEnded(names[0], "failed", f"PoisonRequest: {long * 3}"))
        expect(page.locator("#failures-list")).to_contain_text("Poison")
        expect(page.locator("#requests-lanes .row.active")).to_have_count(11)
        page.click("#inside summary")
        assert page.evaluate(_TOO_WIDE) == []
        assert page.evaluate(_OVERLAPS) == []
        light = page.evaluate("getComputedStyle(document.body).color.match(/[0-9]+/g).every((part) => part > 128)")
        assert light == (scheme == "dark")
        tell(service, "llama", *(e.RequestEnded(name, "finished") for name in names[1:]))


def test_who_wants_less_motion_gets_a_picture_a_second(opened: Opened, service: Served) -> None:
    with opened(service.url, reduced_motion="reduce") as page:
        expect(page.locator("#connection")).to_have_text("live")
        assert page.evaluate(_FRAMES) <= 3


_DRAWN = """
(place) => {
  const canvas = document.querySelector(place);
  return canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.filter((one) => one > 0).length;
}
"""

_END_IS_SEEN = """
() => {
  const log = document.querySelector("#chat-log");
  return Math.round(log.scrollHeight - log.scrollTop - log.clientHeight) === 0;
}
"""

# both at once: that it was scrolled is told when it is lower, and before that is
_SCROLL_AND_LOWER = """
() => {
  const log = document.querySelector("#chat-log");
  log.scrollTop -= 1;
  log.style.maxHeight = "100px";
}
"""

_DROPPED = """
([data, name, type]) => {
  const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  return transfer;
}
"""

# how often the lanes are drawn in a second and a half
_FRAMES = """
() => new Promise((resolve) => {
  let count = 0;
  const canvas = document.querySelector("#requests-lanes .bars").getContext("2d");
  const wipe = canvas.clearRect.bind(canvas);
  canvas.clearRect = (...box) => { count += 1; wipe(...box); };
  setTimeout(() => resolve(count), 1500);
})
"""

# what is wider than its place, but for texts that are cut off on purpose, and models, which a phone shows in a row
_TOO_WIDE = """
() => [...document.querySelectorAll("html, body *")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 1 && !one.matches(".models"))
  .filter((one) => getComputedStyle(one).textOverflow !== "ellipsis" && getComputedStyle(one).display !== "inline")
  .map((one) => `${one.tagName} ${one.id} ${one.className}`)
"""

# texts of different elements that are drawn on each other, by more than rounding
_OVERLAPS = """
() => {
  const boxes = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || !parent.checkVisibility()) continue;
    if (["SCRIPT", "STYLE", "OPTION"].includes(parent.tagName)) continue;
    if (parent.closest(".thin .row, .skip, dialog")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const shown = shownPart(parent);
    for (const box of range.getClientRects()) {
      const [left, top] = [Math.max(box.left, shown.left), Math.max(box.top, shown.top)];
      const [right, bottom] = [Math.min(box.right, shown.right), Math.min(box.bottom, shown.bottom)];
      if (right - left <= 1 || bottom - top <= 1) continue;
      boxes.push({ node, text: node.data.trim().slice(0, 40), left, top, right, bottom });
    }
  }
  function shownPart(element) {
    let [left, top, right, bottom] = [-Infinity, -Infinity, Infinity, Infinity];
    for (let one = element; one; one = one.parentElement) {
      if (getComputedStyle(one).overflowX === "visible") continue;
      const box = one.getBoundingClientRect();
      [left, top] = [Math.max(left, box.left), Math.max(top, box.top)];
      [right, bottom] = [Math.min(right, box.right), Math.min(bottom, box.bottom)];
    }
    return { left, top, right, bottom };
  }
  const found = [];
  boxes.forEach((one, index) => boxes.slice(index + 1).forEach((other) => {
    if (one.node === other.node) return;
    const wide = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const high = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    if (wide > 2 && high > 4) found.push(`${one.text} | ${other.text}`);
  }));
  return found;
}
"""
