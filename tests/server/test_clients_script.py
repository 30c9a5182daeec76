"""`benchmarks/clients.py` over a server, with OpenAI's client, which the tests have anyway."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .served import PATIENCE, Served

pytestmark = pytest.mark.real_time

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "clients.py"


def run(service: Served, tools: str) -> subprocess.CompletedProcess[str]:
    """The script, with a model that is to call a tool."""
    models = {"speech": "whisper", "chat": "llama", "tools": tools, "vectors": "bert", "rerank": "bert"}
    named = [part for kind, model in models.items() for part in (f"--{kind}", model)]
    command = [sys.executable, str(SCRIPT), service.url, *named]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)


def test_the_script_says_of_each_call_of_a_client_that_it_works(service: Served) -> None:
    ran = run(service, "qwen3")
    rows = re.findall(r"^\| openai \| \d[\d.]* \| (.*?) \| (.*) \|$", ran.stdout, re.MULTILINE)
    assert {call for call, _ in rows} >= {"transcription", "chat", "chat, streamed", "structured", "tool", "vectors"}
    assert {came for _, came in rows} == {"works"}
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_script_says_what_does_not_work(service: Served) -> None:
    ran = run(service, "llama")
    assert ran.returncode == 1
    assert re.search(r"\| tool \| BadRequestError: .*does not read them", ran.stdout)
