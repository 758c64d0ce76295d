"""Load the Lua scripts that every process runs in Redis.

A script names the files that it needs in its first lines, `-- include: outbox.lua`; they come before it, each once. A
script that may run when Redis is out of memory says `-- flags: allow-oom` before them (Redis 7 and Valkey know it). The
names of keys, of a job's fields and of job functions are constants in Lua, which a generated prelude defines. No script
contains one of these names. A name that no prelude defines stops the import.
"""

import re
from functools import cache
from importlib import resources

from scorepool.store.job_fields import JobField
from scorepool.store.lua_constants import LUA_CONSTANTS

_FOLDER = resources.files("scorepool.store").joinpath("lua")
_FLAGS = re.compile(r"\A-- flags: (\S+)$", re.MULTILINE)
_INCLUDE = re.compile(r"^-- include: (\S+)$", re.MULTILINE)
_CONSTANT = re.compile(r"(?<![\w.'\"])_?[A-Z][A-Z_]*[A-Z_]\b(?!['\"\w])")

CONSTANTS: dict[str, str | int] = LUA_CONSTANTS | {f"F_{name}": value for name, value in JobField.all().items()}


@cache
def load(name: str) -> str:
    """Return the source of `store/lua/<name>` with its prelude and what it includes, without comments."""
    files: list[str] = []
    _add(name, files)
    body = "\n".join(filter(None, (line for file in files for line in _code(file).splitlines())))
    used = sorted({name for name in _CONSTANT.findall(_without_strings(body)) if name in CONSTANTS})
    values = (f"'{value}'" if isinstance(value := CONSTANTS[name], str) else str(value) for name in used)
    prelude = f"local {', '.join(used)} = {', '.join(values)}\n" if used else ""
    flags = _FLAGS.match(_read(name))
    shebang = f"#!lua flags={flags[1]}\n" if flags else ""
    return f"{shebang}{prelude}{body}\n"


def unknown_constants(name: str) -> set[str]:
    """Return the names in capitals in one file that neither the prelude nor the file defines."""
    text = _without_strings(_code(name))
    defined = {local.strip() for names in re.findall(r"local ([^=\n]+) =", text) for local in names.split(",")}
    return {found for found in _CONSTANT.findall(text) if found not in CONSTANTS} - defined - {"KEYS", "ARGV"}


def _add(name: str, files: list[str]) -> None:
    for included in _INCLUDE.findall(_read(name)):
        _add(included, files)
    if name not in files:
        files.append(name)


@cache
def _read(name: str) -> str:
    return _FOLDER.joinpath(name).read_text()


def _code(name: str) -> str:
    """Return a file without its comments."""
    return re.sub(r"[ \t]*--(?:[ \t].*)?$", "", _read(name), flags=re.MULTILINE)


def _without_strings(text: str) -> str:
    return re.sub(r"'[^']*'|\"[^\"]*\"", "''", text)
