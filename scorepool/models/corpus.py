"""Read the demo model's training text: the running Python's documentation and sources. Standard library only.

A `Document` is named after its source: `functools.py` (a file), `topic/assert` (an entry of `help()`),
`built-in/math` (the documentation strings of a compiled module). Training and held-out documents are split by that
name, so no source is in both.
"""

import ast
import hashlib
import inspect
import io
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))

# Excluded because nobody wrote them as prose or code: tables, tests, generated files, installed packages.
EXCLUDED_FOLDERS = {
    "test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__", "_bundled",
    "lib-dynload", "pydoc_data", "turtledemo", "pgen2",
}  # fmt: skip
EXCLUDED_NAMES = re.compile(
    r"_sysconfigdata.*|config-.*|_pydecimal.*|entities\.py|this\.py|__phello__.*|sitecustomize.*"
)

# Compiled modules of every CPython on Linux and macOS. Their documentation is in the interpreter, not in files.
COMPILED_MODULES = [
    "array", "atexit", "binascii", "builtins", "cmath", "errno", "faulthandler", "gc", "itertools", "marshal", "math",
    "posix", "pyexpat", "select", "sys", "time", "unicodedata", "zlib", "_bisect", "_codecs", "_collections", "_csv",
    "_datetime", "_elementtree", "_functools", "_hashlib", "_heapq", "_io", "_json", "_operator", "_pickle", "_random",
    "_signal", "_socket", "_sre", "_string", "_struct", "_thread", "_warnings", "_weakref",
]  # fmt: skip

MIN_SHARED_CHARS = 60  # shorter paragraphs ("See above.") may be in both

Kind = Literal["prose", "code", "chat"]


@dataclass(frozen=True)
class Document:
    source: str
    kind: Kind
    text: str


def is_held_out(source: str) -> bool:
    """True if `source` is not trained on: one name in twenty, the same on every machine."""
    return hashlib.sha256(source.encode()).digest()[0] % 20 == 0


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Return (train, held out). A paragraph of a held-out source is removed from the training documents too."""
    held_out = [d for d in documents if is_held_out(d.source)]
    held_out_keys = {key for d in held_out for key in map(_key, _paragraphs(d.text)) if len(key) >= MIN_SHARED_CHARS}
    train = []
    for document in documents:
        if not is_held_out(document.source):
            kept = [p for p in _paragraphs(document.text) if _key(p) not in held_out_keys]
            train.append(Document(document.source, document.kind, "\n\n".join(kept).strip("\n") + "\n"))
    return [d for d in train if d.text.strip()], held_out


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*?\n", text)


def _key(paragraph: str) -> str:
    """Normalise a paragraph: the keys are equal if only layout or comment signs differ."""
    return " ".join(word for word in paragraph.split() if word not in {"#", '"""', '"'})


def read_documents() -> list[Document]:
    """Read all documents, in an order that depends only on the Python version."""
    documents = [*_topics(), *_compiled_modules()]
    for path in _source_files():
        source = path.relative_to(STANDARD_LIBRARY).as_posix()
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        documents.append(Document(source, "code", text))
        documents += [Document(source, "prose", prose) for prose in (_docstrings(tree, source), *_comments(text))]
        documents += [Document(source, "chat", chat) for chat in _chats(tree, source)]
    return [d for d in documents if len(d.text.strip()) >= 80]


def _source_files() -> Iterator[Path]:
    for path in sorted(STANDARD_LIBRARY.rglob("*.py")):
        parts = path.relative_to(STANDARD_LIBRARY).parts
        if EXCLUDED_FOLDERS.isdisjoint(parts) and not any(map(EXCLUDED_NAMES.fullmatch, parts)):
            try:
                path.read_text("utf-8")
            except UnicodeDecodeError:  # a few old files declare latin-1
                continue
            yield path


def _topics() -> Iterator[Document]:
    for name, text in sorted(topics.items()):
        yield Document(f"topic/{name}", "prose", text)


def _compiled_modules() -> Iterator[Document]:
    for name in COMPILED_MODULES:
        module = import_module(name)
        entries = [f"{name}\n\n{inspect.getdoc(module) or ''}"]
        for attribute, value in sorted(vars(module).items()):
            if callable(value) and not attribute.startswith("_"):
                entries.append(f"{attribute}\n\n{inspect.getdoc(value) or ''}")
                if inspect.isclass(value):
                    methods = sorted((k, v) for k, v in vars(value).items() if callable(v) and not k.startswith("_"))
                    entries += [f"{attribute}.{key}\n\n{inspect.getdoc(method) or ''}" for key, method in methods]
        yield Document(f"built-in/{name}", "prose", "\n\n".join(entries) + "\n")


def _docstrings(tree: ast.Module, source: str) -> str:
    """Join a file's documentation strings to one page: the module's, then each function's after its signature."""
    pages = [ast.get_docstring(tree) or ""]
    for name, node in _definitions(tree, _module_name(source)):
        if documentation := ast.get_docstring(node):
            signature = f"{name}({ast.unparse(node.args)})" if not isinstance(node, ast.ClassDef) else f"class {name}"
            pages.append(f"{signature}\n\n{documentation}")
    return "\n\n".join(pages) + "\n"


def _comments(text: str) -> Iterator[str]:
    """Yield blocks of at least three comment lines, without the comment signs."""
    block: list[str] = []
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or token.line.strip() != token.string:
            continue
        if token.start[0] != last_line + 1:
            if len(block) >= 3:
                yield "\n".join(block) + "\n"
            block = []
        block.append(token.string.lstrip("#").removeprefix(" ").rstrip())
        last_line = token.start[0]
    if len(block) >= 3:
        yield "\n".join(block) + "\n"


QUESTIONS = [
    "What does {name} do?",
    "What is {name}?",
    "Explain {name}.",
    "What is {name} for?",
    "Describe {name} in one sentence.",
]


def _chats(tree: ast.Module, source: str) -> Iterator[str]:
    """Yield a question about each documented function or class, answered by its documentation's first sentence."""
    for name, node in _definitions(tree, _module_name(source)):
        first_paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
        sentence = re.split(r"(?<=\.)\s", " ".join(first_paragraph.split()))[0]
        if 25 <= len(sentence) <= 240 and sentence[0].isalpha():
            question = QUESTIONS[len(sentence) % len(QUESTIONS)].format(name=name)
            yield chat(question, sentence)


def chat(question: str, answer: str) -> str:
    """Return the ChatML text of one exchange, as the chat template renders it."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    """Yield (dotted name, node) of each function and class in the file's order, outer before inner."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Definition):
            name = f"{prefix}.{node.name}"
            yield name, node
            yield from _definitions(node, name)


def _module_name(source: str) -> str:
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
