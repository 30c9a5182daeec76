"""Fixtures of the tests of ``triolet bench``."""

import sys

import pytest

from triolet.__main__ import main


@pytest.fixture
def run(monkeypatch):
    """``run(*words)``: the exit status of ``triolet bench`` with these."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["triolet", "bench", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    return command
