"""Structured output: whatever a model's logits are, what it writes follows the structure, alone, in a batch, replayed
and guessed ahead."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
from typing import Any

import pytest
import torch
from attrs import evolve
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from triolet.core.errors import InvalidRequest
from triolet.core.request import LogitRules, SamplingParams, Structure
from triolet.models.sampling.grammar import exact, grammar_of
from triolet.models.sampling.rules import SamplerInput
from triolet.models.sampling.structure import Grammars, Guide, Tried, fault_of

from ..checkpoints.words import QWEN
from .conftest import Ids, make_tokenizer
from .texts import sample_tokens

IDS = Ids()
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"enum": ["kitchen", "hall"]}},
    "required": ["on", "room"],
    "additionalProperties": False,
}
STRUCTURES = {
    "json": Structure.json_schema(SCHEMA),
    "regex": Structure(kind="regex", text=r"[0-9]{2,4}(é|ü)"),
    "lark": Structure(kind="lark", text='start: "go" (" " WORD)+ "."\nWORD: /[a-c]{1,3}/'),
    "choice": Structure.choice(["yes", 'n"o\n', "ja 😀"]),
}
RIGHT = {
    "json": lambda text: set(json.loads(text)) == {"on", "room"},
    "regex": re.compile(r"[0-9]{2,4}(é|ü)").fullmatch,
    "lark": re.compile(r"go( [a-c]{1,3})+\.").fullmatch,
    "choice": {"yes", 'n"o\n', "ja 😀"}.__contains__,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(make_tokenizer, IDS.vocabulary, (IDS.eos, IDS.previous))


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    """Likes closing brackets, so that nothing is repeated for ever."""
    logits = torch.randn(rows, IDS.vocabulary, generator=torch.Generator().manual_seed(seed))
    logits[:, [ord(character) for character in '"}.']] += 2
    return logits


def draw_of(generated: list[int], guide: Guide | None, **sampling: object) -> SamplerInput:
    return SamplerInput(generated=generated, sampling=SamplingParams(**sampling), rules=LogitRules(), guide=guide)


def write(guide: Guide, seed: int, generated: list[int] | None = None) -> list[int]:
    """Draws to the end of the text, by random logits."""
    generated = generated or []
    while not generated or generated[-1] not in {IDS.eos, IDS.previous}:
        assert len(generated) < 200
        draw = draw_of(generated, guide, temperature=1.0, seed=seed)
        (sampled,) = sample_tokens(random_logits(1000 * seed + len(generated)), [draw], (IDS.eos,))
        assert not sampled.error
        generated.append(sampled.token_id)
    return generated


def text_of(tokens: list[int]) -> str:
    return bytes(tokens[:-1]).decode()


@pytest.mark.parametrize("kind", STRUCTURES)
def test_whatever_the_logits_are_the_text_follows_the_structure(kind, grammars):
    for seed in range(8):
        assert RIGHT[kind](text_of(write(grammars.guide(STRUCTURES[kind]), seed)))


def test_when_all_is_written_only_the_ends_of_text_are_left(grammars):
    guide = grammars.guide(Structure.choice(["ab"]))
    allowed = [allowed_by(guide, list(b"ab"[:length])) for length in range(3)]
    assert allowed == [{ord("a")}, {ord("b")}, {IDS.eos, IDS.previous}]
    for _ in range(2):  # a step in flight may draw behind the end: that counts for nothing, and harms nobody
        assert allowed_by(guide, [*b"ab", IDS.eos, 3]) is None
        assert allowed_by(guide, [*b"ab"]) == {IDS.eos, IDS.previous}
    assert not guide.error


def allowed_by(guide: Guide, generated: list[int]) -> set[int] | None:
    bits = guide.allowed(generated)
    if bits is None:
        return None
    return {token for token in range(8 * len(bits)) if bits[token // 8] >> (token % 8) & 1}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_a_replayed_sequence_goes_on_as_it_would_have(kind, grammars):
    tokens = write(grammars.guide(STRUCTURES[kind]), seed=3)
    for length in range(len(tokens)):
        assert write(grammars.guide(STRUCTURES[kind], tokens[:length]), 3, tokens[:length]) == tokens


@pytest.mark.parametrize("kind", STRUCTURES)
def test_what_was_only_guessed_is_taken_back(kind, grammars):
    """One guide, asked for a text and for others that begin as it does, in any order, answers as a new one."""
    structure, chance = STRUCTURES[kind], random.Random(7)
    texts = [write(grammars.guide(structure), seed) for seed in range(6)]
    guide = grammars.guide(structure)
    for _ in range(200):
        text = chance.choice(texts)
        history = text[: chance.randrange(len(text) + 1)]
        assert allowed_by(guide, history) == allowed_by(grammars.guide(structure), history)
        guide.valid(history, chance.choice(texts)[:3])


def test_going_back_behind_a_mask_leaves_the_right_state(grammars):
    """What llguidance's own rollback gets wrong: a colon would be allowed for the key's quotation mark."""
    guide = grammars.guide(Structure.json_schema({**SCHEMA, "x-guidance": {"whitespace_flexible": True}}))
    assert allowed_by(guide, list(b'{  "on":false,"room" ')) == set(b"\t\n\r :")
    assert allowed_by(guide, list(b'{"on": true , ')) == set(b'\t\n\r "')


def test_guesses_are_valid_up_to_the_first_that_the_structure_forbids(grammars):
    guide = grammars.guide(STRUCTURES["regex"])
    assert guide.valid(list(b"1"), list(b"23x4")) == 2
    assert guide.allowed([*b"1", ord("x")]) is None
    assert not guide.error, "a guess was wrong, not the text"
    assert allowed_by(guide, list(b"1")) == set(b"0123456789")


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure(kind="regex", text="(["), "unclosed"),
        (Structure(kind="lark", text="start: A"), "unknown name"),
        (Structure(kind="json_schema", text="{"), "json_schema"),
        (Structure(kind="json_schema", text='{"type": "rhyme"}'), "Invalid type: rhyme"),
        (Structure(kind="choice", text='["a", 1]'), "array of one or more texts"),
        (Structure(kind="choice", text='["a"'), "delimiter"),
        (Structure(kind="choice", text="[]"), "array of one or more texts"),
    ],
    ids=str,
)
def test_a_structure_that_cannot_be_followed_is_told_with_the_reason(structure, message, grammars):
    assert message in fault_of(structure)
    guide = grammars.guide(structure)
    assert message in guide.error
    assert sample_tokens(random_logits(1), [draw_of([], guide)], (IDS.eos,))[0].token_id == IDS.eos


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"type": "string", "format": "date", "allOf": 5}', "allOf must be an array"),
        ('{"type": "string", "enum": 5}', "enum must be an array"),
        ('{"const": 1e-99999999999999999999999}', "#/const=1e-99999999999999999999999; allowed: "),
        ('{"multipleOf": 1e99999999999999999999999}', "#/multipleOf=1e99999999999999999999999; allowed: "),
        ('{"items": {"const": {"a": [1, 9007199254740993]}}}', "#/items/const/a/1=9007199254740993; allowed: "),
        ('{"$ref": "#/a", "a": {"const": 9007199254740993}}', ": #/a/const=9007199254740993; allowed: "),
        ('{"a": ' * 2_000 + "1" + "}" * 2_000, "nested too deeply"),
        (
            '{"propertyNames": {"enum": ["a"]}, "additionalProperties": {"items": {"$ref": "#/additionalProperties"}}}',
            "propertyNames",  # it is valid, but was said to be false
        ),
    ],
)
def test_a_schema_of_another_shape_is_refused_by_name(schema, message):
    """The first ones raised a TypeError and decimal's InvalidOperation."""
    assert message in fault_of(Structure.json_schema(schema))


@pytest.mark.parametrize("error", [TypeError, AttributeError, ZeroDivisionError])
def test_an_error_in_a_check_of_a_schema_is_a_refusal(error, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error("no such thing")

    monkeypatch.setattr("triolet.models.sampling.grammar.exact", fail)
    assert "of another kind than JSON Schema's: no such thing" in fault_of(STRUCTURES["json"])


@pytest.mark.parametrize("begin", ["[", "\\p{", "[\\", "(?<a", "(?a"])
def test_patterns_that_are_not_closed_end(begin):
    """One of 5,000 brackets held Python's lock for seconds, and one of 200,000, whose length was not checked before,
    would hold it for days."""
    for pattern in (begin * (8_000 // len(begin)), begin * 200_000):
        assert fault_of(Structure(kind="regex", text=pattern))


@pytest.mark.parametrize(
    "below",
    [{"enum": [0] * 1_000}, {"properties": {str(index): {} for index in range(1_000)}}],
    ids=["values", "schemas"],
)
def test_long_places_are_not_written_out_for_each_of_many_values(below):
    """A schema of 175 KB took 778 MB."""
    schema: Any = below
    for _ in range(8):
        schema = {"properties": {"a" * 8_000: schema}}
    tracemalloc.start()
    try:
        exact(schema)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_json_has_the_blanks_that_models_write_and_no_others(grammars):
    """At a temperature of 1 an object ended in 146 blanks."""
    guide = grammars.guide(STRUCTURES["json"])
    assert allowed_by(guide, list(b'{"on":')) == {32}
    assert allowed_by(guide, list(b'{"on": true')) == {ord(",")}
    assert allowed_by(guide, list(b'{"on": true, "room": "hall"}')) == {IDS.eos, IDS.previous}


def test_formats_within_allof_of_a_format_are_followed_too():
    """Their own patterns were lost where the outer format's were added."""
    inner = grammar_of("json_schema", json.dumps({"format": "date", "allOf": [{"format": "time"}]}))
    assert "[0-5][0-9]" in inner


@pytest.mark.parametrize(
    "structure",
    [
        Structure.json_schema({"$ref": "#"}),
        Structure.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        Structure(kind="lark", text="start: start"),
        Structure(kind="regex", text="[^\\s\\S]"),
    ],
    ids=str,
)
def test_a_structure_that_nothing_satisfies_is_told_before_its_request_runs(structure, grammars):
    """In words: llguidance says NoExtensionBias."""
    with pytest.raises(InvalidRequest, match="cannot be followed: no text that it allows can end"):
        grammars.compile(structure)


def test_a_structure_that_comes_to_a_dead_end_says_so(grammars):
    guide = grammars.guide(Structure(kind="lark", text='start: "x" a\na: a'))
    assert not guide.error
    assert guide.allowed(list(b"x")) is None
    assert guide.error.startswith("the structure cannot be followed: no text that it allows can end")


def test_a_structure_with_too_many_optional_members_says_so(grammars):
    """llguidance names a row of its parser, and no structure."""
    schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(700)}}
    guide = grammars.guide(Structure(kind="json_schema", text=json.dumps(schema)))
    assert guide.allowed(list(b"{")) is None
    assert re.fullmatch(
        r"the structure cannot be followed: \d+ parts may follow at one place; allowed: 2000. Use fewer members",
        guide.error,
    )


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        (
            {"uniqueItems": True},
            'it has keywords that cannot be forced: "uniqueItems"; leave them out',
        ),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "more than one case of a oneOf may fit a value; write anyOf",
        ),
    ],
)
def test_what_is_not_implemented_is_told_without_an_option_that_is_refused(schema, told):
    """llguidance advises its own option, which no schema may set here."""
    fault = fault_of(Structure(kind="json_schema", text=json.dumps(schema)))
    assert fault == f"the structure (json_schema) cannot be followed: {told}"


def test_a_structure_that_fails_is_the_fault_of_its_row_alone(grammars):
    """Whether the grammar is bad, the replayed tokens are none of its, or rules leave nothing of what it allows."""
    bad = grammars.guide(Structure(kind="lark", text='start: "a" <|no such token|>'))
    lost = grammars.guide(STRUCTURES["regex"], list(b"x"))
    stuck = grammars.guide(Structure.choice(["a"]))
    logits = random_logits(2, 4)
    logits[2, ord("a")] = -torch.inf
    expected = int(logits[3].argmax())
    sampled = sample_tokens(logits, [draw_of([], guide) for guide in (bad, lost, stuck, None)], (IDS.eos,))
    assert "no such token" in sampled[0].error
    assert sampled[1].error == "the structure cannot be followed: it does not allow the tokens that were sampled before"
    assert "leaves no token" in sampled[2].error
    assert all(one.error and one.token_id == IDS.eos for one in sampled[:3])
    assert (sampled[3].token_id, sampled[3].error) == (expected, "")


def test_a_wrong_guess_that_leads_nowhere_harms_nobody(grammars):
    """Behind it nothing may be sampled; the sequence itself goes another way."""
    guide = grammars.guide(Structure.choice(["ab", "cd"]))
    logits = random_logits(3, 2)
    logits[0, ord("a")], logits[1, ord("d")] = 50.0, -torch.inf
    first, behind = sample_tokens(logits, [draw_of([], guide), draw_of([ord("c")], guide)], (IDS.eos,))
    assert (first.token_id, first.error) == (ord("a"), "")
    assert "leaves no token" in behind.error
    (sampled,) = sample_tokens(random_logits(4), [draw_of([ord("a")], guide)], (IDS.eos,))
    assert (sampled.token_id, sampled.error) == (ord("b"), "")


def test_a_structure_for_a_checkpoint_without_an_end_of_text_is_told():
    """To its request: the others of the step draw as ever."""
    guide = Grammars(make_tokenizer, IDS.vocabulary, ()).guide(STRUCTURES["regex"])
    assert "has none" in guide.error
    failed, sampled = sample_tokens(random_logits(1, 2), [draw_of([], guide), draw_of([], None)], ())
    assert failed.error == guide.error
    assert sampled.token_id == random_logits(1, 2)[1].argmax()


def test_logits_that_broke_down_are_not_blamed_on_the_structure(grammars):
    logits = random_logits(2)
    logits[0, ord("{")] = torch.nan
    (sampled,) = sample_tokens(logits, [draw_of([], grammars.guide(STRUCTURES["json"]))], (IDS.eos,))
    assert sampled.logprob != sampled.logprob
    assert not sampled.error


def test_grammars_are_compiled_once_and_only_the_latest_are_kept():
    grammars = Grammars(make_tokenizer, IDS.vocabulary, (IDS.eos,), capacity=200_000)
    assert grammars.guide(None) is None
    structures = [Structure.choice([text]) for text in "abcd"]
    first = grammars.guide(structures[0])
    compiled = dict(grammars._compiled)
    grammars.guide(structures[0])
    assert grammars._compiled == compiled
    for structure in structures:
        grammars.guide(structure)
    assert list(grammars._compiled) == structures[1:], "three of 64 KiB each"
    grammars.find(structures[1])
    grammars.guide(structures[0])
    assert list(grammars._compiled) == [structures[3], structures[1], structures[0]], "the latest, not the newest"
    grammars.release()
    assert not grammars._compiled
    assert allowed_by(first, []) == {ord("a")}, "a sequence that runs keeps its own"


def test_grammars_are_weighed_in_bytes():
    """Not counted: one of 100 MB took the place of 32 small ones, and 32 of them stayed."""
    grammars = Grammars(make_tokenizer, IDS.vocabulary, (IDS.eos,), capacity=1_000_000)
    small = grammars.compile(Structure.choice(["a"]))
    grammars.keep(small)
    tried = Tried(kind="choice", text='["b"]', grammar='start: "b"', size=999_000)
    grammars.keep(grammars.compile(tried))
    assert [(one.text, one.size) for one in grammars._compiled.values()] == [('["b"]', 999_000)]
    grammars.keep(grammars.compile(evolve(tried, text='["c"]', size=1_000_001)))
    assert not grammars._compiled, "what never has room is not kept, either"


def test_a_tokenizer_that_cannot_be_translated_is_told():
    class Slow:
        def __len__(self) -> int:
            return 10

    assert "tokenizer" in Grammars(Slow, 10, (0,)).guide(STRUCTURES["json"]).error


@pytest.mark.parametrize(
    ("bounds", "outside", "inside"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0", "0.25"),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "1", "1.5"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0", "-0.5"),
        ({"allOf": [{"exclusiveMinimum": 10}, {"maximum": 10.5}]}, "10", "10.5"),
    ],
)
def test_an_excluded_whole_number_is_outside_though_the_other_bound_begins_like_it(bounds, outside, inside):
    grammar = grammar_of("json_schema", json.dumps({"type": "number", **bounds}))
    for text, allowed in ((outside, False), (inside, True)):
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        assert (matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()) == allowed


def test_a_token_that_is_allowed_and_then_refused_is_an_error() -> None:
    """llguidance 1.9.1 allows only the token that a tokenizer has added for a text in angle brackets, and refuses it
    then. All that came behind it would be free."""
    tokenizer = QWEN.make()
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    grammars = Grammars(lambda: tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    guide, token = grammars.guide(Structure(kind="regex", text="<think>abc")), len(tokenizer) - 1
    assert guide is not None
    bits = guide.allowed([])
    assert bits is not None
    assert bits[token // 8] >> token % 8 & 1
    assert guide.allowed([token]) is None
    assert f"it has the text of token {token}" in guide.error
