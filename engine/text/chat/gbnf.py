"""Translate a grammar in GBNF, as llama.cpp and xgrammar write it, to llguidance's dialect of Lark. Pure.

    root ::= "(" root ")" | word        start: rule_0
    word ::= [a-z]+                     rule_0: "(" rule_0 ")" | TERMINAL_1
                                        TERMINAL_1: /[\\x{61}-\\x{7a}]/+

A rule that refers to no recursive rule becomes a terminal, so a grammar without recursion is one regular expression.
In a recursive grammar the lexer takes the longest text that a terminal or a literal matches.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from scorepool.engine.errors import InvalidRequest

MAX_DEPTH = 64  # of parentheses
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*)+)
    |(?P<name>[A-Za-z0-9_-]+)(?P<defines>\s*::=)?
    |(?P<literal>"(?:[^"\\\r\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\r\n]|\\.)*\])
    |(?P<repeat>\{\s*\d{1,6}\s*(?:,\s*(?:\d{1,6})?\s*)?\})
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "0": "\0"}
_CLASSES = "dDsSwW"
_PLAIN = "\"'\\[]/-^.$*+?(){}|"


class Token(NamedTuple):
    kind: str  # name, defines, literal, set, repeat, sign, or end
    text: str
    start: int


@dataclass(slots=True)
class Rule:
    name: str
    start: int
    pieces: list[str | Token] = field(default_factory=list)  # of Lark; a token is a reference to a rule


def is_gbnf(text: str) -> bool:
    """True if a grammar defines rules as GBNF does."""
    return "::=" in text


def to_lark(text: str) -> str:
    """Return the grammar in Lark, with the rule `start`. Raises InvalidRequest with the line and the column."""
    rules: dict[str, Rule] = {}
    tokens = _Tokens(text)
    while tokens.next.kind != "end":
        rule = _read_rule(tokens)
        if rule.name in rules:
            raise tokens.error(f"rule {rule.name!r} is defined twice", rule.start)
        rules[rule.name] = rule
    if "root" not in rules:
        raise tokens.error("there is no rule `root`", 0)
    for rule in rules.values():
        for token in _references(rule):
            if token.text not in rules:
                raise tokens.error(f"rule {token.text!r} is not defined", token.start)
    terminals = _terminals(rules)
    names = {name: f"TERMINAL_{index}" if name in terminals else f"rule_{index}" for index, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, rule in rules.items():
        pieces = (names[piece.text] if isinstance(piece, Token) else piece for piece in rule.pieces)
        lines.append(f"{names[name]}: {' '.join(pieces)}")
    return "\n".join(lines)


class _Tokens:
    """The tokens of a grammar, with the next one in sight."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found = self._read()
        self.next = next(self._found)

    def take(self) -> Token:
        token, self.next = self.next, next(self._found, self.next)
        return token

    def error(self, message: str, start: int) -> InvalidRequest:
        line = self._text.count("\n", 0, start) + 1
        column = start - (self._text.rfind("\n", 0, start) + 1) + 1
        return InvalidRequest(f"line {line}, column {column}: {message}")

    def _read(self) -> Iterator[Token]:
        start = 0
        while start < len(self._text):
            match = _TOKEN.match(self._text, start)
            if match is None:
                raise self.error(f"unexpected {self._text[start]!r}", start)
            kind = "defines" if match["defines"] else str(match.lastgroup)
            if kind != "space":
                yield Token(kind, match["name"] or match[0], start)
            start = match.end()
        yield Token("end", "", start)


def _read_rule(tokens: _Tokens) -> Rule:
    token = tokens.take()
    if token.kind != "defines":
        raise tokens.error(f"expected a rule, as in `root ::= ...`, found {token.text!r}", token.start)
    rule = Rule(token.text, token.start)
    _read_alternatives(tokens, rule, depth=0)
    if tokens.next.text == ")":
        raise tokens.error("')' closes nothing", tokens.next.start)
    return rule


def _read_alternatives(tokens: _Tokens, rule: Rule, depth: int) -> None:
    """Read up to the `)` of a group, or to the next rule."""
    is_empty = True
    while tokens.next.kind not in ("end", "defines") and tokens.next.text != ")":
        if tokens.next.text == "|":
            rule.pieces += ['""'] * is_empty + ["|"]
            tokens.take()
            is_empty = True
            continue
        _read_item(tokens, rule, depth)
        is_empty = False
    rule.pieces += ['""'] * is_empty


def _read_item(tokens: _Tokens, rule: Rule, depth: int) -> None:
    token = tokens.take()
    match token.kind, token.text:
        case "name", _:
            rule.pieces.append(token)
        case "literal", text:
            rule.pieces.append(json.dumps("".join(_characters(tokens, token, text[1:-1])), ensure_ascii=False))
        case "set", _:
            rule.pieces.append(_set_regex(tokens, token))
        case "sign", ".":
            rule.pieces.append("/(?s:.)/")
        case "sign", "(":
            _read_group(tokens, rule, token, depth)
        case _:
            raise tokens.error(f"{token.text!r} repeats nothing", token.start)
    if tokens.next.kind == "repeat" or tokens.next.text in ("*", "+", "?"):
        rule.pieces.append("".join(tokens.take().text.split()))


def _read_group(tokens: _Tokens, rule: Rule, token: Token, depth: int) -> None:
    if depth == MAX_DEPTH:
        raise tokens.error(f"more than {MAX_DEPTH} parentheses in each other", token.start)
    rule.pieces.append("(")
    _read_alternatives(tokens, rule, depth + 1)
    if tokens.take().text != ")":
        raise tokens.error("'(' is not closed", token.start)
    rule.pieces.append(")")


def _set_regex(tokens: _Tokens, token: Token) -> str:
    """Return the regular expression of a set of characters."""
    inner = token.text[1:-1]
    negation, inner = ("^", inner[1:]) if inner.startswith("^") else ("", inner)
    pieces: list[str] = []
    for found in _ESCAPE.finditer(inner):
        if found[4] and found[4] in _CLASSES:
            pieces.append(f"\\{found[4]}")
        elif found[0] == "-" and found.start() > 0 and found.end() < len(inner):
            pieces.append("-")  # a range
        else:
            pieces.append(f"\\x{{{ord(_character(tokens, token, found)):x}}}")
    if not pieces:
        raise tokens.error("a set without characters", token.start)
    return f"/[{negation}{''.join(pieces)}]/"


def _characters(tokens: _Tokens, token: Token, text: str) -> Iterator[str]:
    """Yield the characters of a literal."""
    for found in _ESCAPE.finditer(text):
        yield _character(tokens, token, found)


def _character(tokens: _Tokens, token: Token, found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code is not None:
        if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
            raise tokens.error(f"{found[0]} is no character", token.start)
        return chr(int(code, 16))
    escaped = found[4]
    if escaped is None:
        return found[0]
    if escaped in _CONTROLS:
        return _CONTROLS[escaped]
    if escaped not in _PLAIN:
        raise tokens.error(f"unknown escape {found[0]}", token.start)
    return escaped


def _references(rule: Rule) -> list[Token]:
    return [piece for piece in rule.pieces if isinstance(piece, Token)]


def _terminals(rules: dict[str, Rule]) -> set[str]:
    """Return the names of the rules from which no recursion is reached."""
    unknown = {name: {token.text for token in _references(rule)} for name, rule in rules.items()}
    referring: dict[str, list[str]] = {name: [] for name in rules}
    for name, referred in unknown.items():
        for other in referred:
            referring[other].append(name)
    ready = [name for name, referred in unknown.items() if not referred]
    found: set[str] = set()
    while ready:
        name = ready.pop()
        found.add(name)
        for other in referring[name]:
            unknown[other].discard(name)
            if not unknown[other]:
                ready.append(other)
    return found
