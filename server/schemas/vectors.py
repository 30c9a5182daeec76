"""Vectors and scores: ``/v1/embeddings``, ``/v1/rerank``, ``/v1/classify``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from .base import AnswerBody, Body, Ignored, Name, Text, check_length, up_to

Texts = Annotated[list[Text], up_to(2_048, 1)]
Level = Annotated[int, Field(ge=-100, le=100, description="Smaller numbers run first.")]


class _TextsRequest(Body):
    model: Name
    input: Text | Texts
    priority: Level = 0

    def check_size(self) -> None:
        """Checks the size of all texts together."""
        check_length("texts", sum(map(len, self.texts())))

    def texts(self) -> list[str]:
        """Returns the input as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


class EmbeddingRequest(_TextsRequest, Ignored):
    """Texts to embed."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Keep only this many numbers of each vector, and scale it to length 1.",
    )

    @field_validator("input", mode="before")
    @classmethod
    def _is_no_tokens(cls, given: Any) -> Any:
        if isinstance(given, list) and given and isinstance(given[0], int | list):
            raise ValueError(
                "the input has token ids, usually of another model's vocabulary; allowed: texts (LangChain sends "
                "them with OpenAIEmbeddings(check_embedding_ctx_length=False))"
            )
        return given


class Embedding(AnswerBody):
    """One vector; in base64 its numbers are float32, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptUsage(AnswerBody):
    """Tokens of a request that is only read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(AnswerBody):
    """The answer of ``/v1/embeddings``."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: PromptUsage


class Document(Body):
    """A document to rank by its text. Its other members are answered with it."""

    text: Text
    id: Name | int | None = None
    title: Text | None = None


class RerankRequest(Body):
    """Documents to put in the order in which they answer a query."""

    model: Name
    query: Text
    documents: Annotated[list[Text | Document], up_to(2_048, 1)]
    top_n: int | None = Field(default=None, ge=1, description="The number of best documents to return. Default: all.")
    return_documents: bool = True
    priority: Level = 0

    def check_size(self) -> None:
        """Checks the size of all texts together. The query counts for each document, since it is read with each."""
        texts = self.texts()
        check_length("texts, the query with each,", sum(map(len, texts)) + len(texts) * len(self.query))

    def texts(self) -> list[str]:
        """Returns the text of each document."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


class RankedDocument(AnswerBody):
    """A document as it was given."""

    text: str
    id: str | int | None = None
    title: str | None = None


class Ranked(AnswerBody):
    """A document's place among those that were given, and how well it answers: 0 to 1, the logistic function of the
    model's score."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class RerankAnswer(AnswerBody):
    """The answer of ``/v1/rerank``, the best document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage


class ClassifyRequest(_TextsRequest):
    """Texts to classify."""


class Classified(AnswerBody):
    """The likeliest label of one text, and the probability of each."""

    index: int
    label: str
    probabilities: dict[str, float]


class ClassifyAnswer(AnswerBody):
    """The answer of ``/v1/classify``."""

    id: str
    object: Literal["list"]
    model: str
    data: list[Classified]
    usage: PromptUsage
