"""The checker of model adapters. It plays the planner of an `Executor`, and compares the tokens of several plays with
each other.

::

    def test_my_adapter_keeps_its_promises():
        check_model_adapter(lambda: MyExecutor(...), payloads=[clip, other_clip, third_clip])

A broken promise is an `InvariantViolation` with the promise's name:

- **payloads are heard**: the tokens and log-probabilities of a prompt depend on the payload.
- **batched as alone**: a sequence gets the same tokens, whatever else is in its batches.
- **chunked as whole**: a prompt that is fed in pieces gives the same tokens as one that is fed at once.
- **outputs are copies**: an encoder output does not change when outputs of its batch are freed or others are encoded.
- **slots are shared**: a sequence that joins a cross slot after the slot's writer gets the same tokens, both while the
  writer runs and after the writer has ended and the encoder output was freed.
- **replayed as whole**: a sequence that was ended and is started again with its old id and sampled tokens goes on as if
  it had never ended.
- **probes are answered**: a probe is answered once, by the chunk that holds its position, with a log-probability for
  each of its tokens. The answer is the same in any batch and in any pieces.
- **memory is reported**: an open adapter holds bytes, and more bytes with each encoding.
- **free gives back**: each free gives the bytes of its output back. A freed key can be encoded again and gives the same
  tokens. Ended work leaves no bytes behind, for any owner. Freeing an absent key is an `AssertionError` (not checked
  under ``python -O``).
- **instances apart**: two open adapters do not affect each other, and one goes on when the other is closed.
- **closed is empty**: after `Executor.close`, which may be called twice, an adapter holds zero bytes.
- **asleep is empty**: after `Executor.sleep` an adapter holds zero bytes, or its parked weights and no more than when
  it was opened. A sleeping adapter may be reset, woken and closed; any other call is an `AssertionError`, and so is a
  wake of an adapter that is awake.
- **wakes as opened**: after `Executor.wake` an adapter holds the same bytes as when it was opened, by owner, and no
  sequence or encoder output; every sequence gets the same tokens.
- **bytes are true** (if ``live_bytes`` is given): the adapter reports the bytes that are alive, at rest, asleep and
  closed.

Tokens are sampled greedily and must be equal; log-probabilities must be close. These are not checked: sampling,
`LogitRules` and stop tokens; whether the tokens are right; records of ended sequences that `Executor.memory` does not
report; the state after a call, such as a wake, that fails half-way; `Executor.close` of an adapter that is half open.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

from attrs import define, evolve, field

from triolet.core.errors import InvariantViolation
from triolet.core.model import ModelDescription
from triolet.core.plan import SampledToken
from triolet.core.request import Probe

from .adapter_player import Item, MakeAdapter, PlayedSequence, Player

LEAST_PAYLOADS = 3
"""The fewest payloads: one to free, one to keep, and one to encode later."""


@define(eq=False)
class _Check:
    make_adapter: MakeAdapter
    items: tuple[Item, ...]
    max_tokens: int
    tolerance: float
    live_bytes: Callable[[], int] | None
    truth: list[tuple[SampledToken, ...]] = field(factory=list)  # what each item samples alone, in its own adapter
    promise: str = ""  # the name of the promise that is checked now

    def run(self) -> None:
        """Checks one promise after the other. If the adapter raises during a check, the promise is broken."""
        self.truth = [self.alone(item) for item in self.items]
        for self.promise, check in _CHECKS.items():
            try:
                check(self)
            except InvariantViolation:
                raise
            except Exception as error:
                told = f"the adapter raised {type(error).__name__}: {error}"
                raise InvariantViolation(self.promise, told) from error

    def fail(self, what: str) -> NoReturn:
        raise InvariantViolation(self.promise, what)

    @contextmanager
    def open(self) -> Iterator[Player]:
        """Opens an adapter, and closes it at the end of the block."""
        adapter = self.make_adapter()
        try:
            yield Player(adapter, adapter.open(), self.max_tokens)
        finally:
            adapter.close()

    def alone(self, item: Item) -> tuple[SampledToken, ...]:
        with self.open() as player:
            player.encode([item])
            return player.decode([item])[0]

    def payloads_are_heard(self) -> None:
        """Plays each payload with the first one's prompt. The log-probabilities distinguish payloads that give equal
        tokens."""
        others = [self.alone(evolve(item, prompt=self.items[0].prompt)) for item in self.items[1:]]
        if all(sampled == self.truth[0] for sampled in others):
            self.fail(
                f"all {len(self.items)} payloads give the prompt {self.items[0].prompt} the same tokens with the same "
                "log-probabilities; are the payloads different?"
            )

    def batched_as_alone(self) -> None:
        with self.open() as player:
            player.encode(self.items)
            self.compare(player.decode(self.items), "encoded and decoded in one batch")

    def chunked_as_whole(self) -> None:
        with self.open() as player:
            player.encode(self.items)
            for chunk in (1, 2, 3):
                self.compare(player.decode(self.items, chunk=chunk), f"fed in pieces of {chunk}")

    def compare(self, sampled: list[tuple[SampledToken, ...]], how: str, *, first: int = 0) -> None:
        """Compares ``sampled``, the tokens of the items from ``first`` on, with the tokens that each item samples
        alone.
        """
        for item, true, got in zip(self.items[first:], self.truth[first:], sampled, strict=False):
            tokens, true_tokens = [one.token_id for one in got], [one.token_id for one in true]
            if tokens != true_tokens:
                self.fail(f"{item.key}, {how}, gets {tokens}; alone it gets {true_tokens}")
            apart = max(abs(one.logprob - other.logprob) for one, other in zip(got, true, strict=True))
            if not apart <= self.tolerance:  # not ">", so that NaN fails too
                self.fail(
                    f"{item.key}, {how}, gets log-probabilities that are {apart:g} from those it gets alone; allowed: "
                    f"{self.tolerance:g}"
                )

    def outputs_are_copies(self) -> None:
        first, *kept, last = self.items
        with self.open() as player:
            player.encode([first, *kept])
            player.free([first])
            player.encode([last])
            sampled = player.decode([*kept, last])
            self.compare(sampled, "after a sibling was freed and another encoded", first=1)
            player.encode([first])
            self.compare(player.decode(self.items), "after an output was encoded anew")

    def slots_are_shared(self) -> None:
        """Lets a second sequence join each slot while its writer runs, and a third one after the output is freed."""
        with self.open() as player:
            player.encode(self.items)
            for number, item in enumerate(self.items):
                first, second = player.begin([item, item])
                second.slot = first.slot
                player.step([first], started=[first], written=[first])
                player.step([first, second], started=[second])
                player.finish([first, second])
                player.free([item])
                third = player.begin([item])[0]
                third.slot = first.slot
                player.step([third], started=[third])
                player.finish([third])
                for joined, how in ((second, "another sequence wrote"), (third, "a sequence wrote that has ended")):
                    self.compare([tuple(joined.sampled)], f"in a slot that {how}", first=number)

    def replayed_as_whole(self) -> None:
        """Samples half of the tokens, ends all sequences, and starts them again in other pages and slots."""
        if self.max_tokens == 1:
            return
        with self.open() as player:
            player.encode(self.items)
            running = player.begin(self.items)
            player.step(running, started=running, written=running)
            for _ in range(self.max_tokens // 2 - 1):
                player.step(running)
            player.end(running)
            places = [(sequence.slot, sequence.pages) for sequence in running]
            for sequence, (slot, pages) in zip(running, [*places[1:], places[0]], strict=True):
                sequence.slot, sequence.pages, sequence.fed = slot, pages, 0
            player.step(running, started=running, written=running)
            player.finish(running)
            sampled = [tuple(sequence.sampled) for sequence in running]
            self.compare(sampled, "started again with what it had sampled")

    def probes_are_answered(self) -> None:
        """Plays sequences that have a probe in the middle of their prompts."""
        with self.open() as player:
            ids = (0, player.description.vocabulary_size - 1)
            items = [evolve(item, probe=Probe(position=len(item.prompt) // 2, token_ids=ids)) for item in self.items]
            player.encode(items)
            alone = [self.answer(player.run([item])[0]) for item in items]
            for chunk in (None, 1, 2):
                for sequence, true in zip(player.run(items, chunk=chunk), alone, strict=True):
                    got = self.answer(sequence)
                    if not all(abs(one - other) <= self.tolerance for one, other in zip(got, true, strict=True)):
                        self.fail(
                            f"the probe of {sequence.item.key} gets {got} in a batch, fed in pieces of {chunk or 'any'}"
                            f" length; alone it gets {true}"
                        )

    def memory_is_told(self) -> None:
        with self.open() as player:
            before = player.held()
            if before <= 0:
                self.fail(f"an open adapter reports {before} bytes; allowed: more than 0")
            for item in self.items:
                player.encode([item])
                after = player.held()
                if after <= before:
                    self.fail(f"the adapter reports {before} bytes before it encodes {item.key}, and {after} after")
                before = after

    def free_gives_back(self) -> None:
        with self.open() as player:
            self.round(player)  # a first round, since memory that is allocated once, at the first use, does not count
            before = player.owned()
            self.one_by_one(player)
            self.round(player)
            after = player.owned()
            if after != before:
                self.fail(f"the adapter owns {before} bytes before a round of work, {after} after it; allowed: as many")
        if __debug__:
            self.free_of_nothing()

    def round(self, player: Player) -> None:
        """Encodes all items in one batch, decodes them, and frees the outputs one by one."""
        player.encode(self.items)
        self.compare(player.decode(self.items), "encoded again after it was freed")
        for number in range(len(self.items)):
            self.free_one(player, number, None)

    def one_by_one(self, player: Player) -> None:
        """Checks that each free gives back the bytes that the encoding took."""
        taken = []
        for item in self.items:
            before = player.held()
            player.encode([item])
            taken.append(player.held() - before)
        for number, share in enumerate(taken):
            self.free_one(player, number, share)

    def free_one(self, player: Player, number: int, share: int | None) -> None:
        """Frees an output, which must give ``share`` bytes back. ``None``: any bytes, since the output was encoded in a
        batch."""
        before = player.held()
        player.free([self.items[number]])
        given = before - player.held()
        if given <= 0 if share is None else given != share:
            allowed = "more than 0, since they were encoded in one batch"
            allowed = allowed if share is None else f"{share}, which its encoding took"
            self.fail(
                f"when {number + 1} of {len(self.items)} outputs were freed, the last one gave {given} bytes back; "
                f"allowed: {allowed}"
            )

    def free_of_nothing(self) -> None:
        """Frees a key that was never encoded, and a key that was freed already."""
        never, once, *_ = self.items
        with self.open() as player:
            player.encode([once])
            player.free([once])
            for item in (never, once):
                try:
                    player.free([item])
                except AssertionError:
                    continue
                self.fail(f"{item.key} is not there, and freeing it raises nothing; allowed: AssertionError")

    def instances_apart(self) -> None:
        with self.open() as one:
            one.encode(self.items)
            with self.open() as other:
                other.encode(self.items[:1])
                self.compare(one.decode(self.items), "while another adapter is open")
                self.compare(other.decode(self.items[:1]), "in the second adapter")
            self.compare(one.decode(self.items), "after another adapter was closed")

    def asleep_is_empty(self) -> None:
        for keep_weights in (True, False):
            with self.open() as player:
                sleep = partial(player.adapter.sleep, keep_weights=keep_weights)
                allowed = player.held() if keep_weights else 0
                self.leave_in_the_middle(player)
                self.refused(player, "wake of an adapter that is awake", player.adapter.wake)
                sleep()
                self.holds_at_most(player, allowed, "an adapter that sleeps")
                player.adapter.reset()
                self.holds_at_most(player, allowed, "an adapter that sleeps and was reset")
                self.refused(player, "a second sleep", sleep)
                for call, what in ((player.encode, "to encode"), (player.free, "to free"), (player.run, "a step")):
                    self.refused(player, f"{what} asleep", partial(call, self.items))
                player.adapter.close()
                self.holds_at_most(player, 0, "an adapter that was closed while it slept")

    def leave_in_the_middle(self, player: Player) -> None:
        """Leaves outputs resident and sequences running."""
        player.encode(self.items)
        running = player.begin(self.items)
        player.step(running, started=running, written=running)

    def refused(self, player: Player, what: str, call: Callable[[], object]) -> None:
        if not __debug__:
            return
        before, refused = player.owned(), False
        try:
            call()
        except AssertionError:
            refused = True
        if not refused:
            self.fail(f"{what} raises nothing; allowed: AssertionError")
        if player.owned() != before:
            self.fail(f"{what} is refused, but changes how many bytes the adapter owns")

    def holds_at_most(self, player: Player, allowed: int, who: str) -> None:
        if player.held() > allowed:
            self.fail(f"{who} holds {player.owned()} bytes; allowed: {allowed}")

    def wakes_as_opened(self) -> None:
        """Sleeps and wakes twice, since memory that a wake wrongly keeps may show only at the second time."""
        for keep_weights in (True, False):
            with self.open() as player:
                opened = player.owned()
                for _ in range(2):
                    self.leave_in_the_middle(player)
                    player.adapter.sleep(keep_weights=keep_weights)
                    player.adapter.wake()
                    if player.owned() != opened:
                        self.fail(f"the adapter owns {opened} bytes when it opens, {player.owned()} when it wakes")
                    player.encode(self.items)
                    self.compare(player.decode(self.items), "after its adapter slept and woke")
                    player.free(self.items)

    def bytes_are_true(self) -> None:
        live_bytes = self.live_bytes
        if live_bytes is None:
            return

        def check(player: Player, how: str) -> None:
            told, live = player.held(), live_bytes() - before
            if told != live:
                self.fail(f"{how}, the adapter reports {told} bytes, but {live} bytes are alive")

        gc.collect()  # else earlier objects in reference cycles could die meanwhile
        before = live_bytes()
        with self.open() as player:
            check(player, "as opened")
            player.encode(self.items)
            player.decode(self.items)
            check(player, "at rest")
            player.adapter.sleep(keep_weights=True)
            check(player, "asleep")
            player.adapter.wake()
            check(player, "awake")
            player.adapter.close()
            check(player, "closed")

    def closed_is_empty(self) -> None:
        with self.open() as player:
            player.encode(self.items)
            player.decode(self.items)
        for _ in range(2):
            if left := player.owned():
                self.fail(f"a closed adapter owns {left} bytes; allowed: 0")
            player.adapter.close()

    def answer(self, sequence: PlayedSequence) -> tuple[float, ...]:
        """Returns the answer to the sequence's probe, after checking that there is exactly one."""
        key, probe = sequence.item.key, sequence.item.probe
        assert probe is not None, "only a sequence with a probe is asked for its answer"
        if len(sequence.probed) != 1:
            self.fail(f"the probe of {key} has {len(sequence.probed)} answers; allowed: 1")
        part, answer = sequence.probed[0]
        if not part.start <= probe.position < part.start + part.length:
            where = f"a chunk of {part.length} from {part.start}"
            self.fail(f"the probe of {key} at position {probe.position} gets its answer from {where}")
        if len(answer) != len(probe.token_ids):
            self.fail(f"the probe of {key} gets {answer}; allowed: a number for each of {probe.token_ids}")
        return answer


_CHECKS: dict[str, Callable[[_Check], None]] = {
    "payloads are heard": _Check.payloads_are_heard,
    "batched as alone": _Check.batched_as_alone,
    "chunked as whole": _Check.chunked_as_whole,
    "outputs are copies": _Check.outputs_are_copies,
    "slots are shared": _Check.slots_are_shared,
    "replayed as whole": _Check.replayed_as_whole,
    "probes are answered": _Check.probes_are_answered,
    "memory is reported": _Check.memory_is_told,
    "free gives back": _Check.free_gives_back,
    "instances apart": _Check.instances_apart,
    "closed is empty": _Check.closed_is_empty,
    "asleep is empty": _Check.asleep_is_empty,
    "wakes as opened": _Check.wakes_as_opened,
    "bytes are true": _Check.bytes_are_true,
}

ADAPTER_INVARIANTS = tuple(_CHECKS)


def check_model_adapter(
    make_adapter: MakeAdapter,
    payloads: Sequence[Any],
    *,
    prompts: Sequence[tuple[int, ...]] | None = None,
    max_tokens: int = 6,
    tolerance: float = 1e-3,
    live_bytes: Callable[[], int] | None = None,
) -> None:
    """Checks an adapter's promises on ``payloads``. Each payload is encoded under a key of its own.

    Args:
        make_adapter: makes an adapter that is not open yet. It is called often, so its model should be tiny.
        payloads: three or more payloads for `Executor.encode`, as different as possible, since equal outputs are a
            violation.
        prompts: token ids, one prompt for each payload, of several lengths. By default each prompt is Whisper's start
            token with some made-up tokens after it.
        max_tokens: how many tokens are sampled for each payload; end-of-text ends no sequence.
        tolerance: the largest difference, in nats, between log-probabilities.
        live_bytes: returns how many bytes of tensors are alive in this process, as `live_bytes` of `triolet_testing`
            does for Python's tensors. ``None``: the adapter's own numbers are trusted.

    Raises:
        InvariantViolation: a promise is broken; its cause is the adapter's error, if there was one.
        ValueError: there are too few payloads, the numbers of prompts and payloads differ, or the model is too small
            for all at once.
        Exception: the adapter raised this error with a single item.
    """
    if len(payloads) < LEAST_PAYLOADS:
        raise ValueError(f"{len(payloads)} payloads are given; allowed: {LEAST_PAYLOADS} or more")
    adapter = make_adapter()
    try:
        description = adapter.open()
    finally:
        adapter.close()
    chosen = _default_prompts(description, len(payloads)) if prompts is None else [tuple(prompt) for prompt in prompts]
    if len(chosen) != len(payloads):
        raise ValueError(f"{len(chosen)} prompts are given; allowed: {len(payloads)}, one for each payload")
    _check_room(description, chosen, max_tokens)
    items = tuple(
        Item(f"item {number}", payload, prompt)
        for number, (payload, prompt) in enumerate(zip(payloads, chosen, strict=True))
    )
    _Check(make_adapter, items, max_tokens, tolerance, live_bytes).run()


def _default_prompts(description: ModelDescription, count: int) -> list[tuple[int, ...]]:
    """Returns prompts of the start token and up to two pages of other tokens, so that some prompts end within a
    page."""
    if description.start_id is None:
        raise ValueError(
            f"no prompts are given, and {description.architecture} has no start token to make prompts; give prompts="
        )
    start, vocabulary = description.start_id, description.vocabulary_size
    lengths = [1 + number * (description.page_size - 1) % (2 * description.page_size) for number in range(count)]
    return [
        (start, *((7 * place + 3 * number + 2) % vocabulary for place in range(1, lengths[number])))
        for number in range(count)
    ]


def _check_room(description: ModelDescription, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> None:
    """Raises `ValueError` unless all sequences fit at once, each with as many pages as the longest one needs."""
    count, longest = len(prompts), max(len(prompt) for prompt in prompts) + max_tokens
    if longest > description.max_positions:
        raise ValueError(
            f"a prompt and its sampled tokens have {longest} tokens together; allowed: up to "
            f"{description.max_positions}"
        )
    pages = count * -(-longest // description.page_size)
    if pages > description.pages or count > description.cross_slots:
        raise ValueError(
            f"{count} sequences at once need {pages} pages and {count} cross slots; the model has "
            f"{description.pages} and {description.cross_slots}; give the model more, or give fewer payloads or "
            "shorter prompts"
        )
