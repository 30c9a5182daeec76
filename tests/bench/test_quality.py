"""`triolet bench text --quality`: the figures are those of transformers' own distributions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from triolet.bench import quality
from triolet.models.native.library import Library
from triolet.models.native.runner import Runner

from ..checkpoints.families import make_checkpoint

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")


def distributions(folder: Path, text: str) -> tuple[list[int], torch.Tensor]:
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    return ids, logits.double().log_softmax(-1)


def test_a_model_is_judged_by_another(run, tmp_path, capsys, monkeypatch):
    """Whose distributions differ. Rows are compared in parts. Each reads the text once, the reference too."""
    monkeypatch.setattr(quality, "ROWS", 7)
    opened, plain = list[int](), Runner.open
    monkeypatch.setattr(Runner, "open", lambda *given, **told: opened.append(1) or plain(*given, **told))
    one, other = (make_checkpoint("llama", tmp_path / str(seed), seed=seed) for seed in (1, 2))
    (tmp_path / "text").write_text("a small harbour, and ships of many nations" * 2)
    words = ["--quality", tmp_path / "text", "--against", one, "--json", tmp_path / "found.json"]
    variants = ["--variant", "float32", "--variant", "int8"]
    assert run("text", "--model", str(other), *map(str, words), *variants) == 0
    assert len(opened) == 3
    reference, float32, int8 = json.loads((tmp_path / "found.json").read_text())["qualities"]
    (ids, exact), (_, found) = (distributions(each, (tmp_path / "text").read_text()) for each in (one, other))
    following = torch.tensor(ids[1:])[:, None]
    for told, each in ((reference, exact), (float32, found)):
        surprise = -each[:-1].gather(1, following).mean()
        assert told["perplexity"] == pytest.approx(float(surprise.exp()), rel=1e-4)
        assert told["same"] == float((exact.argmax(-1) == each.argmax(-1)).double().mean())
        apart = (exact.exp() * (exact - each)).sum(-1).mean()
        assert told["divergence"] == pytest.approx(float(apart), rel=1e-3, abs=1e-9)
    assert int8["divergence"] == pytest.approx(float32["divergence"], rel=0.2)
    assert int8["divergence"] != float32["divergence"]
    assert f"reference: perplexity {reference['perplexity']:.3f}" in capsys.readouterr().out


def test_what_cannot_be_judged_is_refused(run, tmp_path, capsys):
    llama, bert = (str(make_checkpoint(family, tmp_path / family)) for family in ("llama", "bert"))
    (tmp_path / "text").write_text("")
    text = str(tmp_path / "text")
    for words, status, told in (
        (("--model", bert, "--quality", text), 1, "cannot be judged; allowed: decoders with keys and values alone"),
        (("--model", llama, "--quality", text), 1, "allowed: 2 or more"),
        (("--model", llama, "--quality", "/nowhere"), 1, "/nowhere cannot be read: No such file"),
        (("--model", llama, "--against", llama), 2, "--against is for --quality, which is missing"),
    ):
        assert run("text", *words) == status
        assert told in capsys.readouterr().err
