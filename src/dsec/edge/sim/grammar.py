"""The tiny shell's language: text to a tree of lists, pipelines and commands.

Enough for what callers usually send: quoting, `;`, `&&`, `||`, `&`, `|`, `( )`, redirections,
assignments and `$NAME`. No loops, no functions, no command substitution: a syntax error says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


class SyntaxFault(Exception):
    """The text is not of this language."""


@dataclass(frozen=True)
class Part:
    """A piece of a word."""

    text: str
    expand: bool
    """Whether `$NAME` in it is replaced."""
    quoted: bool
    """Whether it stays one field."""


Word = tuple[Part, ...]


@dataclass(frozen=True)
class Redirect:
    """`2> file`, `< file`, `2>&1`."""

    fd: int
    op: str
    target: Word


@dataclass
class Simple:
    """A command with its words and redirections, or a list in parentheses."""

    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)
    body: list[Item] | None = None


@dataclass
class Item:
    """Pipelines joined by && and ||, perhaps sent to the background."""

    chain: list[tuple[str, list[Simple]]]
    """Each with the operator before it: "", "&&" or "||"."""
    background: bool = False


@dataclass(frozen=True)
class Op:
    """An operator token."""

    text: str
    fd: int | None = None


Token = Op | Word

_OPERATOR = re.compile(r"(?P<fd>\d?)(?P<redirect>>>|>&|<|>)|(?P<op>&&|\|\||;|&|\||\n|\(|\))")
_BARE = re.compile(r"[^\s'\"\\;&|<>()$]+")
_VARIABLE = re.compile(r"\$(\{\w+\}|\w+|[?$!#@*])?")


def parse(text: str) -> list[Item]:
    """Read a program.

    Raises:
        SyntaxFault: it is not one.
    """
    reader = _Reader(_tokens(text))
    items = reader.items()
    if reader.peek() is not None:
        raise SyntaxFault("unexpected )")
    return items


def _tokens(text: str) -> list[Token]:
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        if text[at] in " \t" or text.startswith("\\\n", at):
            at += 1 if text[at] in " \t" else 2
        elif text[at] == "#":
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
        elif match := _OPERATOR.match(text, at):
            tokens.append(_operator(match))
            at = match.end()
        else:
            word, at = _word(text, at)
            tokens.append(word)
    return tokens


def _operator(match: re.Match[str]) -> Op:
    if match["op"]:
        return Op(match["op"])
    default = 0 if match["redirect"] == "<" else 1
    return Op(match["redirect"], int(match["fd"]) if match["fd"] else default)


def _word(text: str, at: int) -> tuple[Word, int]:
    parts: list[Part] = []
    while at < len(text) and text[at] not in " \t\n;&|<>()":
        part, at = _part(text, at)
        parts.append(part)
    return tuple(parts), at


def _part(text: str, at: int) -> tuple[Part, int]:
    if text[at] == "'":
        end = _closing(text, "'", at)
        return Part(text[at + 1 : end], expand=False, quoted=True), end + 1
    if text[at] == '"':
        return _double_quoted(text, at + 1)
    if text[at] == "\\":
        return Part(text[at + 1 : at + 2], expand=False, quoted=True), at + 2
    match = _VARIABLE.match(text, at) or _BARE.match(text, at)
    if match is None:
        raise SyntaxFault(f"cannot read {text[at : at + 10]!r}")
    return Part(match[0], expand=True, quoted=False), match.end()


def _closing(text: str, quote: str, at: int) -> int:
    end = text.find(quote, at + 1)
    if end < 0:
        raise SyntaxFault(f"no closing {quote}")
    return end


def _double_quoted(text: str, at: int) -> tuple[Part, int]:
    kept: list[str] = []
    while at < len(text) and text[at] != '"':
        if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
            kept.append("\0$" if text[at + 1] == "$" else text[at + 1].strip("\n"))
            at += 2
        else:
            kept.append(text[at])
            at += 1
    if at >= len(text):
        raise SyntaxFault('no closing "')
    return Part("".join(kept), expand=True, quoted=True), at + 1


class _Reader:
    """Recursive descent over the tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *ops: str) -> str:
        token = self.peek()
        if isinstance(token, Op) and token.text in ops:
            self._at += 1
            return token.text
        return ""

    def items(self) -> list[Item]:
        items: list[Item] = []
        while True:
            while self._take(";", "\n"):
                pass
            if self.peek() is None or self._at_close():
                return items
            items.append(self._item())

    def _at_close(self) -> bool:
        token = self.peek()
        return isinstance(token, Op) and token.text == ")"

    def _item(self) -> Item:
        chain = [("", self._pipeline())]
        while op := self._take("&&", "||"):
            while self._take("\n"):
                pass
            chain.append((op, self._pipeline()))
        ended = self._take(";", "&", "\n")
        if not ended and self.peek() is not None and not self._at_close():
            raise SyntaxFault("unexpected token")
        return Item(chain, background=ended == "&")

    def _pipeline(self) -> list[Simple]:
        stages = [self._simple()]
        while self._take("|"):
            stages.append(self._simple())
        return stages

    def _simple(self) -> Simple:
        command = Simple()
        if self._take("("):
            command.body = self.items()
            if not self._take(")"):
                raise SyntaxFault("no closing )")
        while True:
            token = self.peek()
            if isinstance(token, Op) and token.fd is not None:
                self._at += 1
                command.redirects.append(self._redirect(token))
            elif isinstance(token, tuple) and command.body is None:
                self._at += 1
                command.words.append(token)
            else:
                break
        if not command.words and not command.redirects and command.body is None:
            raise SyntaxFault("a command is missing")
        return command

    def _redirect(self, op: Op) -> Redirect:
        target = self.peek()
        if not isinstance(target, tuple):
            raise SyntaxFault(f"{op.text} without a name")
        self._at += 1
        return Redirect(op.fd or 0, op.text, target)
