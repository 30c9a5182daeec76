"""CTC models and transducers as a `Network`: an encoder output is read frame by frame, greedily, for all sequences of a
step together.

A token is an emission, and the blank is the end of the text. A prompt has the blank, and perhaps the tokens of the
audio before; no frame is searched between them. A step feeds one token to each sequence's prediction network, then
searches the frames for the next emission. Blanks on the way cost no step. A sequence that starts anew feeds its tokens
again and searches between those after its prompt, so that it comes to the same frame.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from ...core.emissions import Emissions, Place
from ...core.plan import AlignedTokens
from ...core.request import EncoderItem
from ..architectures.frame_family import FrameFamily
from ..memory.encoder_outputs import EncoderOutputs
from ..memory.frame_states import FrameSlots, FrameStates
from ..memory.module import TransformerModel
from ..memory.rows import Rows, slot_of
from ..native.runner import Runner
from ..sampling.logits import largest
from .ctc_path import best_path
from .item_encoder import ItemEncoder
from .network import Feed, Network, Record

_LSTM = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # the weights of a layer
AHEAD = 4  # frames whose scores are computed together: a token has three or four frames on average


@frozen(kw_only=True, eq=False)
class FrameNetwork(Network):
    """A CTC model or a transducer as a network."""

    model: TransformerModel
    family: FrameFamily
    emissions: Emissions
    states: FrameStates
    slots: FrameSlots
    encoder: ItemEncoder
    reader: Runner | None = None  # computes the prediction and joint networks; None: torch computes them
    positions: int
    vocabulary: int
    device: torch.device

    def encode(self, jobs: Sequence[EncoderItem]) -> Sequence[Tensor]:
        return self.encoder.encode(jobs)

    def write_cross(self, slot: int, output: Tensor) -> None:
        self.slots.write(slot, output)

    def start(self, record: Record) -> None:
        start = record.start
        aligns = start.alignment is not None and self.family.predicts
        asked = start.placeholders or start.pooling or start.probe or record.search or aligns
        assert not asked, f"sequence {start.sequence_id} asks for {asked}, but frames are read greedily"

    def logits(
        self,
        feeds: Sequence[Feed],
        wanted: Sequence[tuple[int, int]],
        outputs: EncoderOutputs,  # noqa: ARG002  (slots have them)
    ) -> Tensor:
        given, fed = [feed.tokens for feed in feeds], list[tuple[Feed, int]]()
        for offset in range(max(map(len, given))):
            self._score((), fed)
            now = [(feed, tokens[offset]) for feed, tokens in zip(feeds, given, strict=True) if offset < len(tokens)]
            for feed, _ in now:
                if feed.part.start + offset == 0:
                    self._begin(feed)
            after = [feed for feed, _ in now if feed.part.start + offset >= feed.record.start.prompt_length]
            self._search([feed for feed in after if not _place(feed).searched])
            fed = [(feed, token) for feed, token in now if feed.part.start + offset >= _place(feed).known]
            for feed, _ in fed:
                _place(feed).searched = False
        return self._search([feeds[index] for index, _ in wanted], fed)

    def _begin(self, feed: Feed) -> None:
        """Begins a sequence, perhaps with the state of the text that its prompt is."""
        start, page = feed.record.start, feed.part.page_table[0]
        prompt = start.token_ids[: start.prompt_length]
        feed.record.notes = place = self.emissions.begin(self.slots.lengths[slot_of(feed.part)])
        place.known = len(prompt) if self.states.begin(page, prompt) else 0
        place.searched = not place.known

    def align(
        self,
        feeds: Sequence[Feed],
        outputs: EncoderOutputs,  # noqa: ARG002  (slots have them)
    ) -> list[AlignedTokens | None]:
        return [self._path(feed) if feed.part.samples else None for feed in feeds]

    def _path(self, feed: Feed) -> AlignedTokens:
        """Returns the frames of the tokens of a prompt on their likeliest path."""
        start, slot = feed.record.start, slot_of(feed.part)
        assert start.alignment is not None, "only a sequence with an alignment is aligned"
        frames = torch.arange(self.slots.lengths[slot], device=self.device)
        scores = self._scores(torch.full_like(frames, slot), frames, frames)[:, : self.vocabulary]
        tokens = feed.record.tokens[start.alignment.start : start.prompt_length]
        return best_path(scores.log_softmax(-1).cpu().numpy(), tokens, self.emissions.blank)

    def _predict(self, fed: Sequence[tuple[Feed, int]]) -> None:
        """Feeds a token to the prediction network of each sequence, by torch."""
        if not self.family.predicts or not fed:
            return
        places, tokens = torch.tensor([(feed.part.page_table[0], token) for feed, token in fed], device=self.device).T
        decoder = self.model.module.decoder
        rows = decoder.embedding(tokens)
        for layer in range(decoder.lstm.num_layers):
            weights = [getattr(decoder.lstm, f"{name}_l{layer}") for name in _LSTM]
            cells = self.states.cells[:, layer]
            rows, kept = torch.lstm_cell(rows, (cells[places, 0], cells[places, 1]), *weights)
            cells[places, 0], cells[places, 1] = rows, kept
        self.states.predicted[places] = decoder.decoder_projector(rows)

    def _scores(self, slots: Tensor, frames: Tensor, pages: Tensor) -> Tensor:
        """Returns the scores of the labels and durations, float32 [rows, vocabulary + durations], for pairs of a frame
        in a slot and a state."""
        module, read = self.model.module, self.slots.pool[slots, frames]
        scores: Tensor
        if self.family.predicts:
            scores = module.joint(decoder_hidden_states=self.states.predicted[pages], encoder_hidden_states=read)
        else:
            scores = module.ctc_head(read[None])[0]
        return scores.float()

    def _score(self, spans: Sequence[tuple[Feed, int, int]], fed: Sequence[tuple[Feed, int]]) -> Tensor:
        """Feeds a token to the prediction network of each sequence in ``fed``. Then returns the `_scores` of the frames
        ``[first, stop)`` of some sequences."""
        if self.reader is None or not (spans or fed):
            self._predict(fed)
            rows = [
                (slot_of(feed.part), frame, feed.part.page_table[0])
                for feed, first, stop in spans
                for frame in range(first, stop)
            ]
            return self._scores(*torch.tensor(rows, device=self.device).T) if rows else torch.empty(0)
        tokens = {feed.part.page_table[0]: token for feed, token in fed}
        scored = {feed.part.page_table[0] for feed, _, _ in spans}
        every = [
            *spans,
            *((feed, 0, 1) for feed, _ in fed if feed.part.page_table[0] not in scored),
        ]  # any frame will do
        frames = torch.cat([self.slots.pool[slot_of(feed.part), first:stop] for feed, first, stop in every])
        given, wanted = [0] * len(frames), list[int]()
        chunks, states, row = [(stop - first, 0, 0, 0) for _, first, stop in every], list[Tensor](), 0
        for feed, first, stop in every:
            page = feed.part.page_table[0]
            states.append(self.states.cells[page])
            if page in tokens:
                wanted.append(row)
                given[row] = tokens[page]
            row += stop - first
        rows_of = Rows(positions=[0] * row, chunks=chunks, tables=(), wanted=wanted, states=states)
        return self.reader.read(frames, given if fed else (), rows_of, scores=bool(spans))

    def _search(self, feeds: Sequence[Feed], fed: Sequence[tuple[Feed, int]] = ()) -> Tensor:
        """Feeds tokens, searches the next emission of each sequence, and notes its frames in the record. Returns its
        logits [feeds, vocabulary]; if nothing is left, only the blank is possible."""
        logits = torch.full((len(feeds), self.vocabulary), -torch.inf, dtype=torch.float32, device=self.device)
        logits[:, self.emissions.blank] = 0.0
        places = list(map(_place, feeds))
        for place in places:
            place.searched, place.emitted = True, None
        left = [index for index, place in enumerate(places) if not place.over]
        while left or fed:
            stops = [min(places[index].frame + AHEAD, places[index].frames) for index in left]
            spans = [(feeds[index], places[index].frame, stop) for index, stop in zip(left, stops, strict=True)]
            scores, fed = self._score(spans, fed), ()
            if not left:
                break
            labels = largest(scores[:, : self.vocabulary]).tolist()
            durations = largest(scores[:, self.vocabulary :]).tolist() if self.emissions.durations else ()
            row, again = 0, []
            for index, stop in zip(left, stops, strict=True):
                place, count = places[index], stop - places[index].frame
                found = self.emissions.search(place, labels[row : row + count], durations[row : row + count])
                if found is not None:
                    logits[index] = scores[row + found, : self.vocabulary]
                elif not place.over:
                    again.append(index)
                row += count
            left = again
        for feed, place in zip(feeds, places, strict=True):
            feed.record.frames = place.emitted
            read = tuple(feed.record.tokens[: feed.part.start + feed.part.length])
            ended = len(read) > 1 and read[-1] == self.emissions.blank  # by a step that was sent ahead
            if self.family.causal and place.emitted is None and not ended:
                self.states.keep(feed.part.page_table[0], read)  # the text may go on with another piece of the audio
        return logits


def _place(feed: Feed) -> Place:
    """Returns the sequence's place in its encoder output, which the record keeps."""
    place = feed.record.notes
    assert isinstance(place, Place), f"sequence {feed.part.sequence_id} was not read from its first token on"
    return place
