"""The commands that a bash script may run, with their words, found without running anything.

What the script itself decides is followed: variables, functions, and conditions on known values. Of a branch that only
the machine of the job can decide, the commands are read, and what it changes is not known after it. The time is
bounded.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from countoff.plan.fields import ConfigError
from countoff.plan.scripts.syntax import parsed, parts, source
from countoff.plan.scripts.unknown import is_unknown, unknown
from countoff.plan.scripts.words import NUMBER, Values, Words

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["Command", "read_commands"]

# Of the processor, so that a busy machine refuses no script. Real ones take one at most.
_MOST_SECONDS = 5.0
_MOST_COMMANDS = 10_000
_DEEPEST = 50
# The longest text that is compared with a pattern.
_LONGEST_MATCH = 1_000
_NOT_WORDS = ("variable_assignment", "comment", "file_redirect", "heredoc_redirect", "herestring_redirect")
# A script in which one of these is a command has lost what it belongs to.
_KEYWORDS = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_CLAUSES = ("elif_clause", "else_clause")
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
    "-lt": int.__lt__,
    "-le": int.__le__,
}


class Command(NamedTuple):
    """One command that the script may run.

    Attributes:
        words: Its words, with all that is known filled in.
        line: Where it begins, counted from 1.
    """

    words: tuple[str, ...]
    line: int


def read_commands(text: str) -> list[Command]:
    r"""Returns the commands that a script may run, in order, without those of a branch that it surely does not take.

    Raises:
        ConfigError: If tree-sitter is not installed, or the script is not well-formed or larger than any real one.

    Example:
        >>> [command] = read_commands('N=4; ARGS=(--nodes $N)\ntorchrun ${ARGS[@]} a.py')
        >>> command.words, command.line
        (('torchrun', '--nodes', '4', 'a.py'), 2)
    """
    if "\0" in text:
        raise ConfigError("it is not text")
    script = _Script()
    try:
        script.follow(text.replace("\r\n", "\n"), _Scope(), line=1)
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    return script.commands


@dataclass
class _Scope:
    """What the script knows at one place.

    Attributes:
        values: The variables.
        functions: The bodies of its functions.
        ended: Whether it has ended here, as after ``exit``.
    """

    values: Values = field(default_factory=Values)
    functions: dict[str, Node] = field(default_factory=dict[str, "Node"])
    ended: bool = False

    def copy(self) -> _Scope:
        return _Scope(dict(self.values), dict(self.functions), self.ended)

    def take(self, branches: Sequence[_Scope]) -> None:
        """Becomes what is known after one of several branches, of which any may have been taken."""
        alive = [branch for branch in branches if not branch.ended]
        self.ended = not alive
        for name in {name for branch in alive for name in branch.values}:
            values = [branch.values.get(name) for branch in alive]
            self.values[name] = _merged(name, values)
        self.functions = {name: body for branch in alive for name, body in branch.functions.items()}


def _merged(name: str, values: Sequence[str | list[str] | None]) -> str | list[str]:
    """Returns what is known of a variable that may have any of these values; the shared elements of an array."""
    first = values[0]
    if first is not None and all(value == first for value in values):
        return first
    if not any(isinstance(value, list) for value in values) or any(
        value and isinstance(value, str) for value in values
    ):
        return unknown(f"${name}")
    shared: list[str] = []
    for elements in zip(*(value or [] for value in values), strict=False):
        if len(set(elements)) > 1:
            break
        shared.append(elements[0])
    return [*shared, unknown(f"${{{name}[@]}}")]


class _Script:
    """Follows a script, and collects its commands.

    What follows a statement returns whether it succeeds; None if that is not known.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.words = Words()
        self.until = time.process_time() + _MOST_SECONDS
        self.done = 0
        self.depth = 0

    def follow(self, text: str, scope: _Scope, *, line: int) -> bool | None:
        """Follows a text, which begins in this line."""
        return self._deeper(parsed(text, line=line, until=self.until), scope, "it is nested too deeply")

    def _deeper(self, node: Node, scope: _Scope, error: str) -> bool | None:
        if self.depth >= _DEEPEST:
            raise ConfigError(error)
        self.depth += 1
        try:
            return self._group(node, scope)
        finally:
            self.depth -= 1

    def _statements(self, nodes: Sequence[Node], scope: _Scope) -> bool | None:
        status: bool | None = True
        for node in nodes:
            if scope.ended:
                break
            status = self._statement(node, scope)
        return status

    def _statement(self, node: Node, scope: _Scope) -> bool | None:
        self.done += 1
        if self.done > _MOST_COMMANDS:
            raise ConfigError(f"it runs more than {_MOST_COMMANDS:,} commands")
        if time.process_time() > self.until:
            raise ConfigError("it takes too long to read")
        follow = _STATEMENTS.get(node.type)
        return follow(self, node, scope) if follow else None

    def _group(self, node: Node, scope: _Scope) -> bool | None:
        is_arithmetic = node.child_count > 0 and node.children[0].type == "(("
        return None if is_arithmetic else self._statements(parts(node), scope)

    def _subshell(self, node: Node, scope: _Scope) -> bool | None:
        return self._statements(parts(node), scope.copy())

    def _pipeline(self, node: Node, scope: _Scope) -> None:
        for part in parts(node):
            self._statement(part, scope.copy())

    def _list(self, node: Node, scope: _Scope) -> bool | None:
        left, *_, right = parts(node)
        status = self._statement(left, scope)
        if status is None:
            self._one_of(iter([(None, [right])]), scope)
            return None
        is_and = any(child.type == "&&" for child in node.children)
        return self._statement(right, scope) if status is is_and else status

    def _loop(self, node: Node, scope: _Scope) -> None:
        variable = node.child_by_field_name("variable")
        if variable is not None:
            scope.values[source(variable)] = unknown(f"${source(variable)}")
        body = parts(node) if node.type == "while_statement" else parts(node)[-1:]
        self._one_of(iter([(None, body)]), scope)

    def _if(self, node: Node, scope: _Scope) -> None:
        def clauses() -> Iterator[tuple[bool | None, list[Node]]]:
            for clause in (node, *(child for child in node.children if child.type in _CLAUSES)):
                then = next((child for child in clause.children if child.type == "then"), clause.children[0])
                inside = [part for part in parts(clause) if part.type not in _CLAUSES]
                condition = [part for part in inside if part.start_byte < then.start_byte]
                yield self._statements(condition, scope), inside[len(condition) :]

        self._one_of(clauses(), scope)

    def _case(self, node: Node, scope: _Scope) -> None:
        subject, *items = parts(node)
        text = self.words.text(subject, scope.values)

        def matches() -> Iterator[tuple[bool | None, list[Node]]]:
            for item in items:
                values = item.children_by_field_name("value")
                found = [_matches(text, self.words.text(value, scope.values)) for value in values]
                yield None if None in found else any(found), parts(item)[len(values) :]

        self._one_of(matches(), scope)

    def _one_of(self, branches: Iterator[tuple[bool | None, Sequence[Node]]], scope: _Scope) -> None:
        """Follows each branch that may be taken, up to the first one whose condition surely holds."""
        possible: list[_Scope] = []
        for holds, body in branches:
            if holds is False:
                continue
            branch = scope.copy()
            self._statements(body, branch)
            possible.append(branch)
            if holds:
                break
        else:
            possible.append(scope.copy())
        scope.take(possible)

    def _function(self, node: Node, scope: _Scope) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            scope.functions[source(name)] = body

    def _redirected(self, node: Node, scope: _Scope) -> bool | None:
        body = node.child_by_field_name("body")
        if body is None or body.type != "command":
            return None if body is None else self._statement(body, scope)
        # The grammar takes all words behind a redirection for files: only the first one is.
        files = [part.children_by_field_name("destination")[1:] for part in parts(node) if part.type == "file_redirect"]
        return self._command(body, scope, [word for words in files for word in words])

    def _command(self, node: Node, scope: _Scope, more: Sequence[Node] = ()) -> bool | None:
        nodes = [child for child in (*node.children, *more) if child.type not in _NOT_WORDS]
        words, line = tuple(self.words.of(nodes, scope.values)), node.start_point.row + 1
        name = words[0] if words else ":"
        if name in scope.functions:
            return self._call(name, words[1:], scope, line)
        if name in _KEYWORDS:
            raise ConfigError(f"line {line}: {name} is not expected")
        if name in (":", "true", "false"):
            return name != "false"
        if name == "exit":
            scope.ended = True
        elif name == "read":
            for word in words[1:]:
                scope.values.pop(word, None)
        elif name == "eval":
            return self._eval(" ".join(words[1:]), scope, line)
        elif (inner := _inner_script(words)) is not None:
            return self.follow(inner, scope.copy(), line=line)
        else:
            self.commands.append(Command(words, line))
        return None

    def _call(self, name: str, arguments: Sequence[str], scope: _Scope, line: int) -> bool | None:
        numbered = {str(number): word for number, word in enumerate(arguments, start=1)}
        scope.values.update(numbered)
        status = self._deeper(scope.functions[name], scope, f"line {line}: {name} calls itself")
        for number in numbered:
            scope.values.pop(number, None)
        return status

    def _eval(self, text: str, scope: _Scope, line: int) -> bool | None:
        try:
            return self.follow(text, scope, line=line)
        except ConfigError:
            if is_unknown(text):
                return None  # it becomes well-formed when the job runs, as with `eval "A=\$$B"`
            raise

    def _test(self, node: Node, scope: _Scope) -> bool | None:
        """Returns the result of a test of one or two values; None for any other."""
        expression = (parts(node) or [node])[0]
        if expression.type not in ("unary_expression", "binary_expression") or len(expression.children) > 3:
            return None
        *first, operator, last = expression.children
        if any("expression" in part.type for part in (*first, last)):
            return None
        test, right = source(operator), self.words.text(last, scope.values)
        if not first:
            is_known = test in ("-z", "-n") and not is_unknown(right)
            return (right == "") == (test == "-z") if is_known else None
        left = self.words.text(first[0], scope.values)
        if test in ("=", "==", "!="):
            is_equal = _matches(left, right)
            return None if is_equal is None else is_equal == (test != "!=")
        is_known = test in _COMPARISONS and NUMBER.fullmatch(left) and NUMBER.fullmatch(right)
        return _COMPARISONS[test](int(left), int(right)) if is_known else None

    def _assignments(self, node: Node, scope: _Scope) -> bool:
        for part in parts(node):
            if part.type == "variable_assignment":
                self._assign(part, scope)
        return True

    def _assign(self, node: Node, scope: _Scope) -> bool:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        name, _, index = source(target).partition("[") if target is not None else ("", "", "")
        found: str | list[str] = ""
        if index:
            found = unknown(f"${name}")
        elif value is not None and value.type == "array":
            found = self.words.of(parts(value), scope.values)
        elif value is not None:
            found = self.words.text(value, scope.values)
        if any(child.type == "+=" for child in node.children):
            old = scope.values.get(name, "")
            if isinstance(found, list):
                found = [*(old if isinstance(old, list) else [old] if old else []), *found]
            else:
                found = (" ".join(old) if isinstance(old, list) else old) + found
        scope.values[name] = found
        return True

    def _unset(self, node: Node, scope: _Scope) -> bool:
        for part in parts(node):
            scope.values.pop(source(part), None)
        return True


def _matches(text: str, pattern: str) -> bool | None:
    """Whether a text matches a pattern of the shell; None if that is not known."""
    is_known = not is_unknown(text) and not is_unknown(pattern) and max(len(text), len(pattern)) <= _LONGEST_MATCH
    return fnmatch.fnmatchcase(text, pattern) if is_known else None


def _inner_script(words: Sequence[str]) -> str | None:
    """Returns the script of ``bash -c``, also behind a launcher; None if there is none."""
    for name, option, script in zip(words, words[1:], words[2:], strict=False):
        if name.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-\w*c", option):
            return script
    return None


_STATEMENTS: dict[str, Callable[[_Script, Node, _Scope], bool | None]] = {
    "command": _Script._command,
    "redirected_statement": _Script._redirected,
    "variable_assignment": _Script._assign,
    "variable_assignments": _Script._assignments,
    "declaration_command": _Script._assignments,
    "unset_command": _Script._unset,
    "test_command": _Script._test,
    "list": _Script._list,
    "pipeline": _Script._pipeline,
    "compound_statement": _Script._group,
    "do_group": _Script._group,
    "subshell": _Script._subshell,
    "if_statement": _Script._if,
    "case_statement": _Script._case,
    "for_statement": _Script._loop,
    "c_style_for_statement": _Script._loop,
    "while_statement": _Script._loop,
    "function_definition": _Script._function,
}
