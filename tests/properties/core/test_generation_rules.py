"""The rules of a checkpoint's generation_config, as those of a request."""

from __future__ import annotations

from triolet.core.model import GenerationRules
from triolet.core.request import LogitRules


def test_generation_rules_speak_of_generated_tokens():
    rules = GenerationRules(forced_first=3, forced_last=4, no_repeat_ngram=2, min_length=6, min_new_tokens=1)
    found = rules.of(LogitRules(suppress=(9,)), prompt_length=1, max_tokens=8)
    assert found == LogitRules(suppress=(9,), forced=((7, 4), (0, 3)), no_repeat_ngram=2, min_tokens=5)
    assert rules.of(LogitRules(), prompt_length=7, max_tokens=8).forced == ((7, 4),), "the prompt says how it begins"
    assert rules.of(LogitRules(), prompt_length=7, max_tokens=8).min_tokens == 1
