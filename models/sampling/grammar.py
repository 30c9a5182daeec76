"""The grammar of a structure: what it may ask for, and what making it may cost.

llguidance reads numbers as doubles, reads some keywords otherwise than JSON Schema where they stand together, and
bounds neither the time nor the stack of a compilation. So `grammar_of` refuses by name what llguidance would follow
only nearly. This file is a program, too. It makes one grammar within limits, in a process that may end, so that a
stranger's structure is compiled in a server only if that is known to be short. The program needs the standard library
and llguidance alone::

    python -I -S grammar.py SECONDS FOLDER_OF_LLGUIDANCE < [kind, text] -> {"grammar", "size", "left_out"} or {"fault"}
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeGuard
from urllib.parse import unquote

MEMORY = 256 * 2**20
"""Bytes of address space that making one grammar may add."""
_STACK = 2**20  # bytes: threads of a server have more
_NICE = 5  # requests that run go first
_MOST_LITERAL = 8_192  # characters of literal text, repetitions written out: a mask takes time in proportion
_LARGEST = 2**63  # bounds of numbers are less: llguidance has signed integers of 64 bits
_WORD = 2**32  # llguidance computes remainders in unsigned integers of 32 bits

LIMITS: dict[str, Any] = {
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "verbose_errors": False,
}
"""The limits of llguidance: one mask then takes some 20 ms at most."""
_EXACT = re.compile(r"^(\w+: |// )%exact (\[.*\])$", re.MULTILINE)
"""A rule of Lark that stands for the JSON of a call: the name of the tool and a schema, which is checked only where the
grammar is made, within limits. Without a name, it is the JSON of an answer, whose schema is a text in a text."""
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models are trained
_LENIENT = {"lenient": True, "coerce_one_of": True}  # what cannot be followed is left out of calls, and logged
OPTIONS = frozenset(_COMPACT)  # what a schema may have in ``x-guidance``

_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties")
_BESIDE_0 = 1e-16
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SEPARATORS = {"item_separator": re.compile(r"\s*,\s*"), "key_separator": re.compile(r"\s*:\s*")}
_CLASSES = tuple(f"\\{letter}" for letter in "dDwWsSpPbBAz")

_DATE = (  # llguidance's own pattern has February 29 in every year, and the year 0, which programs do not have
    r"^(?:[0-9]{4}-(?:0[13-9]|1[0-2])-|[0-9]{4}-02-(?:[01][0-9]|2[0-8])"
    r"|[0-9]{2}(?:0[48]|[2468][048]|[13579][26])-02-29|(?:[02468][048]|[13579][26])00-02-29)",
    "^[0-9]*[1-9][0-9]*-",
)
_SECOND = r"[0-9]{2}:[0-9]{2}:[0-5][0-9]"  # leap seconds are no times to most programs
FORMATS = {
    "date": _DATE,
    "date-time": (*_DATE, f"[tT]{_SECOND}"),
    "time": (f"^{_SECOND}",),
    "hostname": ("^.{1,253}$",),
}
"""What strings of a format must match beside llguidance's own pattern of that format."""
_FOLLOWED = {*FORMATS, "duration", "email", "ipv4", "ipv6", "uuid", "uri"}  # by the standard, others are notes

_QUANTITY = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_REGEX = re.compile(  # in one way only, so that no part is read twice: what is not closed goes on to the end
    r"\\(?:[pPxuU]\{[^}]*\}?|.)|\[(?:\\.|[^\]\\])*\]?|\(\?(?:P?<\w+>|[a-zA-Z-]*:)|\{\d{1,9}(?:,\d{0,9})?\}|.", re.DOTALL
)


Place = str | tuple[Any, Any]
"""A place in a schema: a text, or the place above and a name. They are joined for a fault alone, since there are many
places, and each may be long."""


class Written(float):
    """A number with a point or an exponent, as it was written."""

    text: str

    def __new__(cls, text: str) -> Written:
        made = super().__new__(cls, text)
        made.text = text
        return made


def grammar_of(kind: str, text: str, left_out: list[Any] | None = None) -> str:
    """Returns the structure as a grammar of llguidance. ``left_out`` gets what calls do not follow.

    Raises:
        ValueError: the structure cannot be followed, with the reason.
    """
    from llguidance import LLMatcher

    told = [] if left_out is None else left_out
    try:
        match kind:
            case "regex":
                _check_regex("the expression", text)
                return LLMatcher.grammar_from_regex(text)
            case "lark":
                return LLMatcher.grammar_from_lark(_EXACT.sub(lambda rule: _called(rule, told), text))
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(json.dumps(exact(read_json(text))))
            case _:
                return LLMatcher.grammar_from_lark("start: " + " | ".join(_choices(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply; allowed: up to about 100 levels") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a member of it has a value of another kind than JSON Schema's: {error}") from None


def judged(grammar: str) -> tuple[str, list[str]]:
    """Returns why llguidance cannot follow ``grammar``, as far as it is known without a tokenizer, or an empty text;
    and what it leaves out."""
    from llguidance import LLMatcher, LLParserLimits

    failed, told = LLMatcher.validate_grammar_with_warnings(grammar, limits=LLParserLimits(**LIMITS))
    return (told[0], []) if failed else ("", told)


def read_json(text: str) -> Any:
    """Returns ``text`` read as JSON. Numbers keep how they were written: integers, or `Written`."""
    return json.loads(text, parse_float=Written, parse_constant=_no_number)


def _no_number(name: str) -> None:
    raise ValueError(f"it contains {name}; allowed: numbers of JSON")


def _choices(text: str) -> list[str]:
    texts = read_json(text)
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("it is not a JSON array of one or more texts that are not empty")
    for place, choice in enumerate(texts):
        _check_length(f"choice {place}", len(choice))
    return [json.dumps(text, ensure_ascii=False) for text in texts]  # Lark quotes as JSON does


# -- schemas ---------------------------------------------------------------------------------------------------------


def _called(rule: re.Match[str], left_out: list[Any]) -> str:
    from llguidance import LLMatcher

    tool, schema = read_json(rule[2])
    if rule[1] == "// ":  # what the rules of a tool leave out
        left_out.append((tool, schema))
        return ""
    try:
        schema = read_json(schema) if tool is None else schema
        written = json.dumps(exact(schema, **(_LENIENT if tool else {})))
        fault, told = judged(LLMatcher.grammar_from_json_schema(written))
    except ValueError as error:
        fault = str(error)
    if fault:
        raise ValueError(f"a call of {tool!r} cannot be forced to follow its parameters: {fault}" if tool else fault)
    left_out += [(tool, one) for one in told]
    return f"{rule[1]}%json {written}"


def exact(schema: Any, **options: Any) -> Any:
    """Returns ``schema`` as llguidance is to read it, so that each output follows it by JSON Schema's own rules.
    ``options`` are for its ``x-guidance``.

    Raises:
        ValueError: a member that cannot be followed exactly, with its place.
    """
    if not isinstance(schema, Mapping):
        return schema
    multiples: list[Decimal] = []
    changed: dict[int, dict[str, Any]] = {}
    found: set[int] = {id(schema)}
    todo: list[tuple[Place, Any]] = [("#", schema)]
    stays = bool(re.search(r'"\$ref": "#[^"]*/additionalProperties["/]', json.dumps(schema)))
    while todo:
        place, one = todo.pop()
        changed[id(one)] = _checked(place, one, multiples, root=one is schema) | _named(one, schema, place, stays)
        for name, below in (*_below(one), *_referred(one, schema, place)):
            if isinstance(below, Mapping) and id(below) not in found:
                found.add(id(below))
                todo.append((name if name.startswith("#") else (place, name), below))
    _check_multiples(multiples)
    own: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'}  # else a name could be spelled in two ways
    given = schema.get("x-guidance", {})
    own |= {} if given.get("whitespace_flexible") else _COMPACT
    return _rebuilt(schema, changed) | {"x-guidance": own | options | given}


def _below(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the schemas of which ``schema`` is made, each with its place in it."""
    for name in _SCHEMAS:
        yield name, schema.get(name)
    for name in _LISTS:
        if isinstance(several := schema.get(name), list):
            yield from ((f"{name}/{index}", one) for index, one in enumerate(several))
    for name in _MAPS:
        if isinstance(several := schema.get(name), Mapping):
            yield from ((f"{name}/{key}", one) for key, one in several.items())


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any], place: Place) -> Iterator[tuple[str, Any]]:
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield reference, _at(reference, root, place)


def _at(reference: str, root: Mapping[str, Any], place: Place) -> Any:
    """Returns what stands in ``root`` where ``reference`` points; ``None``: nothing."""
    if reference != "#" and not reference.startswith("#/"):
        raise _fault(place, "$ref", reference, "# and places in the schema itself, as in #/$defs/name")
    found: Any = root
    for written in reference.split("/")[1:]:
        step = unquote(written).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
        else:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _named(schema: Mapping[str, Any], root: Mapping[str, Any], place: Place, stays: bool) -> dict[str, Any]:
    """Returns members in place of ``propertyNames``, as generators write it for a dict: any texts, or some of them.
    ``stays``: a reference needs ``additionalProperties``."""
    given = schema.get("propertyNames")
    if isinstance(given, Mapping) and isinstance(given.get("$ref"), str):
        given = _at(given["$ref"], root, place)
    if not isinstance(given, Mapping) or given.get("type", "string") != "string":
        return {}
    if not (said := given.keys() - {"type", "title"}):
        return {"propertyNames": None}
    names = [given["const"]] if "const" in said else given.get("enum", ())
    stays = stays or bool(schema.keys() & {*_MAPS})
    if len(said) > 1 or not names or not all(isinstance(name, str) for name in names) or stays:
        return {}
    _check_value((place, "propertyNames"), names)
    found = dict.fromkeys(names, schema.get("additionalProperties", True))
    return {"propertyNames": None, "properties": found, "additionalProperties": False}


def _rebuilt(schema: Any, changed: Mapping[int, dict[str, Any]]) -> Any:
    """Returns a copy of ``schema`` in which what was changed is in the place of what stood there; ``None``: nothing."""
    if isinstance(schema, Mapping):
        new = changed.get(id(schema), {})
        return {
            key: _rebuilt(value, changed) for key, value in {**schema, **new}.items() if new.get(key, 0) is not None
        }
    if isinstance(schema, list | tuple):
        return [_rebuilt(one, changed) for one in schema]
    return schema if not isinstance(schema, float) or math.isfinite(schema) else None  # in a note, such as a default


def _checked(place: Place, schema: Mapping[str, Any], multiples: list[Decimal], *, root: bool) -> dict[str, Any]:
    """Checks the members of ``schema`` that are no schemas themselves. Returns members to add or to replace."""
    _check_names(place, schema, root=root)
    for name in _BOUNDS:
        _check_bound(place, name, schema)
    if "multipleOf" in schema:
        multiples.append(_multiple(place, schema["multipleOf"]))
    for name in ("const", "enum", "required"):
        _check_value((place, name), schema.get(name))
    _check_regex((place, "pattern"), schema.get("pattern"))
    for name in ("properties", "patternProperties"):
        for key in schema[name] if isinstance(schema.get(name), Mapping) else ():
            _check_value((place, name), key)
            _check_regex((place, name), key if name == "patternProperties" else None)
    changed = _apart(schema)
    if (patterns := FORMATS.get(str(schema.get("format")))) and isinstance(several := schema.get("allOf", []), list):
        changed["allOf"] = [*several, *({"pattern": pattern} for pattern in patterns)]
    if isinstance(schema.get("format"), str) and schema["format"] not in _FOLLOWED:
        changed["format"] = "unknown"
    changed |= {"uniqueItems": None} if schema.get("uniqueItems") is False else {}
    if schema.get("minimum") == -_LARGEST:
        changed["minimum"] = -_LARGEST + 1024  # the next double: llguidance cannot negate the smallest integer
    return changed


def _apart(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bounds just beside the whole numbers that ``schema`` excludes: llguidance allows these if the other bound
    has the same whole part."""
    found: dict[str, Any] = {}
    for name, towards in (("minimum", 1.0), ("maximum", -1.0)):
        given, excluded = schema.get(name), schema.get(f"exclusive{name.title()}")
        bound = given if excluded is True else excluded
        if schema.get("type") == "integer" or not _is_number(bound) or bound % 1:
            continue
        beside = math.nextafter(float(bound), towards * math.inf) if bound else towards * _BESIDE_0
        if not _is_number(given) or (beside - given) * towards > 0:
            found[name] = beside
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_names(place: Place, schema: Mapping[str, Any], *, root: bool) -> None:
    """Checks the members that llguidance reads otherwise than the standard where they stand together."""
    if not root and isinstance(schema.get("$id", schema.get("id")), str):
        raise _fault(place, "$id", "...", "an $id at the top alone, since references would begin at it")
    draft = str(schema.get("$schema", ""))
    if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), list)):
        raise _fault(place, "prefixItems", "...", "prefixItems and a schema for items, without additionalItems")
    if "prefixItems" in schema and root and ("draft-0" in draft or "2019-09" in draft):
        raise _fault(place, "prefixItems", "...", f"a list for items, since $schema is {draft}")
    options = schema.get("x-guidance", {}) if root else {}
    if not isinstance(options, Mapping) or options.keys() - OPTIONS:
        raise _fault(place, "x-guidance", options, ", ".join(sorted(OPTIONS)))
    for name, allowed in _SEPARATORS.items():
        if not allowed.fullmatch(str(options.get(name, allowed.pattern[3]))):
            told = f"one {allowed.pattern[3]!r} with blanks around it"
            raise _fault(place, f"x-guidance/{name}", options[name], told)
    required, least = schema.get("required", ()), schema.get("minProperties", 0)
    most = len(set(map(str, required))) + 1 if isinstance(required, list | tuple) else 1
    if isinstance(least, int | float) and least > most:
        told = f"up to {most}, one more than required, since other names may come twice"
        raise _fault(place, "minProperties", least, told)


def _check_bound(place: Place, name: str, schema: Mapping[str, Any]) -> None:
    value, base = schema.get(name), name.removeprefix("exclusive").lower()
    if not _is_number(value):
        return
    excluded = name != base or schema.get(f"exclusive{name.title()}") is True
    if name == "minimum" and value == -_LARGEST and not excluded:
        return
    if name == "maximum" and value in (_LARGEST - 1, 2 * _LARGEST - 1) and not excluded:
        return  # llguidance's integers end there, too
    if not _is_exact(value) or (excluded and abs(value) >= 2**53):
        allowed = "numbers that a double holds, of less than 2**53 if excluded, or the bounds of 64 bits"
        raise _fault(place, name, value, allowed)


def _multiple(place: Place, value: Any) -> Decimal:
    """Returns ``multipleOf``, if llguidance's remainders are right for it."""
    allowed = f"numbers above 0 of less than {_WORD // 10:,}, points left out, with up to 8 digits behind the point"
    if not _is_number(value) or not 0 < value < _WORD:
        raise _fault(place, "multipleOf", value, allowed)
    decimal, reached, digits = _decimal(value), float(value), 0
    while reached % 1:
        reached, digits = reached * 10, digits + 1  # as llguidance does it, errors included
    if reached != decimal.scaleb(digits) or reached * 10 + 9 * 10**digits >= _WORD:
        raise _fault(place, "multipleOf", value, allowed)
    return decimal


def _check_multiples(multiples: list[Decimal]) -> None:
    """Checks the numbers of which llguidance may take the least common multiple, in 32 bits."""
    whole = max((-int(one.as_tuple().exponent) for one in multiples), default=0)
    common = 1
    for one in {int(one.scaleb(max(whole, 0))) for one in multiples}:
        if common * one >= _WORD:
            told = f"multipleOf is {', '.join(map(str, multiples[:9]))} in its parts"
            raise ValueError(f"{told}; allowed: numbers whose least common multiple is below {_WORD:,}")
        common = math.lcm(common, one)


def _check_value(place: Place, value: Any) -> None:
    """Checks the numbers and the lengths of the texts in a constant."""
    todo: list[tuple[Place, Any]] = [(place, value)]
    while todo:
        place, one = todo.pop()
        if isinstance(one, Mapping):
            todo += [((place, key), below) for key, below in one.items()]
            todo += [(place, key) for key in one]
        elif isinstance(one, list | tuple):
            todo += [((place, index), below) for index, below in enumerate(one)]
        elif isinstance(one, str):
            _check_length(place, len(one))
        elif _is_number(one) and not _is_exact(one):
            allowed = "numbers that a double holds to their last digit, whole ones below 2**63; or give it as a text"
            raise _fault(place, "", one, allowed)


def _is_exact(value: float) -> bool:
    """True if llguidance writes ``value`` with the digits that it was given in."""
    if not math.isfinite(value) if isinstance(value, float) else abs(value) >= _LARGEST:
        return False
    held: str | float = repr(float(value)) if isinstance(value, float) else float(value)
    return abs(value) < _LARGEST and _decimal(value) == Decimal(held)


def _decimal(value: float) -> Decimal:
    try:
        return Decimal(value.text if isinstance(value, Written) else repr(value))
    except ArithmeticError:
        return Decimal("NaN")  # its exponent is beyond those of decimals: it is equal to nothing


def _check_regex(place: Place, pattern: Any) -> None:
    """Checks how much literal text a pattern has when its repetitions are written out."""
    if not isinstance(pattern, str):
        return
    _check_length(place, len(pattern))
    if re.search(r"\(\?[a-zA-Z-]*x", pattern):
        raise ValueError(f"{_told(place)} has the flag x; allowed: patterns without it")
    sums, last = [0], 0
    for part in _REGEX.findall(pattern):
        if part[0] == "(":
            sums.append(0)
        elif part == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif quantity := _QUANTITY.fullmatch(part):
            times = int(quantity[2] or quantity[1])
            sums[-1] += last * (times - 1)
            last *= times
        else:
            last = int(part not in ("|", "*", "+", "?", ".", "^", "$") and part[0] != "[" and part[:2] not in _CLASSES)
            sums[-1] += last
    _check_length(place, sum(sums))


def _check_length(place: Place, length: int) -> None:
    if length > _MOST_LITERAL:
        told = f"has {length:,} characters, repetitions written out; allowed: up to {_MOST_LITERAL:,}"
        raise ValueError(f"{_told(place)} {told}")


def _fault(place: Place, name: str, value: Any, allowed: str) -> ValueError:
    told = value.text if isinstance(value, Written) else str(value)
    return ValueError(f"{_told((place, name)).rstrip('/')}={told[:80]}; allowed: {allowed}")


def _told(place: Place) -> str:
    """Returns ``place`` as a reference names it (RFC 6901, section 6)."""
    names: list[str] = []
    while isinstance(place, tuple):
        place, name = place
        names.append(str(name))
    return "/".join((place, *reversed(names)))


# -- the program -----------------------------------------------------------------------------------------------------


def main(seconds: float, folder: str) -> None:
    """Makes the grammar of the structure on the standard input, and its first mask. Ends by SIGPROF after ``seconds``
    of computing, and by another signal if it takes more memory or stack than a server could give."""
    import resource
    import signal

    os.nice(_NICE)
    sys.path.append(folder)
    kind, text = json.load(sys.stdin)
    import llguidance  # noqa: F401  (its own start does not count)

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    limits = {"STACK": _STACK, "CORE": 0, "CPU": int(seconds) + 3}
    if taken := _memory()[0]:
        limits["AS"] = taken + MEMORY
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    json.dump(_tried(kind, text), sys.stdout)
    signal.setitimer(signal.ITIMER_PROF, 0)


def _tried(kind: str, text: str) -> dict[str, Any]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    before, left_out = _memory()[1], list[Any]()
    try:
        grammar = grammar_of(kind, text, left_out)
        fault, _ = judged(grammar)
    except MemoryError:
        os.abort()  # as llguidance itself ends without memory
    except ValueError as error:
        fault = str(error)
    if fault:
        return {"fault": fault}
    tokens = LLTokenizer("byte")
    known = re.sub(r"<\[\d+\]>", f"<[{tokens.vocab_size - 1}]>", grammar)  # the model's tokens, of which none is known
    matcher = LLMatcher(tokens, known, log_level=0, limits=LLParserLimits(**LIMITS))
    matcher.compute_bitmask()
    lines = [f"a call of {tool!r} is forced without all of its schema: {told}" for tool, told in left_out]
    return {
        "grammar": grammar,
        "size": _memory()[1] - before,
        "left_out": ["".join(filter(str.isprintable, line)) for line in lines],
    }


def _memory() -> list[int]:
    """Returns the bytes of address space, and those in memory; 0 where the system is not Linux and does not say."""
    import resource

    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return [int(one) * resource.getpagesize() for one in file.read().split()]
    except OSError:
        return [0, 0]


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
