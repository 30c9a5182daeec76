"""OpenAI's client, pointed at a server of a test."""

from __future__ import annotations

from typing import Any

import openai

from .served import PATIENCE, Served

PATIENT_SOCKET = {"open_timeout": PATIENCE, "ping_interval": None, "close_timeout": PATIENCE}  # of websockets


def openai_client(service: Served, **options: Any) -> openai.OpenAI:
    """A client that asks once, and waits for long. It reads no certificates, which takes longer than an answer."""
    plain = openai.DefaultHttpxClient(verify=False)
    patient = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, "http_client": plain}
    return openai.OpenAI(**{"base_url": f"{service.url}/v1", **patient, **options})
