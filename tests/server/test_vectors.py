"""Rerankers and classifiers over HTTP: what the engine says, and in which order."""

from __future__ import annotations

import itertools
import json
import math
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from triolet.server.endpoints import vectors
from triolet.server.schemas.vectors import PromptUsage, RerankRequest

from ..checkpoints.families import make_checkpoint
from .served import Served, served
from .test_events import changes, watching

pytestmark = pytest.mark.real_time

DOCUMENTS = ["the cat", "a dog barked", "on a mat"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made: dict[str, Path] = {
        name: tmp_path_factory.mktemp(name) for name in ("bert_reranker", "bert_classifier", "bert")
    }
    for name, folder in made.items():
        make_checkpoint(name, folder)
    with served({name: str(folder) for name, folder in made.items()}) as running:
        yield running


def test_documents_are_ranked_by_the_scores_of_the_engine(service: Served) -> None:
    scores = service.engine("bert_reranker", lambda engine: engine.score("cat", DOCUMENTS))
    body = {"model": "bert_reranker", "query": "cat", "documents": DOCUMENTS, "top_n": 2}
    status, told = service.post("/v1/rerank", body)
    best = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert status == 200
    assert [(one["index"], one["document"]["text"]) for one in told["results"]] == [
        (index, DOCUMENTS[index]) for index in best
    ]
    assert [one["relevance_score"] for one in told["results"]] == pytest.approx(
        [1 / (1 + math.exp(-scores[index])) for index in best]
    )
    assert told["usage"]["total_tokens"] > 0
    given = [{"text": text, "id": index, "title": text.title()} for index, text in enumerate(DOCUMENTS)]
    _, named = service.post("/v1/rerank", {**body, "documents": given})
    assert [one["document"] for one in named["results"]] == [given[index] for index in best]
    assert [one["relevance_score"] for one in named["results"]] == [one["relevance_score"] for one in told["results"]]
    _, bare = service.post("/v1/rerank", {**body, "return_documents": False})
    assert not any("document" in one for one in bare["results"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("embeddings", {"model": "bert", "input": DOCUMENTS}),
        ("rerank", {"model": "bert_reranker", "query": "cat", "documents": DOCUMENTS}),
        ("classify", {"model": "bert_classifier", "input": DOCUMENTS}),
    ],
)
def test_watchers_know_its_requests_by_the_id_of_the_call(service: Served, path: str, body: dict[str, Any]) -> None:
    headers = {"content-type": "application/json", "x-request-id": f"my-{path}"}
    with watching(service) as events:
        sent = urllib.request.Request(f"{service.url}/v1/{path}", json.dumps(body).encode(), headers)
        urllib.request.urlopen(sent).close()
        told = (one for event in events for one in changes([event]))
        ended = [one["request"] for one in itertools.islice((one for one in told if one.get("stage") == "finished"), 3)]
    assert [name.partition("#")[0] for name in ended] == [f"my-{path}"] * 3


def test_a_score_of_any_size_is_a_relevance() -> None:
    body = RerankRequest(model="m", query="q", documents=["a", "b", "c"])
    usage = PromptUsage(prompt_tokens=1, total_tokens=1)
    told: Any = json.loads(vectors._ranked(body, body.texts(), [-1_000.0, 1_000.0, 0.0], usage).body)
    assert [(one["index"], one["relevance_score"]) for one in told["results"]] == [(1, 1.0), (2, 0.5), (0, 0.0)]


def test_labels_have_the_probabilities_of_the_engine(service: Served) -> None:
    expected = service.engine("bert_classifier", lambda engine: engine.classify(DOCUMENTS))
    status, told = service.post("/v1/classify", {"model": "bert_classifier", "input": DOCUMENTS})
    assert status == 200
    assert [one["index"] for one in told["data"]] == [0, 1, 2]
    for one, labels in zip(told["data"], expected, strict=True):
        assert one["probabilities"] == pytest.approx(labels)
        assert one["label"] == max(labels, key=labels.__getitem__)
