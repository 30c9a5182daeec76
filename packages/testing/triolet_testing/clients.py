"""The scenarios of the simulation: clients, the times at which they come, and the engine that they meet.

`triolet_testing.simulate` runs the scenarios of `SCENARIOS`, and any other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from attrs import field, frozen

from triolet.api.inputs.audio import Samples, content_key
from triolet.core.config import Speculation
from triolet.core.model import Kind, Prepared
from triolet.core.plan import AlignedTokens
from triolet.core.request import (
    Alignment,
    EncoderItem,
    LogitRules,
    Placeholder,
    Pooling,
    Probe,
    Request,
    SamplingParams,
)

from .sim_beams import expected_hypotheses
from .sim_model import (
    EOS,
    IMAGE,
    START,
    SimModel,
    SimPreparer,
    expected_alignment,
    expected_logprob,
    expected_tokens,
    expected_vector,
)

FOREVER = 1e9
"""Virtual seconds that are longer than any run."""


@frozen(kw_only=True)
class Client:
    """The actions of one client of a scenario. At ``arrives`` (s) the client requests ``max_tokens`` tokens on audio
    number ``audio``. It waits ``pause`` seconds between two reads, and leaves after ``patience`` seconds.

    For a model that is not an encoder-decoder, ``images`` replace the audio: one for each
    `triolet_testing.sim_model.IMAGE` of the prompt. A ``pooling`` requests a vector instead of tokens, an ``alignment``
    the times of the prompt's tokens. With two or more ``beams`` the request is a beam search. With a ``probe`` the
    client reads all tokens together, as a transcription does. With an ``adapter`` it first loads this adapter, and
    unloads it once the request is on its way.
    """

    audio: int = 0
    images: tuple[int, ...] = ()
    prompt: tuple[int, ...] = (START,)
    pooling: Pooling | None = None
    alignment: Alignment | None = None
    probe: Probe | None = None
    max_tokens: int = 3
    beams: int = 1
    adapter: str = ""
    priority: int = 0
    arrives: float = 0.0
    patience: float = FOREVER
    pause: float = 0.0
    sampling: SamplingParams = field(init=False, eq=False, repr=False)  # made once, since checking it takes time

    @property
    def reads_only(self) -> bool:
        """True if the client requests a result of its prompt, and no tokens."""
        return self.pooling is not None or self.alignment is not None

    @sampling.default
    def _sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, beam_size=self.beams)


@frozen(kw_only=True)
class Scenario:
    """Clients and the engine that they meet.

    ``leaves`` is the time (s) at which the block ends even if clients are not done. Clients that are not done are
    cancelled first. Those ``outside`` of the block go on while the engine drains. ``refusal`` names an error that any
    client may get. ``naps`` are the times (s) at which an operator puts the engine to sleep and wakes it, in turn.
    """

    name: str
    clients: tuple[Client, ...]
    model: SimModel = field(factory=SimModel)
    config: Mapping[str, object] = field(factory=dict)
    leaves: float = FOREVER
    outside: bool = False
    refusal: str | None = None
    naps: tuple[float, ...] = ()


def audio(number: int) -> Samples:
    """Returns the samples of a client's audio, which are short and different for every number."""
    return np.full(1600, number / 100, np.float32)


def true_tokens(client: Client, model: SimModel) -> tuple[int, ...]:
    """Returns the tokens that a client must get, without end-of-text."""
    prompt = prompt_of(client, model)
    key = prompt.items[0].key if model.kind is Kind.ENCODER_DECODER else None
    asked = prompt.token_ids, key, client.max_tokens
    if client.beams == 1:
        tokens = expected_tokens(*asked, model, _placeholders(prompt), client.adapter)
    else:
        tokens = expected_hypotheses(*asked, client.sampling, model, _placeholders(prompt))[0].token_ids
    return tokens[:-1] if tokens[-1] == EOS else tokens


def prompt_of(client: Client, model: SimModel) -> Prepared:
    """Returns the prompt of any client, with the items that it reads."""
    if model.kind is not Kind.ENCODER_DECODER:
        return SimPreparer(model=model).prepare(client.prompt, images=client.images)
    samples = audio(client.audio)
    item = EncoderItem(
        key=content_key(samples, "sim"), payload=samples, embeddings=model.encoder_embeddings, size=model.encoder_bytes
    )
    return Prepared(token_ids=client.prompt, items=(item,))


def request_of(client: Client, model: SimModel, request_id: str) -> Request:
    """Returns the request of any client. It is made without a thread, since no schedule controls threads."""
    prompt = prompt_of(client, model)
    return Request(
        id=request_id,
        prompt_token_ids=prompt.token_ids,
        items=prompt.items,
        sampling=client.sampling,
        rules=LogitRules(),
        max_tokens=1 if client.reads_only else client.max_tokens,
        pooling=client.pooling,
        alignment=client.alignment,
        probe=client.probe,
        adapter=client.adapter,
        priority=client.priority,
    )


def true_answer(client: Client, model: SimModel) -> AlignedTokens | tuple[float, ...]:
    """Returns the answer that a client must get if it requests no tokens."""
    prompt = prompt_of(client, model)
    if client.alignment is not None:
        return expected_alignment(prompt.token_ids, prompt.items[0].key, client.alignment)
    return expected_vector(prompt.token_ids, None, _placeholders(prompt))


def true_probe(client: Client) -> tuple[float, ...] | None:
    """Returns the log-probabilities that the probe of a client must get; ``None``: the client has no probe."""
    return None if client.probe is None else tuple(map(expected_logprob, client.probe.token_ids))


def _placeholders(prompt: Prepared) -> list[Placeholder]:
    return [item.placeholder for item in prompt.items if item.placeholder is not None]


_ONE_ENTRY = {"encoder_cache_bytes": 100}
_FEW_PAGES = SimModel(max_positions=9, pages=15, page_size=1, cross_slots=2)  # two sequences fit at first
_READS_IMAGES = SimModel(kind=Kind.DECODER, max_positions=24, pages=14)
_SPECULATES = {"speculation": Speculation(tokens=3)}
_TWO_IMAGES = (START, IMAGE, 5, IMAGE, 6)
_TEXT = (START, 5)
_TALK = (START, *range(2, 13))
_LANGUAGES = Probe(position=0, token_ids=(5, 6, 7))
_SILENCE = Probe(position=0, token_ids=(8,))

_ALL = (
    Scenario(name="plain", clients=(Client(audio=1), Client(audio=2, arrives=0.4))),
    Scenario(
        name="shared audio",
        clients=(Client(audio=1), Client(audio=1, prompt=(START, 2)), Client(audio=1, arrives=0.34, max_tokens=2)),
    ),
    Scenario(
        name="burst over capacity",
        clients=tuple(Client(audio=number, max_tokens=2) for number in range(4)),
        config={"max_pending": 2, "max_running": 2, "encoder_cache_bytes": 200, "encode_batch_embeddings": 10},
    ),
    Scenario(
        name="eviction pressure",
        clients=tuple(Client(audio=number % 2, max_tokens=2, arrives=0.2 * number) for number in range(3)),
        model=SimModel(cross_slots=1),
        config=_ONE_ENTRY,
    ),
    Scenario(
        name="abort storm",
        clients=tuple(
            Client(audio=number // 2, max_tokens=8, patience=0.1 + 0.13 * number, priority=number % 2)
            for number in range(4)
        ),
        config={"encoder_cache_bytes": 200},
    ),
    Scenario(
        name="preemption",
        clients=tuple(Client(audio=1, prompt=(START, 1 + number), max_tokens=7) for number in range(3)),
        model=_FEW_PAGES,
        config={"prefix_caching": False},
    ),
    Scenario(
        name="leaving while it is encoded",  # 0.3 s: an answer and a withdrawal cross each other
        clients=(Client(audio=1, patience=0.3), Client(audio=2, patience=0.31), Client(audio=1, arrives=0.1)),
    ),
    Scenario(
        name="larger than the cache",
        clients=tuple(Client(audio=number, patience=0.001 * number) for number in range(3)),
        config={"encoder_cache_bytes": 50},
        refusal="RequestTooLarge",
    ),
    Scenario(
        name="idle time",
        clients=tuple(Client(audio=1 + n % 2, max_tokens=2, arrives=0.5 * n) for n in range(3)),
        model=SimModel(cross_slots=1),
        config={"encoder_idle_seconds": 0.1},
    ),
    Scenario(
        name="drain", clients=(Client(audio=1, max_tokens=6), Client(audio=2, max_tokens=4)), leaves=0.36, outside=True
    ),
    Scenario(
        name="shutdown while busy",
        clients=(Client(audio=1, max_tokens=40), Client(audio=2, max_tokens=40), Client(audio=3, arrives=0.4)),
        config={"drain_seconds": 0.01},  # shorter than a step
        leaves=0.45,
    ),
    Scenario(
        name="sleep by order",
        clients=(Client(audio=1, max_tokens=8), Client(audio=1), Client(audio=2, arrives=0.6)),
        model=SimModel(cross_slots=1),
        config=_ONE_ENTRY | {"encoder_idle_seconds": 0.1},
        naps=(0.37, 1.0, 1.9215, 2.5),  # the second sleep comes just as an idle entry is freed
    ),
    Scenario(
        name="sleep for want of work",
        clients=(
            Client(audio=1, max_tokens=2),
            Client(audio=1, max_tokens=2, arrives=0.9, patience=0.2),
            Client(audio=2, max_tokens=2, arrives=1.5),
        ),
        config={"idle_sleep": 0.2},
    ),
    Scenario(
        name="shutdown while asleep",
        clients=(Client(audio=1, max_tokens=40), Client(audio=2, arrives=0.6)),
        naps=(0.4,),
        leaves=0.8,
    ),
    Scenario(name="slow reader", clients=(Client(audio=1, pause=1.0), Client(audio=2)), config={"max_pending": 1}),
    Scenario(
        name="images that do not fit together",  # 30, 40 and 10 bytes
        clients=(
            Client(images=(2, 3, 2), prompt=(START, IMAGE, 5, IMAGE, IMAGE), max_tokens=4),
            Client(images=(2, 0), prompt=_TWO_IMAGES, patience=0.31),
            Client(images=(3,), prompt=(START, IMAGE), arrives=0.31, max_tokens=2),
        ),
        model=_READS_IMAGES,
        config={"encoder_cache_bytes": 60, "encode_batch_embeddings": 4, "max_step_tokens": 8},
    ),
    Scenario(
        name="text between images",  # the first client leaves while its text is fed and its second image is encoded
        clients=(
            Client(images=(3, 2), prompt=(START, IMAGE, *range(2, 50), IMAGE, 5), max_tokens=2, patience=0.6),
            Client(images=(7, 6), prompt=(START, IMAGE, *range(2, 20), IMAGE), arrives=0.6, max_tokens=2),
        ),
        model=SimModel(kind=Kind.DECODER, pages=24),
        config={"encoder_cache_bytes": 90, "max_step_tokens": 5},
    ),
    Scenario(
        name="shared prefix",  # the third client comes after the second has ended, and finds its pages
        clients=(
            Client(images=(3, 1), prompt=_TWO_IMAGES, max_tokens=6),
            Client(images=(3, 2), prompt=_TWO_IMAGES, arrives=0.33, max_tokens=2),
            Client(images=(3, 1), prompt=(*_TWO_IMAGES, 10), arrives=0.9),
        ),
        model=_READS_IMAGES,
        config=_SPECULATES,
    ),
    Scenario(
        name="preemption among images",
        clients=tuple(
            Client(images=(3, number), prompt=_TWO_IMAGES, max_tokens=5, priority=-number, arrives=0.33 * number)
            for number in range(3)
        ),
        model=SimModel(kind=Kind.DECODER, max_positions=16, pages=8),
        config=_SPECULATES | {"encoder_cache_bytes": 80},
    ),
    Scenario(
        name="an urgent image and one place",  # if its step fails, the patient client has the place by then
        clients=(
            Client(images=(3,), prompt=(START, IMAGE, 5), max_tokens=4),
            Client(prompt=(START, 7, 8), max_tokens=4, priority=1, arrives=0.1),
        ),
        model=_READS_IMAGES,
        config={"max_running": 1, "steps_in_flight": 1, "encoder_idle_seconds": 0},
    ),
    Scenario(
        name="an urgent image, one place and two steps in flight",
        clients=(
            Client(images=(3,), prompt=(START, IMAGE, 5), max_tokens=4),
            *(
                Client(images=(10 + n, 15 + n), prompt=_TWO_IMAGES, max_tokens=3, priority=1, arrives=0.1)
                for n in (0, 8)
            ),
        ),
        model=_READS_IMAGES,
        config={"max_running": 1, "encoder_cache_bytes": 80},
    ),
    Scenario(
        name="a suspect waits for its second image",  # in the only place, after a failed step, when an urgent one comes
        clients=(
            Client(images=(3, 2), prompt=_TWO_IMAGES, max_tokens=4, priority=1),
            Client(prompt=(START, 7, 8), max_tokens=4, arrives=0.35),
            Client(images=(3,), prompt=(START, IMAGE, 5), max_tokens=4, beams=2, priority=2, arrives=0.1),
        ),
        model=_READS_IMAGES,
        config=_SPECULATES | {"max_running": 1, "steps_in_flight": 1, "encoder_cache_bytes": 100},
    ),
    Scenario(
        name="three places and one slot",  # three levels of priority, and searches that grow beyond the pages
        clients=(
            Client(audio=1, max_tokens=4, priority=2),
            Client(audio=2, max_tokens=5, priority=1, beams=2, arrives=0.2),
            Client(audio=1, prompt=_TEXT, max_tokens=3, arrives=0.3),
            Client(audio=3, prompt=_TEXT, max_tokens=3, arrives=0.4, patience=0.5),
        ),
        model=SimModel(max_positions=12, pages=12, page_size=2, cross_slots=1),
        config=_ONE_ENTRY | {"max_running": 3, "steps_in_flight": 1},
    ),
    Scenario(
        name="beams",  # too few pages for two searches at once, which are therefore preempted in the middle
        clients=(
            Client(audio=1, prompt=(START, 5), max_tokens=6, beams=3),
            Client(audio=1, prompt=(START, 7, 2), max_tokens=6, beams=2, priority=-1, arrives=0.34),
            Client(audio=2, max_tokens=4, arrives=0.3),
            Client(audio=2, max_tokens=8, beams=2, patience=0.43),
        ),
        model=SimModel(max_positions=16, pages=12, page_size=2, cross_slots=2),
        config={"max_step_tokens": 8},
    ),
    Scenario(
        name="frames",  # one page is the state of a sequence; urgent ones preempt others, which start from 0 again
        clients=(
            Client(audio=1, max_tokens=10, priority=2),
            Client(audio=1, max_tokens=9, priority=2, arrives=0.05),
            Client(audio=2, max_tokens=5, priority=1, arrives=0.1),
            Client(audio=1, max_tokens=4, arrives=0.38),
            Client(audio=1, max_tokens=7, arrives=0.42, patience=0.2),
        ),
        model=SimModel(max_positions=12, pages=2, page_size=12, cross_slots=2),
        config={"encoder_cache_bytes": 200, "max_step_tokens": 4},
    ),
    Scenario(
        name="pooling",
        clients=tuple(
            Client(
                prompt=(START, *range(2, 3 + 4 * number)), pooling=Pooling(kind="mean"), arrives=0.01 * (number // 2)
            )
            for number in range(4)
        ),
        model=SimModel(kind=Kind.POOLING, whole_prompts=True),
        config={"max_step_tokens": 8},
    ),
    Scenario(
        name="pooling with images",
        clients=(
            Client(images=(3, 1), prompt=_TWO_IMAGES, pooling=Pooling(kind="last")),
            Client(images=(3, 1), prompt=(*_TWO_IMAGES, 7), arrives=0.4, pooling=Pooling(kind="mean")),
            Client(images=(3, 1), prompt=_TWO_IMAGES, arrives=0.6, max_tokens=2),
        ),
        model=_READS_IMAGES,
        config={"encoder_cache_bytes": 40, "max_step_tokens": 6},
    ),
    Scenario(
        name="alignment",  # of texts that are read in chunks, beside others on the same audio; the last client preempts
        clients=(
            Client(audio=1, max_tokens=6),
            Client(audio=1, prompt=(START, *range(2, 8)), alignment=Alignment(start=1, frames=10)),
            Client(audio=2, prompt=(START, *range(2, 9)), alignment=Alignment(start=3, frames=5), patience=0.66),
            Client(audio=1, prompt=(START, *range(2, 6)), alignment=Alignment(start=4, frames=7), arrives=0.345),
            Client(audio=1, prompt=(START, 2, 3), max_tokens=2, priority=-1, arrives=0.36),
        ),
        model=_FEW_PAGES,
        config={"max_step_tokens": 3},
    ),
    Scenario(
        name="live",  # readings of a growing utterance: each has new audio after the stable words, and then their
        # times; beside another session, which is left in the middle
        clients=(
            Client(audio=1, max_tokens=4),
            Client(audio=2, prompt=(START, 2), arrives=0.42),
            Client(audio=2, prompt=(START, 2, 3, 4), alignment=Alignment(start=1, frames=5), arrives=0.84),
            Client(audio=3, prompt=(START, 2, 3), arrives=0.88),
            Client(audio=3, prompt=(START, 2, 3, 4, 5), alignment=Alignment(start=1, frames=9), arrives=1.3),
            Client(audio=5, max_tokens=4, arrives=0.2),
            Client(audio=6, prompt=(START, 7), arrives=0.6, patience=0.37),
        ),
        model=SimModel(cross_slots=2),
        config={"encoder_cache_bytes": 200},
    ),
    Scenario(
        name="parallel",  # two windows at once: the language, a search, draws, the times of words; one caller leaves
        clients=(
            Client(audio=1, max_tokens=1, probe=_LANGUAGES),
            Client(audio=1, prompt=_TEXT, max_tokens=5, beams=2, probe=_SILENCE, arrives=0.34),
            Client(audio=2, prompt=_TEXT, max_tokens=5, beams=2, probe=_SILENCE, arrives=0.34, patience=0.2),
            Client(audio=1, prompt=_TEXT, max_tokens=6, probe=_SILENCE, arrives=0.4),
            Client(audio=1, prompt=_TEXT, max_tokens=4, arrives=0.4),
            Client(audio=1, prompt=(*_TEXT, 2, 3, 4), alignment=Alignment(start=2, frames=10), arrives=0.42),
            Client(audio=2, prompt=(*_TEXT, 2), alignment=Alignment(start=2, frames=7), arrives=0.42),
        ),
        model=SimModel(max_positions=12, pages=14, page_size=2, cross_slots=2),
        config=_ONE_ENTRY | {"max_step_tokens": 6},
    ),
    Scenario(
        name="recurrent states",  # turns of a conversation go on from what is kept; a search beside others, and one
        # that needs all states; three samples at once; an urgent client; one that leaves
        clients=(
            Client(prompt=_TALK[:9], max_tokens=5),
            Client(prompt=_TALK, max_tokens=6, arrives=0.16),
            Client(images=(2,), prompt=(START, IMAGE, 5), max_tokens=4, arrives=0.1, beams=2),
            *(Client(prompt=_TALK, max_tokens=10, arrives=0.24, priority=1) for _ in range(3)),
            Client(prompt=(*_TALK[:5], 9), max_tokens=5, arrives=0.3, patience=0.1),
            Client(prompt=(*_TALK, 7), max_tokens=2, arrives=0.5),
            Client(prompt=_TALK[:10], max_tokens=3, arrives=0.52, beams=5, priority=2),
        ),
        model=SimModel(kind=Kind.DECODER, max_positions=24, pages=14, states=5),
        config=_SPECULATES | {"max_running": 3, "max_step_tokens": 8},
    ),
    Scenario(
        name="adapters",  # one slot for two; a client leaves while its adapter is read, one while it reads
        clients=(
            Client(prompt=_TALK[:6], adapter="first", max_tokens=6),
            Client(prompt=_TALK[:6], max_tokens=4, arrives=0.03, priority=1),
            Client(prompt=_TALK[:6], adapter="second", max_tokens=4, arrives=0.02),
            Client(prompt=_TALK[:6], adapter="first", max_tokens=9, arrives=0.05, patience=0.13),
            Client(prompt=_TALK[:6], adapter="second", arrives=0.01, patience=0.045),
        ),
        model=SimModel(kind=Kind.DECODER, max_positions=24, pages=14),
        config={"adapters": 1},
        naps=(0.15, 0.4),
    ),
)

SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in _ALL}
