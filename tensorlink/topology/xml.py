"""Small XML from anyone: elements with attributes, no document types, no entities, bounded in size and depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from tensorlink.errors import TopologyError

MAX_ELEMENTS = 20_000
MAX_DEPTH = 32
MAX_ATTRIBUTES = 64


@dataclass(eq=False)
class Element:
    tag: str
    attributes: dict[str, str]
    line: int
    column: int
    children: list[Element] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        return self.attributes.get(name)

    def number(self, name: str) -> int | None:
        """An attribute as a whole number that isn't negative; None if it is none."""
        text = self.attributes.get(name, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None

    def needed(self, name: str) -> int:
        """An attribute without which the element means nothing. Raises: TopologyError: it is missing, or no whole number."""
        found = self.number(name)
        if found is None:
            said = self.attributes.get(name)
            why = "is missing" if said is None else f"is no whole number: {said[:40]!r}"
            raise TopologyError(f"the {name} of <{self.tag[:40]}> {why}", line=self.line, column=self.column)
        return found

    def of(self, *tags: str) -> Iterator[Element]:
        return (child for child in self.children if child.tag in tags)

    def all(self) -> Iterator[Element]:
        """This one and all below it, in the order of the document."""
        stack = [self]
        while stack:
            one = stack.pop()
            yield one
            stack += reversed(one.children)


def parse(text: str) -> Element:
    """The root of a document.

    Raises:
        TopologyError: it isn't well-formed, declares a type or entities, or is too large or deep; it names line and column.
    """
    parser = expat.ParserCreate("utf-8")
    top = Element("", {}, 0, 0)
    stack = [top]
    count = 0

    def fail(why: str) -> NoReturn:
        raise TopologyError(why, line=parser.CurrentLineNumber, column=parser.CurrentColumnNumber + 1)

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MAX_ELEMENTS or len(stack) > MAX_DEPTH or len(attributes) > MAX_ATTRIBUTES:
            fail(f"too large: {MAX_ELEMENTS} elements, {MAX_DEPTH} deep, {MAX_ATTRIBUTES} attributes are the limits")
        element = Element(tag, attributes, parser.CurrentLineNumber, parser.CurrentColumnNumber + 1)
        stack[-1].children.append(element)
        stack.append(element)

    def end(tag: str) -> None:
        stack.pop()

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = lambda *declared: fail("a document type or an entity has no place here")
    parser.EntityDeclHandler = lambda *declared: fail("a document type or an entity has no place here")
    try:
        parser.Parse(text.encode("utf-8", errors="replace"), True)
    except expat.ExpatError as error:
        why = expat.errors.messages[error.code]
        raise TopologyError(f"no well-formed XML: {why}", line=error.lineno, column=error.offset + 1) from None
    return top.children[0]
