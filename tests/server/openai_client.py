"""OpenAI's client, pointed at a server of a test."""

from __future__ import annotations

from typing import Any

import openai

from .served import Served


def openai_client(service: Served, **options: Any) -> openai.OpenAI:
    """A client that asks once."""
    return openai.OpenAI(**{"base_url": f"{service.url}/v1", "api_key": "none", "max_retries": 0, **options})
