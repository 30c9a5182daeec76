"""The table of mutants: pages shared by content, placeholders among the tokens, draft tokens, whole prompts."""

from __future__ import annotations

from . import test_planner, test_prefix
from .mutants import PAGES, PLANNER, SHARING, WHOLE_PROMPTS, Mutant

LOST = test_planner.test_who_has_lost_its_cached_pages_starts_without_them_whatever_comes_back
KEYS = test_prefix.test_equal_keys_mean_equal_prefixes

MUTANTS: tuple[Mutant, ...] = (
    # keys
    Mutant(
        name="pages are found whatever tokens they hold",
        function="core.planning.prefix:page_key",
        fragment='array("q", token_ids).tobytes()',
        mistake='b""',
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages are found whatever image lies in them",
        function="core.planning.prefix:page_key",
        fragment='(repr(marks).encode() if marks else b"")',
        mistake='b""',
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages are found whatever comes before them",
        function="core.planning.prefix:page_key",
        fragment="_digest(parent, array",
        mistake='_digest(b"", array',
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages are found wherever in them an image lies",
        function="core.planning.prefix:_marks",
        fragment="first - start, last - start, before",
        mistake="0, last - first, before",
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages are found whichever part of an image lies in them",
        function="core.planning.prefix:_marks",
        fragment="last - start, before",
        mistake="last - start, 0",
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages are found whichever image it is",
        function="core.planning.prefix:_marks",
        fragment="(placeholder.key, ",
        mistake='("", ',
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages of other weights are found",
        function="core.planning.prefix:root_key",
        fragment="(identity, cross_key)",
        mistake="(cross_key,)",
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="pages of other audio are found",
        function="core.planning.prefix:root_key",
        fragment="(identity, cross_key)",
        mistake="(identity,)",
        killer=KEYS,
        reason="one key for two contents",
    ),
    Mutant(
        name="where an image lies counts from the prompt's beginning",
        function="core.planning.prefix:PageKeys._compute_next",
        fragment="start, placeholders))",
        mistake="start, ()))",
        killer=KEYS,
        reason="one key for two contents",
    ),
    # pages
    Mutant(
        name="a content is listed twice",
        function="core.planning.pages:PageAllocator.list_as",
        fragment="if key not in self._listed and page not in self._keys:",
        mistake="if page not in self._keys:",
        killer=PAGES,
        reason=("what is listed is found", "books balance", "least recently used", "del self._listed"),
    ),
    Mutant(
        name="the first user who gives a page back frees it",
        function="core.planning.pages:PageAllocator.give_back",
        fragment="if self._users[page]:",
        mistake="if self._users[page] < 0:",
        killer=PAGES,
        reason=("books balance", "no page is taken from its users", "it is not taken"),
    ),
    Mutant(
        name="a cached page that is joined can still be taken",
        function="core.planning.pages:PageAllocator.join",
        fragment="        self._cached.pop(page, None)\n",
        mistake="",
        killer=PAGES,
        reason=("books balance", "no page is taken from its users", "least recently used first"),
    ),
    Mutant(
        name="a page that is joined has no more users than before",
        function="core.planning.pages:PageAllocator.join",
        fragment="self._users.get(page, 0) + 1",
        mistake="1",
        killer=PAGES,
        reason=("books balance", "no page is taken from its users", "it is not taken"),
    ),
    Mutant(
        name="the page that was cached last is evicted first",
        function="core.planning.pages:PageAllocator._pop",
        fragment="last=False",
        mistake="last=True",
        killer=PAGES,
        reason="least recently used first",
    ),
    Mutant(
        name="the beginning of a text loses its place before its end",
        function="core.planning.pages:PageAllocator.give_back",
        fragment="reversed(pages)",
        mistake="pages",
        killer=PAGES,
        reason="least recently used first",
    ),
    Mutant(
        name="what was evicted is still found",
        function="core.planning.pages:PageAllocator._pop",
        fragment="del self._listed[self._keys.pop(page)]",
        mistake="self._keys.pop(page)",
        killer=PAGES,
        reason=("no phantom", "and no more", "it is not listed"),
    ),
    Mutant(
        name="cached pages are evicted while others are free",
        function="core.planning.pages:PageAllocator._pop",
        fragment="if self._free:",
        mistake="if self._free and not self._cached:",
        killer=PAGES,
        reason="least recently used first",
    ),
    Mutant(
        name="pages behind one that is gone are found",
        function="core.planning.pages:PageAllocator.find",
        fragment="takewhile(",
        mistake="filter(",
        killer=PAGES,
        reason="the longest beginning is found",
    ),
    Mutant(
        name="pages whose content is lost are lost themselves",
        function="core.planning.pages:PageAllocator.forget_contents",
        fragment="    self._free.extend(reversed(self._cached))\n",
        mistake="",
        killer=PAGES,
        reason="books balance",
    ),
    # what is found
    Mutant(
        name="a restart forgets nothing of what was in the pages",
        function="core.planning.room:Room.generation_lost",
        fragment="    self.pages.forget_contents()\n",
        mistake="",
        killer=test_planner.test_nothing_is_found_of_what_was_in_the_pages_before_a_restart,
        reason="holds another sequence's KV",
    ),
    Mutant(
        name="a page is listed when its step is planned",
        function="core.planning.planner:Planner._chunk",
        fragment="    sequence.dispatched = part.start + part.length\n",
        mistake=(
            "    sequence.dispatched = part.start + part.length\n"
            "    fed, sequence.fed = sequence.fed, sequence.dispatched\n"
            "    self._room.list_pages(sequence)\n"
            "    sequence.fed = fed\n"
        ),
        killer=SHARING,
        reason="once answered steps have filled it",
    ),
    Mutant(
        name="a page is listed though its step has failed",
        function="core.planning.planner:Planner._unanswered",
        fragment="        sequence.sampling -= chunk.samples\n",
        mistake=(
            "        sequence.sampling -= chunk.samples\n"
            "        if sequence.pages:\n"
            "            sequence.fed = chunk.start + chunk.length\n"
            "            self._room.list_pages(sequence)\n"
        ),
        killer=SHARING,
        reason=("once answered steps have filled it", "holds another sequence's KV"),
    ),
    Mutant(
        name="what was guessed wrong is listed",
        function="core.planning.planner:Planner._chunk_done",
        fragment="sequence.fed = chunk.start + chunk.length + accepted",
        mistake="sequence.fed = chunk.start + chunk.length + chunk.draft_tokens",
        killer=SHARING,
        reason="once answered steps have filled it",
    ),
    Mutant(
        name="the last token is found in a cached page",
        function="core.planning.sequence:Sequence.most_cached",
        fragment="len(self.tokens) - 1",
        mistake="len(self.tokens)",
        killer=SHARING,
        reason=("a request never ended", "every position is fed once"),
    ),
    Mutant(
        name="what a request asks about is found in a cached page",
        function="core.planning.sequence:Sequence.most_cached",
        fragment="most = min(most, self.request.probe.position)",
        mistake="pass",
        killer=test_planner.test_what_a_request_asks_about_its_prompt_is_never_found_in_pages_that_are_cached,
        reason="is answered",
    ),
    Mutant(
        name="a mean is taken over what was not found in cached pages",
        function="core.planning.sequence:Sequence.most_cached",
        fragment='("mean", "cls")',
        mistake="()",
        killer=SHARING,
        reason="positions were not fed",
    ),
    Mutant(
        name="cached pages that one joins who starts are room for the next one",
        function="core.planning.acts:Acts._try_admit",
        fragment="    draft.pages -= self._unused(draft, cached)\n",
        mistake="",
        killer=test_planner.test_who_starts_joins_cached_pages_that_the_next_one_cannot_have,
        reason="drafted with pages that are not there",
    ),
    Mutant(
        name="what lies in cached pages is fed again",
        function="core.planning.acts:Acts._try_admit",
        fragment="draft.add(Part(sequence, start, length",
        mistake="draft.add(Part(sequence, 0, length",
        killer=SHARING,
        reason=("every position is fed once", "written while another sequence uses it"),
    ),
    # placed items
    Mutant(
        name="a request asks for more images than fit together",
        function="core.planning.holds:EncoderHolds.group",
        fragment="if chosen and left < 0:",
        mistake="if chosen and left < -(1 << 40):",
        killer=SHARING,
        reason="a request never ended",
    ),
    Mutant(
        name="a request asks for images while it holds others",
        function="core.planning.holds:EncoderHolds.release_read",
        fragment="return not self.keys(sequence) and",
        mistake="return",
        killer=SHARING,
        reason="would wait for encoder outputs while it holds others",
    ),
    Mutant(
        name="images that have been read are kept",
        function="core.planning.holds:EncoderHolds.release_read",
        fragment="        self._release(sequence, key)\n",
        mistake="        pass\n",
        killer=SHARING,
        reason="an image that has been read is given back",
    ),
    Mutant(
        name="images are given back when the step that reads them is planned",
        function="core.planning.planner:Planner._dispatch",
        fragment="    self._to_forget = []\n",
        mistake=(
            "    self._to_forget = []\n"
            "    for part in draft.parts:\n"
            "        fed, part.sequence.fed = part.sequence.fed, part.stop\n"
            "        self._holds.release_read(part.sequence)\n"
            "        part.sequence.fed = fed\n"
        ),
        killer=SHARING,
        reason=("no use before ready", "it is not resident"),
    ),
    Mutant(
        name="an image that comes twice is given back after its first place",
        function="core.planning.placeholders:PlaceholderItems.__attrs_post_init__",
        fragment="max(placeholder.stop, self._last_stops.get(placeholder.key, 0))",
        mistake="min(placeholder.stop, self._last_stops.get(placeholder.key, placeholder.stop))",
        killer=SHARING,
        reason=("[key].holder", "a request never ended", "has a chunk in that very step"),
    ),
    Mutant(
        name="an image is read before it is there",
        function="core.planning.acts:Acts._wanted",
        fragment="stop if reach is None else min(stop, reach)",
        mistake="stop",
        killer=SHARING,
        reason=("[key].holder", "no use before ready"),
    ),
    Mutant(
        name="an image is asked for and not waited for",
        function="core.planning.holds:EncoderHolds.held",
        fragment=" if hold.ready",
        mistake="",
        killer=SHARING,
        reason=("no use before ready", "it is not resident"),
    ),
    Mutant(
        name="after a restart encoder outputs that are gone count as held",
        function="core.planning.holds:EncoderHolds.generation_lost",
        fragment="hold.ready = False",
        mistake="pass",
        killer=test_planner.test_after_a_restart_nobody_reads_an_encoder_output_before_it_is_encoded_again,
        reason="no use before ready",
    ),
    Mutant(
        name="who waits for a place keeps the room that a running one waits for",
        function="core.planning.acquirer:Acquirer._withdraw_for",
        fragment="if last is None or",
        mistake="if True or",
        killer=SHARING,
        reason="a request never ended",
    ),
    Mutant(
        name="who starts behind cached pages waits with the images that they hold",
        function="core.planning.acquirer:Acquirer.waits",
        fragment="    if sequence.placeholders:\n        self.release(sequence)\n",
        mistake="",
        killer=LOST,
        reason="it asks for what they held",
    ),
    Mutant(
        name="a running request keeps images that it needs only behind others",
        function="core.planning.holds:EncoderHolds.release_read",
        fragment="        self.release_all(sequence)\n",
        mistake="        pass\n",
        killer=SHARING,
        reason="a request never ended",
    ),
    Mutant(
        name="a request that is waiting for its images again changes its mind",
        function="core.planning.planner:Planner._move",
        fragment="        sequence.shuns_cache = bool(sequence.placeholders and self._holds.keys(sequence))\n",
        mistake="",
        killer=LOST,
        reason="it starts without them",
    ),
    # guesses
    Mutant(
        name="guesses go beyond the last token that is wanted",
        function="core.planning.acts:Acts._propose",
        fragment="sequence.left - 1",
        mistake="sequence.left",
        killer=PLANNER,
        reason="no guess beyond the last token",
    ),
    Mutant(
        name="guesses do not count as tokens of the step",
        function="core.planning.acts:Acts._propose",
        fragment="        draft.tokens -= part.draft_tokens\n",
        mistake="",
        killer=PLANNER,
        reason="the token budget is kept",
    ),
    Mutant(
        name="somebody gives way to a guess",
        function="core.planning.acts:Acts._propose",
        fragment="        pages = min(max(0, self.room.pages_for(sequence, part.stop + most) - had), draft.pages)\n",
        mistake=(
            "        pages = max(0, self.room.pages_for(sequence, part.stop + most) - had)\n"
            "        if pages > draft.pages:\n"
            "            victim = next(other for other in self.room.running if other is not sequence)\n"
            "            draft.preempt(victim, len(victim.pages))\n"
            "            draft.parts = [other for other in draft.parts if other.sequence is not victim]\n"
        ),
        killer=test_planner.test_guesses_cost_nobody_a_page_that_is_in_use,
        reason="gave way to a guess",
    ),
    Mutant(
        name="guesses are written behind the last page",
        function="core.planning.acts:Acts._propose",
        fragment="min(most, (had + pages) * self.limits.page_size - part.stop)",
        mistake="most",
        killer=test_planner.test_guesses_cost_nobody_a_page_that_is_in_use,
        reason="IndexError",
    ),
    Mutant(
        name="accepted tokens are fed again",
        function="core.planning.planner:Planner._chunk_done",
        fragment="        sequence.dispatched += accepted\n",
        mistake="",
        killer=PLANNER,
        reason="every position is fed once",
    ),
    Mutant(
        name="a step is planned behind guesses of which nobody knows how many are right",
        function="core.planning.acts:Acts._split",
        fragment=" or sequence.drafting",
        mistake="",
        killer=SHARING,
        reason=("every position is fed once", "sampled before the last one is fed"),
    ),
    Mutant(
        name="tokens behind the last one are committed",
        function="core.planning.planner:Planner._commit_tokens",
        fragment="given[: len(sequence.tokens) - before]",
        mistake="given",
        killer=PLANNER,
        reason=("committed_tokens_are_a_prefix_of_the_true_ones", "tokens are missing"),
    ),
    # whole prompts
    Mutant(
        name="a whole prompt is started in a step that has no room for it",
        function="core.planning.acts:Acts._first_share",
        fragment="wanted if wanted <= draft.tokens or not draft.parts else 0",
        mistake="wanted",
        killer=WHOLE_PROMPTS,
        reason="the token budget is kept",
    ),
    Mutant(
        name="a whole prompt is cut",
        function="core.planning.acts:Acts._first_share",
        fragment="wanted if wanted <= draft.tokens or not draft.parts else 0",
        mistake="min(wanted, draft.tokens)",
        killer=WHOLE_PROMPTS,
        reason="a whole prompt is one chunk",
    ),
    Mutant(
        name="a whole prompt holds pages",
        function="core.planning.room:Room.pages_for",
        fragment="0 if self.limits.whole_prompts else ",
        mistake="",
        killer=WHOLE_PROMPTS,
        reason=("a whole prompt holds no pages", "a request never ended"),
    ),
    Mutant(
        name="a whole prompt that is too large is tried again for ever",
        function="core.planning.planner:Planner._divisible",
        fragment=" or self.limits.whole_prompts",
        mistake="",
        killer=test_planner.test_a_whole_prompt_that_is_too_large_for_the_memory_fails,
        reason="tried again for ever",
    ),
)
