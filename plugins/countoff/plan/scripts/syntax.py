"""A bash script as the tree of tree-sitter's grammar, or one line that says where it is not well-formed."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from countoff.plan.fields import ConfigError
from countoff.plan.scripts.unknown import unknown

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["parsed", "parts", "source"]

# Real scripts have below 25,000.
_MOST_CHARACTERS = 200_000
# tree-sitter asks whether to go on, but not while it gives up a pipeline without an end. Real scripts have below 100.
_MOST_PIPES = 1_000
# `DATA=<where it is>`, to be filled in, as in examples. Bash would refuse it.
_PLACEHOLDER = re.compile(r"(?<==)<[^<>\n]*>")
# The grammar takes `$a/$b.c` for two words and `$1_a` for one variable (tree-sitter-bash issues 315 and 306). It reads
# `${a?}/${b?}.c` and `${1?}_a` as bash does, and no script has them.
_EXPANSION = re.compile(r"(?<![\\$])\$([A-Za-z_]\w*|\d)")
_REWRITTEN = re.compile(r"\$\{(\w+)\?\}")
# What ends a part of a script, by the token that begins it.
_ENDS = {
    **{"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "do": "done", "{": "}", "[[": "]]"},
    **{"(": ")", "((": "))", "$(": ")", "$((": "))", "${": "}", "'": "'", '"': '"', "`": "`"},
}


def parsed(text: str, *, line: int, until: float) -> Node:
    """Returns the tree of a script; ``${…}`` that the grammar does not know are in it with an error.

    Args:
        text: The script.
        line: The line in which it begins.
        until: When to give up, on the clock of ``time.process_time``.

    Raises:
        ConfigError: If tree-sitter is not installed, or the script is not well-formed or larger than any real one.
    """
    try:
        import tree_sitter_bash
        from tree_sitter import Language, Parser
    except ModuleNotFoundError:
        raise ConfigError("reading a launch script needs tree-sitter: pip install 'countoff[plan]'") from None
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"it has more than {_MOST_CHARACTERS:,} characters")
    if text.count("|") > _MOST_PIPES:
        raise ConfigError(f"it has more than {_MOST_PIPES:,} pipes")
    text = _PLACEHOLDER.sub(lambda found: unknown(found[0]), text.rstrip().removesuffix("\\"))
    # Behind as many lines as come before it, so that its nodes count from the first one.
    script = ("\n" * (line - 1) + _EXPANSION.sub(r"${\1?}", text)).encode()
    parser = Parser(Language(tree_sitter_bash.language()))
    try:
        tree = parser.parse(
            lambda at, _: script[at : at + 4096], progress_callback=lambda *_: time.process_time() > until
        )
    except ValueError:
        raise ConfigError("it takes too long to read") from None
    wrong = _first_error(tree.root_node)
    if wrong is not None:
        raise ConfigError(_what_is_wrong(wrong))
    # The same tree, on bytes. Of a tree that a callback has given, tree-sitter asks it for the text of each node, and
    # crashes the process where Python refuses to call any deeper.
    return parser.parse(script, tree).root_node


def source(node: Node) -> str:
    """Returns the text of a node, as the script has it."""
    return _REWRITTEN.sub(r"$\1", (node.text or b"").decode())


def parts(node: Node) -> list[Node]:
    """Returns the children of a node without punctuation and comments."""
    return [child for child in node.named_children if child.type != "comment"]


def _first_error(node: Node) -> Node | None:
    if not node.has_error or node.type == "expansion":
        return None
    if node.is_error or node.is_missing:
        return node
    return next(filter(None, map(_first_error, node.children)), None)


def _what_is_wrong(node: Node) -> str:
    if node.is_missing:
        return f"line {node.start_point.row + 1}: {node.type.replace('_', ' ')} is missing"
    first = _leaf(node, 0)
    end = _ENDS.get(source(first)[:1] if first.is_named else first.type)
    if end is not None:
        return f"line {first.start_point.row + 1}: {end} is missing"
    last = _leaf(node, -1)
    shown = " ".join(source(last).split())[:20]
    return f"line {last.start_point.row + 1}: {shown or 'its end'} is not expected"


def _leaf(node: Node, at: int) -> Node:
    while node.children:
        node = node.children[at]
    return node
