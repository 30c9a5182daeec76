"""Makes the `SamplingParams` from the members of a request, and the log-probabilities and usage of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from attrs import define, fields

from ...api.outputs.results import Completion, Delta, Usage
from ...core.detokenizer import TextDeltas, TokenBytes
from ...core.request import SamplingParams, Structure
from ..body import parsed
from ..problems import BadBody
from ..schemas import chat, completions
from ..schemas.base import OutputDetails, SamplingBody
from ..schemas.base import Usage as UsageObject
from ..schemas.chat import MOST_CHARACTERS, MOST_SCHEMA
from ..schemas.weighing import check_object

_CUT = "\N{REPLACEMENT CHARACTER}"  # the text of a part of a character
_OTHERWISE = {"logit_bias", "logprobs", "max_tokens"}
_NAMED_ALIKE = chat.ChatRequest.model_fields.keys() & {one.name for one in fields(SamplingParams)} - _OTHERWISE


def sampling_of(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    structure: Structure | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Returns the parameters that ``body`` asks for. The default temperature is 1, the default seed a fresh one."""
    named = {name: value for name in _NAMED_ALIKE if (value := getattr(body, name, None)) is not None}
    return SamplingParams(
        max_tokens=max_tokens,
        logit_bias=tuple((int(token), value) for token, value in (body.logit_bias or {}).items()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structure=structure,
        **{"temperature": 1.0, "seed": None, **named},
    )


def structure_of(body: SamplingBody, format_: chat.ResponseFormat | None = None) -> Structure | None:
    """Returns the structure of the output that ``body`` and its ``response_format`` ask for.

    Raises:
        BadBody: they ask for several.
        RequestTooLarge: the schema is too large.
    """
    schema = chat.schema_of(format_)
    wanted = body.structures | ({} if schema is None else {body.form: schema})
    if len(wanted) > 1:
        raise BadBody(f"several forms are given for the answer: {', '.join(wanted)}; give one", next(iter(wanted)))
    for name, value in wanted.items():
        match name.removeprefix("guided_").removeprefix("structured_outputs."):
            case "json" | "response_format" | "text.format":
                check_object(name, value, MOST_SCHEMA, MOST_CHARACTERS)
                if isinstance(value, str):
                    check_object(name, parsed(value), MOST_SCHEMA, MOST_CHARACTERS)
                return Structure.json_schema(value if isinstance(value, str) else json.dumps(value))
            case "json_object":
                return Structure.json_schema({"type": "object"})
            case "choice":
                return Structure.choice(value)
            case kind:
                return Structure(kind="lark" if kind == "grammar" else kind, text=value)
    return None


def usage_of(usages: Sequence[Usage], n: int) -> UsageObject:
    """Returns the sum of ``usages``, which has the ``n`` answers to each prompt one after another. Each prompt counts
    once."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    written = sum(usage.completion_tokens for usage in usages)
    details = OutputDetails(reasoning_tokens=sum(usage.reasoning_tokens for usage in usages))
    told = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    return UsageObject(**told, completion_tokens_details=details)


def token_text(tokens: TokenBytes, token: int) -> tuple[str, list[int] | None]:
    """Returns the text and the bytes of a token. The joined bytes of all tokens are the answer in UTF-8, with the space
    before its first word. ``None`` for the bytes: the token has no text, and its name is returned."""
    if utf8 := tokens.of(token, token):
        return utf8.decode(errors="replace"), list(utf8)
    return tokens.tokenizer.convert_ids_to_tokens(token) or "", None  # a padded vocabulary has ids without a name


def token_name(tokens: TokenBytes, token: int) -> str:
    """Returns a text that identifies a token. For a part of a character it shows the bytes, as in OpenAI's
    completions."""
    text, utf8 = token_text(tokens, token)
    return text if _CUT not in text or utf8 is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)


def chat_logprobs(known: TokenBytes, part: Completion | Delta) -> chat.Logprobs:
    """Returns the tokens of the answer in ``part`` with their log-probabilities, in the shape of chat completions."""
    before = part.reasoning_tokens if isinstance(part, Delta) else part.usage.reasoning_tokens

    def told(token: int, logprob: float) -> dict[str, Any]:
        text, utf8 = token_text(known, token)
        return {"token": text, "logprob": logprob, "bytes": utf8}

    return chat.Logprobs(
        content=[
            chat.TokenLogprob(**told(token, logprob), top_logprobs=[chat.TopLogprob(**told(*one)) for one in likeliest])
            for token, logprob, likeliest in islice(_tokens(part), before, None)
        ]
    )


@define(eq=False)
class Places:
    """The places of tokens in a text, as numbers of characters before them. ``place``: where the next token begins."""

    _texts: TextDeltas
    place: int = 0

    def of(self, token: int) -> int:
        """Returns the place of ``token``, which is the next one of the text."""
        place, self.place = self.place, self.place + len(self._texts.add(token))
        return place


def places_of(
    tokens: Sequence[int], text: str, texts: Callable[[bool], TextDeltas], *, is_tokens: bool
) -> list[tuple[int, int]]:
    """Returns the tokens of a prompt with their places in ``text``. A special token that the tokenizer has added to a
    text takes no place; one that the text spells has its own, as in a prompt that ``is_tokens``."""
    places, plain, found = Places(texts(False)), texts(True), list[tuple[int, int]]()
    for token in tokens:
        is_special = token in plain.special_ids or not plain.tokens.of(token, token)
        spelled = is_tokens or not is_special or text.startswith(texts(False).whole([token]), places.place)
        found.append((token, places.of(token) if spelled else places.place))
    return found


def completion_logprobs(
    known: TokenBytes, part: Completion | Delta, places: Places, before: Sequence[tuple[int, int]] = ()
) -> completions.CompletionLogprobs:
    """Returns the tokens of ``part`` with their log-probabilities, in the shape of completions. ``before`` has the
    tokens of the prompt with their places, if they are told, too; nothing is known of the first one."""
    scores: Iterator[tuple[float | None, Sequence[tuple[int, float]]]] = chain([(None, ())], part.prompt_logprobs or ())
    rows = [(token, place, *score) for (token, place), score in zip(before, scores, strict=bool(before))]
    rows += [(token, places.of(token), logprob, likeliest) for token, logprob, likeliest in _tokens(part)]
    tops = [
        None if logprob is None else {token_name(known, one): value for one, value in (*likeliest, (token, logprob))}
        for token, _, logprob, likeliest in rows
    ]
    return completions.CompletionLogprobs(
        tokens=[token_name(known, token) for token, *_ in rows],
        token_logprobs=[logprob for _, _, logprob, _ in rows],
        top_logprobs=tops if before or part.top_logprobs is not None else None,
        text_offset=[place for _, place, *_ in rows],
    )


def _tokens(part: Completion | Delta) -> Iterator[tuple[int, float, Sequence[tuple[int, float]]]]:
    logprobs = part.logprobs or ()
    tops = part.top_logprobs or ((),) * len(part.token_ids)
    return zip(part.token_ids, logprobs, tops, strict=False)  # an end-of-text token has only a value
