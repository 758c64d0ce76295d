"""Content of a form: every text that it allows can be generated, and no other. Expressions are compared with `re`."""

import random
import re
from unicodedata import category

import pytest

from scorepool.engine import InvalidRequest
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from tests.chat_formats import EOS, chat_codec_of, compile_constraint, generation_prompt_of, ids_of
from tests.engine.text.chat.test_grammar_compiler import ids_in

NAME = "json_tools"
PATTERNS = [
    r"a|ab|[c-e]{2,3}",
    r"^(ab)+$",
    r"a*?b",
    r"\d{4}-\d\d",
    r"(?i)ab",
    r"(?P<year>\d+)(,b)?",
    r"[^a-c/]x|//",
    r"a/b\/c",
    r"\w+ \S*",
    r"a.b|a\nb",
    "a\nb|é+",
    r"(|ab)",
    r"[\]\[\\]+",
]
TEXTS = [
    *("", "a", "ab", "abab", "aba", "cd", "cde", "cdec", "b", "aab", "2024-01", "2024-1", "٣٣٣٣-٣٣", "AB", "aB"),
    *("12", "12,b", ",b", "dx", "ax", "/x", "//", "/", "a/b/c", r"a/b\/c", "ab cd!", "ab ", " cd", "a\nb", "axb", "é"),
    *("éé", "]", "[]\\", "a\r\nb"),
]
JSON = r"""
root   ::= value # any
value  ::= "{" ws (pair ("," ws pair)*)? "}" ws | "[" ws (value ("," ws value)*)? "]" ws | string ws | number ws
pair   ::= string ws ":" ws value
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws     ::= [ \t\n]*
"""
GRAMMARS = [  # with an expression for the same texts
    ('root ::= "a" | "ab" | [c-e]{2,3}', PATTERNS[0]),
    ('root ::= pair+\npair ::= "a" "b"\n', PATTERNS[1]),
    ("root ::= [a]*\n  [b]  # the second line of a rule", PATTERNS[2]),
    (r'root ::= year "-" [\d]{2}' + "\nyear ::= [0-9\\u0660-\\u0669]{4}", PATTERNS[3]),
    ('root ::= [^a-c/] "x" | "//"', PATTERNS[6]),
    (r'root ::= "a\n" "b" | "\u00e9"+', PATTERNS[10]),
    ('root ::= | "ab"', PATTERNS[11]),
    (r"root ::= [\]\[\\]+", PATTERNS[12]),
    ('start: /[0-9]+/ tail?\ntail: ",b"', r"[0-9]+(,b)?"),  # Lark
    ('%llguidance {}\nstart: "a" "b" | start "ab"', PATTERNS[1]),
]


class Content:
    """The content of a plain text of a form."""

    def __init__(self, **form: object) -> None:
        self.chat = chat_codec_of(NAME)
        self.constraint = compile_constraint(self.chat, StructuredOutputSpec(**form), None)

    def can_be(self, text: str) -> bool:
        """True if each token may follow those before it, and the end the last."""
        token_ids = [*ids_of(NAME, text), *ids_of(NAME, EOS)]
        constraint = self.constraint.restarted()
        return all(
            token_id in ids_in(constraint.token_bitmask(token_ids[:place])) for place, token_id in enumerate(token_ids)
        )

    def any(self, draw: random.Random) -> str | None:
        """Return a text whose tokens are drawn among those that may follow; None if it does not end soon."""
        generated: list[int] = []
        constraint = self.constraint.restarted()
        while len(generated) < 30:
            allowed = ids_in(constraint.token_bitmask(generated))
            ends = allowed & self.chat.tokenizer.eos_ids
            token_id = draw.choice(sorted(allowed if not ends or draw.random() < 0.5 else ends))
            if token_id in self.chat.tokenizer.eos_ids:
                return b"".join(map(self.chat.tokenizer.token_bytes, generated)).decode(errors="surrogateescape")
            generated.append(token_id)
        return None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_expression_matches_what_python_matches_as_a_whole(pattern: str):
    content = Content(regex=pattern)

    assert [text for text in TEXTS if content.can_be(text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]
    for seed in range(8):
        text = content.any(random.Random(seed))
        if text is not None and not any(category(character) == "Cn" for character in text):  # newer than Python
            assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(("grammar", "pattern"), GRAMMARS)
def test_a_grammar_derives_the_texts_of_the_expression_that_says_the_same(grammar: str, pattern: str):
    content = Content(grammar=grammar)

    assert [text for text in TEXTS if content.can_be(text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]


def test_a_recursive_grammar_is_followed():
    content = Content(grammar=JSON)

    for text in ["[]", '{"a": [1, -2.5, {"b": "c\\n\\u00e9 é"}]}', "[[[1]]]"]:
        assert content.can_be(text)
    for text in ["", "[", '{"a"}', "[1,]", '"\n"', "[1]]", "-"]:
        assert not content.can_be(text)


def test_one_of_the_choices_is_generated():
    choice = ["a", "ab", 'say "é"\n', "[c]"]
    content = Content(choice=choice)

    assert all(content.can_be(text) for text in choice)
    assert not any(content.can_be(text) for text in ["", "abc", "say", "c", "b"])
    assert {content.any(random.Random(seed)) for seed in range(20)} <= set(choice)


def test_reasoning_comes_before_the_form_and_calls_instead_of_it():
    chat = chat_codec_of(NAME)
    spec = StructuredOutputSpec(regex="x+", functions=[Function(name="look", parameters={})])
    constraint = compile_constraint(chat, spec, generation_prompt_of(NAME))

    def allowed_after(text: str) -> set[str]:
        allowed = ids_in(constraint.token_bitmask(ids_of(NAME, text)))
        return {chat.tokenizer.token_bytes(token_id).decode("latin-1") for token_id in allowed}

    assert allowed_after("") == {"x", "<think>", "<tool_call>"}
    assert allowed_after("<think>free</think>x") == {"x", EOS}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "a(b"}, r"^character 2: unclosed group$"),
        ({"regex": r"a/\/b/[z-a]"}, r"^character 8: invalid character class range"),
        ({"regex": "a\nb(?=c)"}, r"^character 4: look-around"),
        ({"regex": r"(a)\1"}, r"^character 4: backreferences are not supported$"),
        ({"regex": "a^b"}, r"^lookarounds not supported yet$"),
        ({"regex": "ab\\"}, r"^character 3: a backslash that escapes nothing$"),
        ({"grammar": 'root ::= "a"\nb ::= c'}, r"^line 2, column 7: rule 'c' is not defined$"),
        ({"grammar": 'root ::= "a" |\n ("b"'}, r"^line 2, column 2: '\(' is not closed$"),
        ({"grammar": 'expr ::= "a"'}, r"^line 1, column 1: there is no rule `root`$"),
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, r"^line 2, column 1: rule 'root' is defined twice$"),
        ({"grammar": r'root ::= "\q"'}, r"^line 1, column 10: unknown escape \\q$"),
        ({"grammar": "root ::= " + "(" * 100}, r"^line 1, column 74: more than 64 parentheses in each other$"),
        ({"grammar": 'start: "a" b'}, r"^line 1, column 8: unknown name: \"b\"$"),
        ({"grammar": 'start: "a"\nb: | )\n'}, r"^line 2, column 6: "),
        ({"grammar": 'rule: "a"'}, r"start"),
        ({"grammar": 'start: "a" }\narguments_0: )'}, r"."),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_and_says_where(form: dict[str, str], says: str):
    with pytest.raises(InvalidRequest, match=r"^[^\n]{1,400}$") as caught:
        compile_constraint(chat_codec_of(NAME), StructuredOutputSpec(**form), None)

    assert re.search(says, str(caught.value))
