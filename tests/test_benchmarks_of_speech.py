"""What benchmarks/speech.py counts, and what benchmarks/recordings.py promises of its files."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jiwer
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROGRAMS = ("flite", "festival", "sox", "Rscript")
WORDS = st.lists(st.sampled_from("abcd"), max_size=12)

speech = SimpleNamespace(**runpy.run_path(str(BENCHMARKS / "speech.py")))


@given(true=WORDS.filter(bool), heard=WORDS)
def test_the_errors_are_as_many_as_jiwers_and_every_word_has_one_place(true, heard):
    pairs = speech.align(true, heard)
    wrong = sum(not pair.right for pair in pairs)
    assert wrong / len(true) == pytest.approx(jiwer.wer(" ".join(true), " ".join(heard)))
    assert [pair.true for pair in pairs if pair.true is not None] == list(range(len(true)))
    assert [pair.heard for pair in pairs if pair.heard is not None] == list(range(len(heard)))
    assert all(true[pair.true] == heard[pair.heard] for pair in pairs if pair.right)


@pytest.fixture
def recording(tmp_path):
    """Two seconds of which the words and times are known."""
    words = [("Mr.", 0.1, 0.4), ("Bennet,", 0.4, 0.8), ("don't", 1.0, 1.3), ("go.", 1.3, 1.6)]
    soundfile.write(tmp_path / "said.wav", np.zeros(32_000), 16_000)
    (tmp_path / "said.txt").write_text(" ".join(word for word, _, _ in words), encoding="utf-8")
    rows = [{"word": word, "start": start, "end": end} for word, start, end in words]
    (tmp_path / "said.json").write_text(json.dumps({"seconds": 2.0, "words": rows}), encoding="utf-8")
    (found,) = speech.recordings(tmp_path, ())
    return found


def heard(*words):
    found = tuple(speech.Word(*word) for word in words)
    return speech.Heard(text="".join(word.text for word in found), seconds=0.5, words=found)


def test_word_times_are_compared_where_the_word_is_right(recording):
    """Through the normalizer: "Mr." is "mister" on both sides, and of "don't" both halves have its times."""
    verdict = speech.judge(
        recording, heard((" mister", 0.15, 0.4), (" Bennett", 0.4, 0.8), (" do not", 1.0, 1.5), (" go", 1.5, 1.6))
    )
    assert (verdict.words, verdict.substituted, verdict.inserted, verdict.deleted) == (5, 1, 0, 0)
    assert verdict.starts == pytest.approx((0.05, 0.0, 0.0, 0.2))
    assert verdict.ends == pytest.approx((0.0, 0.2, 0.2, 0.0))


def test_a_difference_is_shown_with_its_place_in_the_audio(recording, capsys):
    speech.show("ours", recording, heard((" Mr.", 0, 1), (" Bennet", 0, 1), (" will", 0, 1), (" go", 0, 1)))
    assert capsys.readouterr().out.splitlines()[-1] == "    1.0 s  mister bennet {do not > will} go"


def test_what_was_saved_is_judged_like_what_was_heard(recording):
    answers = {"said": heard((" Mr.", 0.1, 0.4), (" Bennet", 0.4, 0.8))}
    assert speech.loaded(speech.dumped(answers)) == answers


def test_a_claim_fails_on_one_worse_recording_or_on_a_word_in_silence():
    def verdict(words, substituted, inserted=0):
        return speech.Verdict(
            words=words, substituted=substituted, inserted=inserted, deleted=0, audio=60.0, seconds=1.0
        )

    ours = {"a": verdict(100, 1), "b": verdict(100, 5), "empty": verdict(0, 0, inserted=1)}
    theirs = {"a": verdict(100, 4), "b": verdict(100, 4), "empty": verdict(0, 0, inserted=9)}
    assert [holds for holds, _ in speech.claims({"ours": ours, "theirs": theirs})] == [False, False, True]
    assert [holds for holds, _ in speech.claims({"theirs": theirs, "ours": ours})] == [False, False, False]


@pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"speaks by {', '.join(PROGRAMS)}; see recordings.py")
def test_the_same_seed_speaks_the_same_recording_and_words_lie_in_it_in_order(tmp_path, monkeypatch):
    for name in ("first", "again"):
        options = ["--only", "dialogue", "--minutes", "0.1"]
        monkeypatch.setattr(sys, "argv", ["recordings.py", str(tmp_path / name), *options])
        with pytest.raises(SystemExit, match="0"):
            runpy.run_path(str(BENCHMARKS / "recordings.py"), run_name="__main__")
    files = [sorted((tmp_path / name).iterdir()) for name in ("first", "again")]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]
    table = json.loads((tmp_path / "first" / "dialogue.json").read_text(encoding="utf-8"))
    assert " ".join(word["word"] for word in table["words"]) == files[0][1].read_text(encoding="utf-8").strip()
    times = [time for word in table["words"] for time in (word["start"], word["end"])]
    assert 0 < times[0] < times[-1] < table["seconds"] == soundfile.info(files[0][2]).duration
    assert times == sorted(times)
