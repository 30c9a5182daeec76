"""What the API reference needs beside griffe: attrs classes, and the docstrings of Triolet as Markdown.

Docstrings are Google's style, with two habits of Sphinx: ``::`` before a literal block, and names of the package in
single backticks. "Raises (on entering):" says when an error comes, which Google's style has no section for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from griffe import (
    Attribute,
    Class,
    Expr,
    ExprCall,
    ExprName,
    Extension,
    Function,
    Module,
    Object,
    Parameter,
    ParameterKind,
)

_LITERAL = re.compile(r"^::\n|:(?=: *$)", re.MULTILINE)
_NAME = re.compile(r"(?<!`)`([A-Z]\w+)((?:\.\w+)?)`(?!`)")
_RAISES = re.compile(r"^Raises \((.+)\):\n((?:^ {4}.*\n?)+)", re.MULTILINE)
_UNPACK = re.compile(r"Unpack\[(\w+)\]")
_ENTRY = re.compile(r"^ {4}(?=\S)(\w+):", re.MULTILINE)


class Triolet(Extension):
    """The package as mkdocstrings should show it."""

    def on_class_instance(self, *, cls: Class, **_: Any) -> None:
        """attrs' decorators become the standard library's, out of which griffe makes the parameters."""
        for decorator in cls.decorators:
            if isinstance(decorator.value, Expr) and decorator.value.canonical_path in ("attrs.frozen", "attrs.define"):
                arguments = decorator.value.arguments if isinstance(decorator.value, ExprCall) else []
                decorator.value = ExprCall(ExprName("dataclasses.dataclass"), arguments)

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """attrs' ``field`` likewise, whose default is shown, and whether it is for keywords alone."""
        if isinstance(attr.value, ExprCall) and attr.value.canonical_path == "attrs.field":
            attr.value.function = ExprName("dataclasses.field")

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """All docstrings become Markdown. Names that are public are linked with their place in the reference."""
        public = cast(Module, pkg.members.get("public", pkg)).members  # the kit's names are those of the package itself
        for found in _objects(pkg):
            if isinstance(found, Function):
                _spell_out(found, pkg)
            if found.docstring is not None:
                text = _RAISES.sub(_listed, _LITERAL.sub("", found.docstring.value))
                found.docstring.value = _NAME.sub(lambda match: _linked(match, pkg.name, public), text)


def _objects(parent: Object) -> Iterator[Object]:
    yield parent
    for member in parent.members.values():
        if isinstance(member, Module | Class):
            yield from _objects(member)
        elif isinstance(member, Function | Attribute):
            yield member


def _spell_out(function: Function, package: Module) -> None:
    """Replaces ``**arguments: Unpack[X]`` by the keywords of X, unless the docstring explains ``arguments``."""
    for last in [*function.parameters][-1:]:
        found = _UNPACK.fullmatch(str(last.annotation))
        explained = function.docstring is not None and f" {last.name}: " not in function.docstring.value
        if found and explained:
            del function.parameters[last.name]
            for name, one in cast(Class, package["api.arguments"][found[1]]).all_members.items():
                keyword = Parameter(name, annotation=one.annotation, kind=ParameterKind.keyword_only, default="...")
                function.parameters.add(keyword)


def _listed(match: re.Match[str]) -> str:
    entries = _ENTRY.sub(r"- `\1`:", match[2])
    return f"**Raises** {match[1]}:\n\n{entries}\n"


def _linked(match: re.Match[str], package: str, public: Any) -> str:
    name, member = match.groups()
    members = public[name].final_target.all_members if name in public and member else {}
    known = name in public and (not member or (member[1:] in members and members[member[1:]].has_docstring))
    return f"[`{name}{member}`][{package}.{name}{member}]" if known else match[0]
