from __future__ import annotations

import openai

from .served import Served


def client(service: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0)


def test_transcribes(service: Served, speech) -> None:
    told = client(service).audio.transcriptions.create(model="whisper", file=speech)
    assert told.text == "Please set the temperature in the cellar to eighteen degrees."
    assert service.ask(lambda: len(service.server.exchanges)) == 0


def test_talks(service: Served) -> None:
    answer = client(service).chat.completions.create(
        model="llama", messages=[{"role": "user", "content": "hi"}], max_tokens=4, seed=1
    )
    assert answer.usage.completion_tokens == 4
