"""The words that a word of a script becomes: quotes, variables, arrays, defaults, and arithmetic of known numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from countoff.plan.fields import ConfigError
from countoff.plan.scripts.syntax import parts, source
from countoff.plan.scripts.unknown import unknown

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["NUMBER", "Values", "Words"]

# The variables that are known: a text, or the elements of an array.
Values = dict[str, "str | list[str]"]
NUMBER = re.compile(r"0|[1-9]\d{0,17}")
_MOST_CHARACTERS = 1_000_000
_NAMES = ("variable_name", "special_variable_name", "subscript")
_DEFAULTS = (":-", "-", ":=", "=", ":+", "+")
_BLANKS = re.compile(r"[ \t\n]+")


class _Piece(NamedTuple):
    """A part of a word: its values, several for an array, and whether they are split at blanks."""

    values: list[str]
    is_split: bool = False


class Words:
    """Expands the words of one script.

    Attributes:
        expanded: Characters that its variables have become so far.
    """

    def __init__(self) -> None:
        self.expanded = 0

    def of(self, nodes: Sequence[Node], values: Values) -> list[str]:
        """Returns the words that these become: unquoted values are split at blanks, arrays into their elements.

        Args:
            nodes: The words.
            values: The variables; ``${A:=x}`` adds one.

        Raises:
            ConfigError: If the values grow beyond those of any real script.
        """
        return [word for node in nodes for word in self._split(self._pieces(node, values, quoted=False))]

    def text(self, node: Node, values: Values) -> str:
        """Returns a word as one text, as in an assignment; the arguments are those of ``of``.

        Raises:
            ConfigError: If the values grow beyond those of any real script.
        """
        return "".join(" ".join(piece.values) for piece in self._pieces(node, values, quoted=True))

    def _split(self, pieces: Iterator[_Piece]) -> Iterator[str]:
        word: str | None = None
        for values, is_split in pieces:
            found = [part for value in values for part in _BLANKS.split(value)] if is_split else values
            for number, part in enumerate(found):
                if number:
                    if word or (word is not None and not is_split):
                        yield word
                    word = None
                if part or not is_split:
                    word = (word or "") + part
        if word is not None:
            yield word

    def _pieces(self, node: Node, values: Values, *, quoted: bool, split: bool = False) -> Iterator[_Piece]:
        """Yields the parts of a word; ``split`` says whether plain text is split at blanks, as in a default."""
        kind, text = node.type, source(node)
        if kind in ("concatenation", "command_name"):
            end = node.start_byte
            for child in node.children:
                if child.start_byte > end:  # in a default: `${A:+--a "$A"}`
                    yield _Piece([" "], split)
                yield from self._pieces(child, values, quoted=quoted, split=split)
                end = child.end_byte
        elif kind == "string":
            yield from self._string(node, values)
        elif kind in ("raw_string", "ansi_c_string"):
            yield _Piece([text.lstrip("$")[1:-1]])
        elif kind == "expansion":
            yield from self._expansion(node, values, quoted=quoted)
        elif kind == "arithmetic_expansion":
            yield _Piece([self._arithmetic(node, values)])
        elif kind in ("simple_expansion", "command_substitution", "process_substitution"):
            is_arguments = text in ("$@", "$*")  # those of the script, of which it needs none
            yield _Piece([] if is_arguments else [unknown(text)])
        else:
            yield _Piece([re.sub(r"\\(\n|.)", lambda found: found[1].strip("\n"), text)], split)

    def _string(self, node: Node, values: Values) -> Iterator[_Piece]:
        """Yields the text between the expansions of a string in double quotes, and these."""
        text, at = node.text or b"", 1
        expansions = [child for child in node.named_children if child.type != "string_content"]
        for child in (*expansions, None):
            end = len(text) - 1
            if child is not None:
                # The grammar takes the blanks before an expansion for a part of it.
                end = child.start_byte - node.start_byte + len(source(child)) - len(source(child).lstrip())
            if end > at or not expansions:
                between = text[at:end].decode()
                yield _Piece([re.sub(r'\\([$`"\\\n])', lambda found: found[1].strip("\n"), between)])
            if child is not None:
                yield from self._pieces(child, values, quoted=True)
                at = child.end_byte - node.start_byte

    def _expansion(self, node: Node, values: Values, *, quoted: bool) -> Iterator[_Piece]:
        """Yields the values of ``${…}``: of a variable or an array, or of its default."""
        text = source(node).strip()
        name, *rest = (node.children[1:-1] if not node.has_error else ()) or [node]
        kind, words = (rest[0].type, rest[1:]) if rest else ("", [])
        is_plain = not rest or (kind == "?" and not words)
        if name.type not in _NAMES or not (is_plain or kind in _DEFAULTS):
            yield _Piece([unknown(text)])
            return
        value = values.get(source(name).partition("[")[0])
        is_set = value is not None and not (kind.startswith(":") and value in ("", []))
        if is_plain or (is_set and not kind.endswith("+")):
            shown = f"${source(name)}" if is_plain and name.type == "variable_name" else text
            yield _Piece(self._variable(name, shown, values, quoted=quoted), not quoted)
            return
        if kind.endswith("=") and not is_set:
            values[source(name)] = "".join(self.text(word, values) for word in words)
        yield _Piece([""], not quoted)
        for word in words if is_set == kind.endswith("+") else ():
            yield from self._pieces(word, values, quoted=quoted, split=not quoted)

    def _variable(self, node: Node, text: str, values: Values, *, quoted: bool) -> list[str]:
        """Returns the values of a variable; ``text`` is shown if they are not known."""
        name, _, index = source(node).removesuffix("]").partition("[")
        value = values.get(name)
        if name in ("@", "*"):
            return []  # the arguments of the script, of which it needs none
        if value is None:
            return [unknown(text)]
        elements = value if isinstance(value, list) else [value]
        self.expanded += sum(map(len, elements)) + len(elements)
        if self.expanded > _MOST_CHARACTERS:
            raise ConfigError(f"its values grow beyond {_MOST_CHARACTERS:,} characters")
        if index in ("@", "*"):
            return [" ".join(elements)] if index == "*" and quoted else elements
        if not index:
            return elements[:1] or [""]
        is_there = NUMBER.fullmatch(index) and int(index) < len(elements)
        return [elements[int(index)] if is_there else unknown(text)]

    def _arithmetic(self, node: Node, values: Values) -> str:
        """Returns the number of ``$((…))`` as text; an unknown value if it cannot be known."""
        try:
            (expression,) = parts(node)
            return str(self._number(expression, values))
        except ValueError:
            return unknown(source(node))

    def _number(self, node: Node, values: Values) -> int:
        """Returns the number of an expression.

        Raises:
            ValueError: If it is not known, or is not a number from 0 to 10^18.
        """
        if node.type == "parenthesized_expression":
            return self._number(node.children[1], values)
        if node.type == "binary_expression" and len(node.children) == 3:
            first, operator, second = node.children
            left, right = self._number(first, values), self._number(second, values)
            if operator.type == "/" and right:
                found = str(left // right)
            else:
                found = str({"+": left + right, "-": left - right, "*": left * right}.get(operator.type))
        elif node.type == "variable_name":
            found = self._variable(node, "", values, quoted=True)[0]
        else:
            found = self.text(node, values)
        if not NUMBER.fullmatch(found):
            raise ValueError("not a known number")
        return int(found)
