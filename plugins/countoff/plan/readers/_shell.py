"""Reads the commands of a shell script without running anything: which words each of them would get.

It follows variables, arrays, quotes, defaults, integer arithmetic, and conditions that the script itself decides. What
only the machine of the job can know, such as ``$1`` or ``$(hostname)``, is unknown: it stands in a word between two
``MARK`` characters, so that the rest of the word and of the command stays readable. Sizes and depths are bounded.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from countoff.plan.readers._fields import ConfigError

__all__ = ["MARK", "Command", "is_unknown", "read_commands", "unknown_parts"]

MARK = "\0"
_MOST_CHARACTERS = 1_000_000
_MOST_COMMANDS = 10_000
_DEEPEST = 50
_BLANK = " \t"
_OPERATORS = ("&&", "||", ";;", "((", "|&", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"\d*(&>>|&>|<<<|<<-|<<|>>|>&|<&|<>|>\||>|<)")
_EXPRESSION = re.compile(r"(#?)(\w+|[@*#?$!-])(\[([^]]*)\])?(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NUMBER = re.compile(r"\d{1,18}")
_TESTS = {
    "==": lambda left, right: fnmatch.fnmatchcase(left, right),
    "=": lambda left, right: fnmatch.fnmatchcase(left, right),
    "!=": lambda left, right: not fnmatch.fnmatchcase(left, right),
    "-eq": lambda left, right: int(left) == int(right),
    "-ne": lambda left, right: int(left) != int(right),
    "-gt": lambda left, right: int(left) > int(right),
    "-ge": lambda left, right: int(left) >= int(right),
    "-lt": lambda left, right: int(left) < int(right),
    "-le": lambda left, right: int(left) <= int(right),
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
        ConfigError: If the script is not well-formed, or its values grow beyond any real script.

    Example:
        >>> read_commands('N=4; ARGS=(--nodes $N)\ntorchrun ${ARGS[@]} a.py "$1"')[0].words
        ('torchrun', '--nodes', '4', 'a.py', '\x00$1\x00')
    """
    if MARK in text:
        raise ConfigError("it is not text")
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"it has more than {_MOST_CHARACTERS:,} characters")
    run = _Run()
    try:
        run.text(text.replace("\r\n", "\n"), _Scope(), line=1)
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except IndexError:
        raise ConfigError("it ends in the middle of a command") from None
    return run.commands


def is_unknown(word: str) -> bool:
    """Whether a part of the word is not known."""
    return MARK in word


def unknown_parts(word: str) -> str:
    """Returns what is not known in a word, as the script has it, such as ``$1``."""
    return ", ".join(dict.fromkeys(part.replace("\u00a0", " ") for part in word.split(MARK)[1::2]))


def _unknown(what: str) -> str:
    """Returns a value that is not known; ``what`` is the script's text for it."""
    shown = what if len(what) <= 40 else f"{what[:39]}…"
    return MARK + re.sub(r"\s", "\u00a0", shown.replace(MARK, "")) + MARK


class _Piece(NamedTuple):
    """A part of a word: ``literal`` text, a ``variable``, ``arithmetic``, or a ``command`` whose output it is."""

    kind: str
    text: str
    quoted: bool


class _Token(NamedTuple):
    """A word (its pieces), an array assignment (its words), or an operator (its text)."""

    operator: str
    line: int
    pieces: tuple[_Piece, ...] = ()
    array: tuple[tuple[_Piece, ...], ...] | None = None

    @property
    def keyword(self) -> str:
        """The text of a word without quotes and variables; empty for any other token."""
        is_plain = len(self.pieces) == 1 and self.pieces[0].kind == "literal" and not self.pieces[0].quoted
        return self.pieces[0].text if is_plain and self.array is None else ""


# ---- from text to tokens


class _Lexer:
    """Cuts a text into tokens."""

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.at = 0
        self.line = line
        self.here_documents: list[tuple[str, bool]] = []

    def tokens(self) -> list[_Token]:
        found: list[_Token] = []
        while (token := self._next()) is not None:
            if token.operator != "redirection":
                found.append(token)
        found.append(_Token("\n", self.line))
        return found

    def _next(self) -> _Token | None:
        self._skip_blanks()
        if self.at >= len(self.text):
            return None
        line = self.line
        process = self.text.startswith(("<(", ">("), self.at)
        redirection = None if process else _REDIRECTION.match(self.text, self.at)
        if redirection:
            self.at = redirection.end()
            return self._redirection(redirection[1], line)
        operator = next((one for one in _OPERATORS if self.text.startswith(one, self.at)), None)
        if operator == "((":
            self._balanced("(", ")")
            return _Token("", line, (_Piece("literal", "((", True),))
        if operator:
            self.at += len(operator)
            if operator == "\n":
                self.line += 1
                self._skip_here_documents()
            return _Token("|" if operator == "|&" else operator, line)
        pieces = self._word()
        if self.text.startswith("(", self.at) and pieces and _is_array_start(pieces):
            self.at += 1
            return _Token("", line, pieces, self._array(line))
        return _Token("", line, pieces)

    def _skip_blanks(self) -> None:
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self.at += 2
                self.line += 1
            elif self.text[self.at] in _BLANK:
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return

    def _redirection(self, operator: str, line: int) -> _Token:
        self._skip_blanks()
        target = self._word() if self.at < len(self.text) and self.text[self.at] not in "\n;|" else ()
        if operator in ("<<", "<<-"):
            self.here_documents.append(("".join(piece.text for piece in target), operator == "<<-"))
        return _Token("redirection", line)

    def _skip_here_documents(self) -> None:
        for end, indented in self.here_documents:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                content = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                self.line += 1
                if (content.lstrip("\t") if indented else content) == end:
                    break
        self.here_documents = []

    def _array(self, line: int) -> tuple[tuple[_Piece, ...], ...]:
        words: list[tuple[_Piece, ...]] = []
        while True:
            self._skip_blanks()
            if self.at >= len(self.text):
                raise ConfigError(f"line {line}: an array is not closed: ) is missing")
            if self.text[self.at] == "\n":
                self.at += 1
                self.line += 1
            elif self.text[self.at] == ")":
                self.at += 1
                return tuple(words)
            else:
                before = self.at
                words.append(self._word())
                if self.at == before:
                    raise ConfigError(f"line {self.line}: {self.text[self.at]!r} is not expected in an array")

    def _word(self) -> tuple[_Piece, ...]:
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "'":
                pieces.append(_Piece("literal", self._until("'"), True))
            elif character == '"':
                pieces += self._double_quoted()
            elif self.text.startswith(("$'", '$"'), self.at):
                self.at += 1
            elif character in "$`" or self.text.startswith(("<(", ">("), self.at):
                pieces.append(self._expansion(quoted=False))
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
                self.line += 1
            elif character == "\\":
                pieces.append(_Piece("literal", self.text[self.at + 1 : self.at + 2], True))
                self.at += 2
            elif character in " \t\n;|&()<>":
                break
            else:
                pieces.append(self._plain(" \t\n;|&()<>'\"\\$`"))
        return tuple(pieces)

    def _plain(self, end: str) -> _Piece:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in end:
            # What is unknown was put there by an earlier expansion, and is not read again.
            self.at = self.text.find(MARK, self.at + 1) + 1 if self.text[self.at] == MARK else self.at + 1
        return _Piece("literal", self.text[start : self.at], False)

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise ConfigError(f"line {self.line}: a quote {quote} is not closed")
        content = self.text[self.at + 1 : end]
        self.line += content.count("\n")
        self.at = end + 1
        return content

    def _double_quoted(self) -> list[_Piece]:
        opened = self.line
        self.at += 1
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                return pieces or [_Piece("literal", "", True)]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                escaped = self.text[self.at + 1]
                self.line += escaped == "\n"
                pieces.append(_Piece("literal", "" if escaped == "\n" else escaped, True))
                self.at += 2
            elif character in "$`":
                pieces.append(self._expansion(quoted=True))
            else:
                plain = self._plain('"$`\\') if character != "\\" else _Piece("literal", "\\", True)
                self.at += character == "\\"
                self.line += plain.text.count("\n")
                pieces.append(plain._replace(quoted=True))
        raise ConfigError(f'line {opened}: a quote " is not closed')

    def _expansion(self, *, quoted: bool) -> _Piece:
        start = self.at
        if self.text[self.at] == "`":
            return _Piece("command", f"`{self._until('`')}`", quoted)
        if self.text.startswith("$((", self.at):
            self.at += 1
            return _Piece("arithmetic", self._balanced("(", ")")[1:-1], quoted)
        if self.text[self.at + 1 : self.at + 2] == "(":
            self.at += 1
            self._balanced("(", ")")
            return _Piece("command", self.text[start : self.at], quoted)
        if self.text.startswith("${", self.at):
            self.at += 1
            return _Piece("variable", self._balanced("{", "}"), quoted)
        name = re.compile(r"[A-Za-z_]\w*|[\d@*#?$!-]").match(self.text, self.at + 1)
        self.at = name.end() if name else self.at + 1
        return _Piece("variable", name[0], quoted) if name else _Piece("literal", "$", quoted)

    def _balanced(self, opening: str, closing: str) -> str:
        """Returns what is between a bracket and the one that closes it, and goes behind it."""
        start, depth = self.at, 0
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == "\\":
                self.at += 1
            elif character == "'" and closing == ")":
                self._until("'")
                continue
            depth += (character == opening) - (character == closing)
            self.line += character == "\n"
            self.at += 1
            if not depth:
                return self.text[start + 1 : self.at - 1]
        raise ConfigError(f"line {self.line}: {opening} is not closed")


def _is_array_start(pieces: tuple[_Piece, ...]) -> bool:
    return len(pieces) == 1 and not pieces[0].quoted and bool(re.fullmatch(r"[A-Za-z_]\w*\+?=", pieces[0].text))


# ---- from tokens to a tree


@dataclass(frozen=True)
class _Node:
    """A command, or a compound of lists of commands.

    Attributes:
        kind: ``command``, ``if``, ``case``, ``loop``, ``function`` or ``group``.
        line: Where it begins.
        tokens: The words of a command, the subject of a case, the name of a function.
        branches: The lists of commands: of an if, conditions and bodies in turns; of any other compound, bodies.
        patterns: The patterns of each branch of a case.
        joiner: The operator before it.
    """

    kind: str
    line: int
    tokens: tuple[_Token, ...] = ()
    branches: tuple[tuple[_Node, ...], ...] = ()
    patterns: tuple[tuple[_Token, ...], ...] = ()
    joiner: str = ""


class _Parser:
    """Makes a tree of tokens."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def script(self) -> tuple[_Node, ...]:
        nodes: list[_Node] = []
        while self.at < len(self.tokens):
            nodes += self._list(())
            if self.at < len(self.tokens):
                token = self.tokens[self.at]
                raise ConfigError(f"line {token.line}: {token.keyword or token.operator} has no beginning")
        return tuple(nodes)

    def _list(self, ends: tuple[str, ...]) -> tuple[_Node, ...]:
        """Returns the commands up to one of the words or operators that end the list."""
        nodes: list[_Node] = []
        joiner = ""
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if (token.operator or token.keyword) in ends:
                break
            if token.keyword in ("then", "elif", "else", "fi", "do", "done", "esac", "}") or token.operator in (
                ")",
                ";;",
            ):
                break
            if token.operator and token.operator != "(":
                if token.operator != "\n":
                    joiner = token.operator
                self.at += 1
                continue
            node = self._node(joiner)
            joiner = ""
            nodes.append(node)
        return tuple(nodes)

    def _node(self, joiner: str) -> _Node:
        token = self.tokens[self.at]
        word, line = token.keyword, token.line
        if token.operator == "(" or word == "{":
            self.at += 1
            end = ")" if token.operator else "}"
            return _Node("group", line, (), (self._body(end, line),), (), joiner)
        if word == "if":
            return self._if(line, joiner)
        if word == "case":
            return self._case(line, joiner)
        if word in ("for", "while", "until", "select"):
            while self.tokens[self.at].keyword != "do":
                self._step(line, word)
            self.at += 1
            return _Node("loop", line, (), (self._body("done", line),), (), joiner)
        is_function = word == "function" or (self._operator(1) == "(" and self._operator(2) == ")" and word)
        if is_function:
            self.at += word == "function"
            name = self.tokens[self.at]
            self.at += 1
            while self.tokens[self.at].operator in ("(", ")", "\n"):
                self._step(line, "function")
            node = self._node("")
            return _Node("function", line, (name,), (node.branches[0] if node.branches else (node,),))
        return self._command(joiner)

    def _operator(self, ahead: int) -> str:
        return self.tokens[self.at + ahead].operator if self.at + ahead < len(self.tokens) else ""

    def _step(self, line: int, what: str) -> None:
        self.at += 1
        if self.at >= len(self.tokens):
            raise ConfigError(f"line {line}: {what} has no end")

    def _body(self, end: str, line: int) -> tuple[_Node, ...]:
        nodes = self._list((end,))
        if self.at >= len(self.tokens) or (self.tokens[self.at].operator or self.tokens[self.at].keyword) != end:
            raise ConfigError(f"line {line}: {end} is missing")
        self.at += 1
        return nodes

    def _if(self, line: int, joiner: str) -> _Node:
        branches: list[tuple[_Node, ...]] = []
        word = "if"
        while word != "fi":
            self.at += 1
            if word in ("if", "elif"):
                branches.append(self._body("then", line))
            branches.append(self._list(("elif", "else", "fi")))
            word = self.tokens[self.at].keyword if self.at < len(self.tokens) else ""
            if word not in ("elif", "else", "fi"):
                raise ConfigError(f"line {line}: fi is missing")
        self.at += 1
        return _Node("if", line, (), tuple(branches), (), joiner)

    def _case(self, line: int, joiner: str) -> _Node:
        self._step(line, "case")
        subject = self.tokens[self.at]
        while self.tokens[self.at].keyword != "in":
            self._step(line, "case")
        patterns: list[tuple[_Token, ...]] = []
        branches: list[tuple[_Node, ...]] = []
        self._step(line, "case")
        while self.tokens[self.at].keyword != "esac":
            if self.tokens[self.at].operator in ("\n", ";;", "("):
                self._step(line, "case")
                continue
            one: list[_Token] = []
            while self.tokens[self.at].operator != ")":
                one.append(self.tokens[self.at])
                self._step(line, "case")
            self._step(line, "case")
            patterns.append(tuple(token for token in one if not token.operator))
            branches.append(self._list((";;", "esac")))
            if self.at >= len(self.tokens):
                raise ConfigError(f"line {line}: esac is missing")
            if self.tokens[self.at].operator != ";;" and self.tokens[self.at].keyword != "esac":
                raise ConfigError(f"line {line}: esac is missing")
        self.at += 1
        return _Node("case", line, (subject,), tuple(branches), tuple(patterns), joiner)

    def _command(self, joiner: str) -> _Node:
        line, start = self.tokens[self.at].line, self.at
        in_test = self.tokens[self.at].keyword == "[["
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if token.operator and not (in_test and token.operator != "\n"):
                break
            self.at += 1
            if token.keyword == "]]":
                break
        return _Node("command", line, tuple(self.tokens[start : self.at]), (), (), joiner)


# ---- from the tree to commands


@dataclass
class _Scope:
    """What the script knows at one place.

    Attributes:
        values: The variables: a text, or the list of an array's elements.
        functions: The bodies of its functions.
        ended: Whether it has ended here, as after ``exit``.
    """

    values: dict[str, str | list[str]] = field(default_factory=dict[str, "str | list[str]"])
    functions: dict[str, tuple[_Node, ...]] = field(default_factory=dict[str, "tuple[_Node, ...]"])
    ended: bool = False

    def copy(self) -> _Scope:
        return _Scope(dict(self.values), dict(self.functions), self.ended)

    def take(self, branches: list[_Scope]) -> None:
        """Becomes what is known after one of several branches, of which any may have been taken."""
        alive = [branch for branch in branches if not branch.ended]
        self.ended = not alive
        if not alive:
            return
        for name in {name for branch in alive for name in branch.values}:
            values = [branch.values.get(name) for branch in alive]
            first = values[0]
            if any(value != first for value in values):
                self.values[name] = _merged(name, values)
            elif first is not None:
                self.values[name] = first
        self.functions = {name: body for branch in alive for name, body in branch.functions.items()}


def _merged(name: str, values: list[str | list[str] | None]) -> str | list[str]:
    """Returns a variable that differs between branches: an array keeps the elements that it has in each of them."""
    lists = [value if isinstance(value, list) else [] if value in (None, "") else None for value in values]
    shared = [one for one in lists if one is not None]
    if len(shared) < len(lists) or not any(isinstance(value, list) for value in values):
        return _unknown(f"${name}")
    common: list[str] = []
    for elements in zip(*shared, strict=False):
        if len(set(elements)) > 1:
            break
        common.append(elements[0])
    return [*common, _unknown(f"${{{name}[@]}}")]


class _Run:
    """Follows a script, and collects its commands."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.done = 0
        self.depth = 0

    def text(self, text: str, scope: _Scope, line: int) -> None:
        if self.depth > _DEEPEST:
            raise ConfigError("it is nested too deeply")
        self.depth += 1
        self.nodes(_Parser(_Lexer(text, line).tokens()).script(), scope)
        self.depth -= 1

    def nodes(self, nodes: tuple[_Node, ...], scope: _Scope) -> bool | None:
        """Follows a list of commands, and returns whether its last one succeeds; None if that is not known."""
        status: bool | None = True
        for node in nodes:
            if scope.ended:
                break
            if (node.joiner == "&&" and status is False) or (node.joiner == "||" and status is True):
                continue
            if node.joiner in ("&&", "||") and status is None:
                branch = scope.copy()
                self.node(node, branch)
                scope.take([branch, scope.copy()])
            else:
                status = self.node(node, scope)
        return status

    def node(self, node: _Node, scope: _Scope) -> bool | None:
        self.done += 1
        if self.done > _MOST_COMMANDS:
            raise ConfigError(f"it runs more than {_MOST_COMMANDS:,} commands")
        if node.kind == "command":
            return self._command(node, scope)
        if node.kind == "if":
            self._if(node, scope)
        elif node.kind == "case":
            self._case(node, scope)
        elif node.kind == "function":
            scope.functions[node.tokens[0].keyword] = node.branches[0]
        elif node.kind == "loop":
            branch = scope.copy()
            self.nodes(node.branches[0], branch)
            scope.take([branch, scope.copy()])
        else:
            return self.nodes(node.branches[0], scope)
        return True

    def _if(self, node: _Node, scope: _Scope) -> None:
        possible: list[_Scope] = []
        branches = list(node.branches)
        while len(branches) > 1:
            condition, body, *branches = branches
            status = self.nodes(condition, scope)
            if status is False:
                continue
            branch = scope.copy()
            self.nodes(body, branch)
            possible.append(branch)
            if status:
                scope.take(possible)
                return
        last = scope.copy()
        self.nodes(branches[0] if branches else (), last)
        scope.take([*possible, last])

    def _case(self, node: _Node, scope: _Scope) -> None:
        subject = self._text(node.tokens[0].pieces, scope)
        possible: list[_Scope] = []
        for patterns, body in zip(node.patterns, node.branches, strict=True):
            texts = [self._text(token.pieces, scope) for token in patterns]
            is_known = not any(is_unknown(text) for text in (subject, *texts))
            if is_known and not any(fnmatch.fnmatchcase(subject, text) for text in texts):
                continue
            branch = scope.copy()
            self.nodes(body, branch)
            possible.append(branch)
            if is_known:
                scope.take(possible)
                return
        scope.take([*possible, scope.copy()])

    def _command(self, node: _Node, scope: _Scope) -> bool | None:
        tokens = list(node.tokens)
        assigned = 0
        while assigned < len(tokens) and self._assigns(tokens[assigned]):
            assigned += 1
        if assigned == len(tokens):
            for token in tokens:
                self._assign(token, scope)
            return True
        first = tokens[assigned].keyword
        if first in ("export", "declare", "local", "readonly", "typeset"):
            for token in tokens[assigned + 1 :]:
                if self._assigns(token):
                    self._assign(token, scope)
            return True
        if first in ("[", "[[", "test"):
            return self._test([self._text(token.pieces, scope) for token in tokens[assigned + 1 :]], tokens)
        words = tuple(word for token in tokens[assigned:] for word in self._expand(token.pieces, scope))
        return self._run(words, node.line, scope) if words else True

    def _run(self, words: tuple[str, ...], line: int, scope: _Scope) -> bool | None:
        """Follows a command whose words are known; an inner script or a function is followed, too."""
        name = words[0]
        if name in scope.functions:
            for number, word in enumerate(words[1:], start=1):
                scope.values[str(number)] = word
            if self.depth > _DEEPEST:
                raise ConfigError(f"line {line}: {name} calls itself")
            self.depth += 1
            status = self.nodes(scope.functions[name], scope)
            self.depth -= 1
            return status
        if name == "exit":
            scope.ended = True
            return True
        if name == "eval":
            self.text(" ".join(words[1:]), scope, line)
            return True
        if name in ("read", "unset"):
            for word in words[1:]:
                scope.values.pop(word, None)
            return True
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        for before, option, inner in zip(words, words[1:], words[2:], strict=False):
            if before.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-\w*c", option):
                self.text(inner, scope.copy(), line)
                return True
        self.commands.append(Command(words, line))
        return True if name != "((" else None

    def _test(self, words: list[str], tokens: list[_Token]) -> bool | None:
        """Returns the result of a test of one or two values; None if it is not known, or is another test."""
        words = [word for word in words if word not in ("]", "]]")]
        if any(token.operator for token in tokens) or any(is_unknown(word) for word in words):
            return None
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return (words[1] == "") == (words[0] == "-z")
        if len(words) == 3 and words[1] in _TESTS:
            left, test, right = words
            if test.startswith("-") and not (_NUMBER.fullmatch(left) and _NUMBER.fullmatch(right)):
                return None
            return _TESTS[test](left, right)
        return None

    def _assigns(self, token: _Token) -> bool:
        if token.array is not None:
            return True
        first = token.pieces[0] if token.pieces else None
        return first is not None and not first.quoted and bool(_ASSIGNMENT.match(first.text))

    def _assign(self, token: _Token, scope: _Scope) -> None:
        found = _ASSIGNMENT.match(token.pieces[0].text)
        assert found is not None
        name, appends = found[1], bool(found[2])
        old = scope.values.get(name, [] if token.array is not None else "")
        if token.array is not None:
            elements = [word for pieces in token.array for word in self._expand(pieces, scope)]
            before = (old if isinstance(old, list) else [old]) if appends else []
            scope.values[name] = [*before, *elements]
        else:
            rest = token.pieces[0]._replace(text=token.pieces[0].text[found.end() :])
            value = self._text((rest, *token.pieces[1:]), scope)
            before = (" ".join(old) if isinstance(old, list) else old) if appends else ""
            scope.values[name] = before + value
        self._check_size(scope.values[name], token.line)

    def _check_size(self, value: str | list[str], line: int) -> None:
        if sum(map(len, value)) > _MOST_CHARACTERS or len(value) > _MOST_CHARACTERS:
            where = f"line {line}: " if line else ""
            raise ConfigError(f"{where}a value grows beyond {_MOST_CHARACTERS:,} characters")

    def _text(self, pieces: tuple[_Piece, ...], scope: _Scope) -> str:
        """Returns a word as one text, as in an assignment."""
        return " ".join(self._expand(tuple(piece._replace(quoted=True) for piece in pieces), scope))

    def _expand(self, pieces: tuple[_Piece, ...], scope: _Scope) -> list[str]:
        """Returns the words that a word becomes: unquoted values are split at blanks, arrays into their elements."""
        words: list[str] = []
        current: str | None = None
        for piece in pieces:
            values = self._values(piece, scope)
            if piece.kind == "literal" or (piece.quoted and len(values) == 1):
                current = (current or "") + values[0]
                continue
            if piece.quoted:
                parts, joined = values, [True] * len(values)
            else:
                parts = [part for value in values for part in re.split(r"[ \t\n]+", value)] if values else []
                joined = [True] * len(parts)
            for number, part in enumerate(parts):
                if number and joined[number]:
                    if current:
                        words.append(current)
                    current = None
                if part or piece.quoted:
                    current = (current or "") + part
        if current is not None:
            words.append(current)
        self._check_size(words, 0)
        return words

    def _values(self, piece: _Piece, scope: _Scope) -> list[str]:
        if piece.kind == "literal":
            return [piece.text]
        if piece.kind == "command":
            return [_unknown(piece.text)]
        if piece.kind == "arithmetic":
            return [_Arithmetic(piece.text, scope).result()]
        return self._variable(piece.text, scope, quoted=piece.quoted)

    def _variable(self, expression: str, scope: _Scope, *, quoted: bool) -> list[str]:
        found = _EXPRESSION.fullmatch(expression)
        if found is None:
            return [_unknown(f"${{{expression}}}")]
        length, name, _, index, rest = found.groups()
        if name in ("@", "*"):
            return []  # the arguments of the script, of which it needs none
        value = scope.values.get(name)
        if length or (rest and rest.lstrip(":")[:1] not in ("-", "=", "+", "?")):
            return [_unknown(f"${{{expression}}}")]
        if rest:
            operation, word = rest.lstrip(":")[0], rest.lstrip(":")[1:]
            is_set = value is not None and not (rest.startswith(":") and value in ("", []))
            if operation == "+":
                return [self._default(word, scope)] if is_set else [""]
            if not is_set and operation in "-=":
                value = self._default(word, scope)
                if operation == "=":
                    scope.values[name] = value
        if value is None:
            return [_unknown(f"${{{expression}}}" if index or rest else f"${name}")]
        elements = value if isinstance(value, list) else [value]
        if index in ("@", "*"):
            return [" ".join(elements)] if index == "*" and quoted else list(elements)
        if index and not (index.isdecimal() and len(index) < 7 and int(index) < len(elements)):
            return [_unknown(f"${{{expression}}}")]
        return [elements[int(index)] if index else elements[0] if elements else ""]

    def _default(self, text: str, scope: _Scope) -> str:
        if self.depth > _DEEPEST:
            raise ConfigError("it is nested too deeply")
        self.depth += 1
        lexer = _Lexer(text, 1)
        words: list[str] = []
        while lexer.at < len(text):
            before = lexer.at
            words += [self._text(lexer._word(), scope)]  # pyright: ignore[reportPrivateUsage]
            if lexer.at == before:
                words.append(text[lexer.at])
                lexer.at += 1
        self.depth -= 1
        return "".join(words)


class _Arithmetic:
    """An expression of whole numbers, as between ``$((`` and ``))``."""

    def __init__(self, text: str, scope: _Scope) -> None:
        self.text = text
        self.scope = scope
        self.tokens = re.findall(r"\d+|\$?\{?[A-Za-z_]\w*\}?|\$\d|\*\*|[-+*/%()]|\S", text)
        self.at = 0

    def result(self) -> str:
        """Returns the number as text; an unknown value if it cannot be known."""
        try:
            number = self._sum()
            complete = self.at == len(self.tokens)
        except (ValueError, ZeroDivisionError, IndexError):
            complete, number = False, 0
        return str(number) if complete else _unknown(f"$(({self.text}))")

    def _sum(self) -> int:
        total = self._product()
        while self.at < len(self.tokens) and self.tokens[self.at] in "+-":
            self.at += 1
            sign = 1 if self.tokens[self.at - 1] == "+" else -1
            total += sign * self._product()
        return _bounded(total)

    def _product(self) -> int:
        total = self._atom()
        while self.at < len(self.tokens) and self.tokens[self.at] in ("*", "/", "%"):
            operator = self.tokens[self.at]
            self.at += 1
            other = self._atom()
            # The shell rounds towards 0.
            quotient = abs(total) // abs(other) * (1 if (total < 0) == (other < 0) else -1) if operator != "*" else 0
            total = total * other if operator == "*" else quotient if operator == "/" else total - quotient * other
            total = _bounded(total)
        return total

    def _atom(self) -> int:
        token = self.tokens[self.at]
        self.at += 1
        if token == "-":
            return -self._atom()
        if token == "(":
            inner = self._sum()
            if self.tokens[self.at] != ")":
                raise ValueError("no )")
            self.at += 1
            return inner
        if not token.isdecimal():
            value = self.scope.values.get(token.strip("${}"))
            token = value if isinstance(value, str) else ""
        if not _NUMBER.fullmatch(token):
            raise ValueError("not a number")
        return int(token)


def _bounded(number: int) -> int:
    """Returns a number that fits into the shell's 64 bits.

    Raises:
        ValueError: If it does not.
    """
    if abs(number) >= 2**63:
        raise ValueError("too large")
    return number
