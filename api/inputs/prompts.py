"""Builds the request of a caller's query: checks, media, tokens and encoder items."""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import trio
from attrs import evolve, field, fields_dict, frozen

from ...core.checks import check_characters, demand, shown, unknown_name
from ...core.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from ...core.model import Kind, ModelDescription, Prepared, Preparer
from ...core.order import read_priority
from ...core.planning.prefix import prompt_keys
from ...core.reasoning import Reasoning, Stage
from ...core.request import ELSEWHERE, EncoderItem, LogitRules, Request, SamplingParams, Structure, most_tokens
from ...core.tools import Tool, read_tools
from .audio import AudioSource, load_audio
from .compiling import Compiler
from .images import ImageSource, load_image
from .lengths import Limit, Pause, read_texts, tokenizer_made
from .messages import Conversation, Message
from .reasoning import options_of, reasoning_of, with_budget
from .sources import INLINE_SAMPLES, is_pair
from .threads import run_in_thread

_WITHOUT_TEXT = {
    Kind.POOLING: "gives vectors, not text; use engine.embed(...) or engine.score(...)",
    Kind.ALIGNER: "gives the times of words, not text; use engine.align(...)",
    Kind.DIARIZER: "finds speakers, not text; use engine.diarize(...)",
}
INLINE_TEXT = 2_000  # characters; tokenizing more takes longer than a thread costs
INLINE_TOKENS = 1_000  # checking or hashing more takes longer than a thread costs
INLINE_HASHED = 32_000  # samples: hashing them takes 0.1 ms, as much as a thread; 30 s of audio take 2 ms and more


@frozen(kw_only=True, eq=False)
class Query:
    """The arguments of one call of `Engine.generate` or `Engine.stream`, which explain them."""

    prompt: str | None = None
    prompt_token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    tools: tuple[Tool, ...] = ()
    template_options: Mapping[str, Any] | None = None
    images: Sequence[ImageSource] = field(default=(), repr=False)
    audio: AudioSource | Sequence[AudioSource] | None = field(default=None, repr=False)
    sampling: SamplingParams = field(factory=SamplingParams)
    priority: int = 0
    request_id: str | None = None
    wait: bool = True
    adapter: str | None = None


def read_query(prompt: str | None, given: Mapping[str, Any]) -> Query:
    """Returns the query of a call of `Engine.generate` or `Engine.stream`.

    Raises:
        InvalidRequest: an unknown name, or sampling or tools that are not allowed.
    """
    names = tuple(fields_dict(Query))
    query = {name: value for name, value in given.items() if name in names}
    options = {name: value for name, value in given.items() if name not in names}
    query["sampling"] = read_sampling(query.get("sampling"), options, beside=names)
    query["tools"] = read_tools(query.get("tools", ()))
    return Query(prompt=prompt, **query)


async def build_request(
    description: ModelDescription, query: Query, request_id: str, *, reading: trio.CapacityLimiter, compiler: Compiler
) -> Request:
    """Returns the request of ``query``. ``reading`` limits how many callers tokenize texts at a time.

    Raises:
        InvalidRequest: an argument that cannot work for this model.
    """
    if description.kind in _WITHOUT_TEXT:
        raise InvalidRequest(f"{description.architecture} {_WITHOUT_TEXT[description.kind]}")
    sampling = resolved(query.sampling)
    if description.frame_seconds:
        check_greedy(sampling, description.architecture)
    priority = read_priority(query.priority)
    await tokenizer_made(description.tokenizer, reading)
    prepared = await _prepare(description, query, reading)
    _check_token_ids(description, "the prompt", prepared.token_ids)
    _check_token_ids(description, "stop_token_ids", sampling.stop_token_ids)
    _check_token_ids(description, "logit_bias", [token for token, _ in sampling.logit_bias])
    length = len(prepared.token_ids)
    scored = sampling.prompt_logprobs
    demand(scored is None or not prepared.items, f"prompt_logprobs={scored} for a prompt with images or audio", "None")
    max_tokens = _resolve_max_tokens(description, prepared, sampling)
    template = "" if description.preparer is None else description.preparer.template(tools=bool(query.tools))
    structure = sampling.structure and await compiler.compile(sampling.structure, description.structures)
    reasoning = with_budget(prepared.reasoning, sampling, template, query.template_options or {}, max_tokens)
    if reasoning is not None and structure is not None:
        reasoning = await _beside(reasoning, structure)
    return Request(
        id=request_id,
        prompt_token_ids=prepared.token_ids,
        items=prepared.items,
        sampling=sampling if structure is None else evolve(sampling, structure=structure),
        calls=bool(query.tools),
        reasoning=reasoning,
        rules=_rules(description, sampling, prompt_length=length, max_tokens=max_tokens),
        max_tokens=max_tokens,
        priority=priority,
    )


async def _beside(reasoning: Reasoning, structure: Structure) -> Reasoning | None:
    """Returns the reasoning before a text that follows ``structure``; ``None``: the structure has the opening mark
    itself, so all is the structure's."""
    if reasoning.stage is Stage.UNDECIDED and structure.kind != "json_schema":
        from ...models.sampling.structure import writes

        if await run_in_thread(partial(writes, structure, reasoning.opening)):
            return None
    return evolve(reasoning, structured=True)


async def with_page_keys(request: Request, description: ModelDescription, *, prefix_caching: bool) -> Request:
    """Returns ``request`` with the keys of its prompt's full pages, if pages are shared by content. The keys of a long
    prompt are computed in a thread, since in the loop all requests would wait for them."""
    work = partial(keyed, request, description, prefix_caching=prefix_caching)
    return await run_in_thread(work, short=len(request.prompt_token_ids) <= INLINE_TOKENS)


def keyed(request: Request, description: ModelDescription, *, prefix_caching: bool) -> Request:
    """Returns ``request`` as `with_page_keys` does, computed in the calling thread."""
    if not prefix_caching or description.whole_prompts:
        return request
    keys = prompt_keys(request, page_size=description.page_size, identity=description.processor_identity)
    return evolve(request, page_keys=keys) if keys else request


async def _prepare(description: ModelDescription, query: Query, reading: trio.CapacityLimiter) -> Prepared:
    conversation = _checked(description, query)
    if description.preparer is not None:
        prepared = await _prepare_placed(description, description.preparer, query, conversation, reading)
    else:
        prepared = await _prepare_crossed(description, query, reading)
    if not prepared.token_ids:
        begin = (
            f", and prompts of this model begin with {description.start_id}" if description.start_id is not None else ""
        )
        raise InvalidRequest(f"the prompt has no tokens; allowed: 1 token or more{begin}")
    return prepared


def _checked(description: ModelDescription, query: Query) -> Conversation:
    """Checks that the arguments of ``query`` go together. Returns its conversation."""
    given = [value is not None for value in (query.prompt, query.prompt_token_ids, query.messages)]
    alone = query.audio is not None and description.preparer is not None and not description.preparer.needs_prompt
    if sum(given) != 1 and not (alone and not any(given)):
        raise InvalidRequest("give exactly one of prompt, prompt_token_ids and messages")
    check_kind("prompt", query.prompt, str, "a text, or use prompt_token_ids=[...]")
    check_kind("prompt_token_ids", query.prompt_token_ids, Iterable, "a sequence of integers")
    if isinstance(query.prompt_token_ids, set | frozenset | Mapping | bytes):
        raise InvalidRequest(
            f"prompt_token_ids is a {type(query.prompt_token_ids).__name__}; allowed: a sequence of integers"
        )
    check_kind("template_options", query.template_options, Mapping, "a mapping of the chat template's variables")
    if query.messages is None and (query.tools or query.template_options):
        raise InvalidRequest(
            "tools or template_options are given without messages; give messages, whose chat template reads them"
        )
    check_kind("images", query.images, list | tuple, "a list of images")
    return Conversation.of(query.messages)


# -- encoder-decoder models ------------------------------------------------------------------------------------------


async def _prepare_crossed(description: ModelDescription, query: Query, reading: trio.CapacityLimiter) -> Prepared:
    if query.messages is not None or query.images:
        raise InvalidRequest(
            f"messages or images are given, but {description.architecture} reads audio and a prompt; use "
            "engine.transcribe(...)"
        )
    if query.prompt is not None:
        Limit.of_prompts(description).check_length("a prompt", (query.prompt,))
        work = partial(_encoded, description, query.prompt)
        token_ids = await read_texts(work, short=_is_short(query), reading=reading)
    else:
        token_ids = _given_tokens(description, query)
    return Prepared(token_ids=token_ids, items=(await _audio_item(description, query.audio),))


def _encoded(description: ModelDescription, prompt: str, pause: Pause) -> tuple[int, ...]:
    Limit.of_prompts(description).check_count("a prompt", prompt, pause)
    check_characters(prompt)
    return tuple(description.tokenizer.encode(prompt, add_special_tokens=False))


async def _audio_item(description: ModelDescription, audio: Any) -> EncoderItem:
    if audio is None:
        raise InvalidRequest(
            f"no audio is given, but {description.architecture} reads audio; use engine.transcribe(...)"
        )
    load = partial(load_audio, audio, sampling_rate=description.sampling_rate)
    samples = await run_in_thread(load, short=isinstance(audio, np.ndarray) and audio.size <= INLINE_SAMPLES)
    if len(samples) > description.window_samples:
        raise RequestTooLarge(
            f"audio of {len(samples) / description.sampling_rate:.2f} s is too long; allowed: one window of the "
            f"model, {description.window_samples / description.sampling_rate:g} s. Use engine.transcribe for audio "
            "of any length"
        )
    assert description.speech is not None, "an encoder-decoder without a preparer is a model of speech"
    sound = await run_in_thread(partial(description.speech.hear, samples), short=samples.size <= INLINE_HASHED)
    return sound.item


# -- decoders --------------------------------------------------------------------------------------------------------


async def _prepare_placed(
    description: ModelDescription,
    preparer: Preparer,
    query: Query,
    conversation: Conversation,
    reading: trio.CapacityLimiter,
) -> Prepared:
    images = (*query.images, *(item for kind, item in conversation.media if kind == "image"))
    audio = (*_several(query.audio), *(item for kind, item in conversation.media if kind == "audio"))
    if conversation.media and (query.images or query.audio is not None):
        raise InvalidRequest("images or audio are given both in the messages and beside them; give them in one place")
    for name, given in (("image", images), ("audio", audio)):
        if (given or name in conversation.types) and name not in preparer.media:
            reads = " and ".join(("text", *sorted(preparer.media)))
            raise InvalidRequest(
                f"the request has {name}, but {description.architecture} reads only {reads}; leave it out, or open "
                "another model"
            )
    limit = Limit.of_prompts(description)
    if query.prompt is not None:
        limit.check_length("a prompt", (query.prompt,))
    limit.check_conversation(conversation.texts)
    has_media = bool(images or audio)  # media are read by several callers at a time, each before its turn
    if has_media:
        images, audio = await run_in_thread(partial(_loaded, description, preparer, images, audio))
    work = partial(_read, description, preparer, query, conversation.messages, images, audio)
    return await read_texts(work, short=not has_media and _is_short(query), reading=reading)


def _loaded(
    description: ModelDescription, preparer: Preparer, images: Sequence[ImageSource], audio: Sequence[AudioSource]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Loads ``images`` and ``audio`` for `Preparer.prepare`, and reads them as far as that is possible before."""
    from ...models.architectures.prompts import ReadItem  # what the server has read already

    reads = "image" in preparer.media
    pictures = [load_image(image) if reads and not isinstance(image, ReadItem) else image for image in images]
    rate = description.sampling_rate
    sounds = [one if isinstance(one, ReadItem) else load_audio(one, sampling_rate=rate) for one in audio]
    return tuple(preparer.read_media(pictures)), tuple(preparer.read_media(sounds))


def _read(
    description: ModelDescription,
    preparer: Preparer,
    query: Query,
    messages: Sequence[Message],
    images: Sequence[Any],
    audio: Sequence[Any],
    pause: Pause,
) -> Prepared:
    prompt: str | Sequence[int]
    reasoning = None
    if query.messages is not None:
        pause()
        placed = bool(query.images) or query.audio is not None  # beside the messages, whose texts say where
        template = preparer.template(tools=bool(query.tools))
        options = options_of(template, query.sampling, query.template_options or {})
        prompt = preparer.render(messages, tools=query.tools, options=options, placed=placed)
        calls = bool(query.tools) and query.sampling.structure is None
        reasoning = reasoning_of(template, description.tokenizer, prompt, messages, options, calls=calls)
        pause()
    elif query.prompt is not None:
        prompt = query.prompt
    else:
        prompt = () if query.prompt_token_ids is None else _given_tokens(description, query)
    if isinstance(prompt, str):
        named = "a prompt" if query.messages is None else "a conversation"
        Limit.of_prompts(description).check_count(named, prompt, pause)
    return evolve(preparer.prepare(prompt, images=images, audio=audio), reasoning=reasoning)


def _given_tokens(description: ModelDescription, query: Query) -> tuple[int, ...]:
    given: Any = query.prompt_token_ids
    _check_room(description, length_hint(given))
    numbers = given.tolist() if hasattr(given, "tolist") else given  # arrays and tensors have number types of their own
    if not isinstance(numbers, Iterable):
        raise InvalidRequest(f"prompt_token_ids={reprlib.repr(given)}; allowed: a sequence of integers")
    some = islice(numbers, description.max_positions)  # the iterable may be endless
    token_ids = tuple(one.item() if isinstance(one, np.integer) else one for one in some)
    _check_token_ids(description, "prompt_token_ids", token_ids)
    return token_ids


def _is_short(query: Query) -> bool:
    tokens = 0 if query.prompt_token_ids is None else length_hint(query.prompt_token_ids)
    return query.messages is None and len(query.prompt or ()) <= INLINE_TEXT and tokens <= INLINE_TOKENS


def _several(audio: Any) -> tuple[Any, ...]:
    if audio is None:
        return ()
    return tuple(audio) if isinstance(audio, list | tuple) and not is_pair(audio) else (audio,)


# -- checks ----------------------------------------------------------------------------------------------------------


def _rules(
    description: ModelDescription, sampling: SamplingParams, *, prompt_length: int, max_tokens: int
) -> LogitRules:
    """Returns the rules of the checkpoint: its suppressed tokens, and the rules of its generation_config. A structure
    lifts them, since it may need suppressed tokens such as brackets and quotation marks. Special tokens and timestamps
    stay suppressed, since they are not text.
    """
    if sampling.structure is None:
        own = LogitRules(suppress=description.suppress_token_ids, begin_suppress=description.begin_suppress_token_ids)
        if description.generation is None:
            return own
        return description.generation.of(own, prompt_length=prompt_length, max_tokens=max_tokens)
    first = description.vocabulary_size if description.text_tokens is None else description.text_tokens
    return LogitRules(suppress=tuple(range(first, description.vocabulary_size)))


def check_kind(name: str, value: object, kind: Any, allowed: str) -> None:
    """Raises `InvalidRequest` if ``value`` is neither ``None`` nor a ``kind``."""
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{name}={reprlib.repr(value)}; allowed: {allowed}")  # the value may be a whole image


def _check_token_ids(description: ModelDescription, name: str, token_ids: Sequence[int]) -> None:
    size = description.vocabulary_size
    if not token_ids or (set(map(type, token_ids)) == {int} and 0 <= min(token_ids) <= max(token_ids) < size):
        return  # this check takes a tenth of the time of the loop below
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
            raise InvalidRequest(
                f"{name} holds {token_id!r}; allowed: integers from 0 to {size - 1}, the model's vocabulary"
            )


def _check_room(description: ModelDescription, prompt_length: int) -> None:
    if prompt_length >= description.max_positions:
        raise ContextLengthExceeded(
            f"a prompt of {prompt_length} tokens leaves no room to generate; allowed: up to "
            f"{description.max_positions - 1} tokens, since the model has {description.max_positions} positions"
        )


def _resolve_max_tokens(description: ModelDescription, prepared: Prepared, sampling: SamplingParams) -> int:
    prompt_length = len(prepared.token_ids)
    _check_room(description, prompt_length)
    most = most_tokens(description.max_positions, prompt_length, prepared.items)
    if sampling.max_tokens is not None and sampling.max_tokens > most:
        raise ContextLengthExceeded(
            f"max_tokens={sampling.max_tokens} is too much after a prompt of {prompt_length} tokens; allowed: up to "
            f"{most}, since the model or the audio has {most + prompt_length} positions. Leave out max_tokens to use "
            "them all"
        )
    return most if sampling.max_tokens is None else sampling.max_tokens


# ---- sampling --------------------------------------------------------------------------------------------------------


_FIELDS = tuple(fields_dict(SamplingParams))


def read_sampling(sampling: object, given: Mapping[str, Any], *, beside: tuple[str, ...]) -> SamplingParams:
    """Returns the sampling that a caller gave, as `SamplingParams` or by the names of its fields. Without either it is
    greedy.

    Args:
        given: fields of `SamplingParams` by name.
        beside: the other keywords of the call. An unknown name may be a misspelling of one of them.

    Raises:
        InvalidRequest: `SamplingParams` together with fields, another type, an unknown name, or a value that is not
            allowed.
    """
    for name in given:
        if name not in _FIELDS:
            raise unknown_name(name, (*_FIELDS, *beside), ELSEWHERE, owner="a request")
    if sampling is None:
        return SamplingParams(**given)
    if not isinstance(sampling, SamplingParams):
        allowed = "SamplingParams(max_tokens=...), or its fields by name, as in max_tokens=5"
        raise InvalidRequest(f"sampling={shown(sampling)}; allowed: {allowed}")
    if given:
        name = next(iter(given))
        raise InvalidRequest(f"{name}= and sampling= are both given; give it in sampling=SamplingParams({name}=...)")
    return sampling


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NOT_GREEDY = (
    "prompt_logprobs",
    "temperature",
    "beam_size",
    "structure",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    *_PENALTIES,
)


def check_greedy(sampling: SamplingParams, architecture: str) -> None:
    """Raises `InvalidRequest` if ``sampling`` would change the tokens of a model that reads frames greedily."""
    usual = SamplingParams()
    for name in _NOT_GREEDY:
        value, allowed = getattr(sampling, name), getattr(usual, name)
        demand(
            value == allowed, f"{name}={shown(value)} for {architecture}, which reads frames greedily", shown(allowed)
        )


def resolved(sampling: SamplingParams) -> SamplingParams:
    """Returns ``sampling`` with a fresh seed if it has none."""
    return evolve(sampling, seed=secrets.randbits(63)) if sampling.seed is None else sampling
