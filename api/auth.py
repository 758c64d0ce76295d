"""Authenticate clients: API keys as `name:sha256-hex` entries, the owner that a key stands for, the owner's weight."""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from scorepool.api.http.errors import Unauthorized
from scorepool.store import KEY_NAME, LOCAL_OWNER, Settings, SettingsError

_ENTRY = re.compile(rf"(?P<name>{KEY_NAME}):(?P<digest>[0-9a-fA-F]{{64}})(?::(?P<weight>[1-9][0-9]{{0,2}}))?")


class Keyring:
    """Hold the digests of the API keys. A name may have several keys, so that they can be rotated."""

    def __init__(self, entries: list[tuple[str, bytes]], weights: Mapping[str, int] | None = None) -> None:
        self._entries = entries
        self._weights = weights or {}  # by name; 1 if missing

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """Read SCOREPOOL_API_KEYS and the file that SCOREPOOL_API_KEYS_FILE names. Raises SettingsError.

        A variable that is set and holds no key is an error: its operator did not want a server that anyone may use.
        """
        settings.check_keys()
        weights: dict[str, int] = {}
        entries = []
        if settings.api_keys:
            entries += _parse(re.split(r"[,\n]", settings.api_keys), "SCOREPOOL_API_KEYS, entry", weights)
            _check_any(entries, "SCOREPOOL_API_KEYS")
        if settings.api_keys_file:
            place = f"SCOREPOOL_API_KEYS_FILE={settings.api_keys_file!r}"
            in_file = _parse(_read(settings.api_keys_file, place), f"{place}, line", weights)
            _check_any(in_file, place)
            entries += in_file
        names: dict[bytes, str] = {}
        for name, digest in entries:
            if names.setdefault(digest, name) != name:
                raise SettingsError(f"the API keys: {names[digest]} and {name} have the same key")
        return cls(entries, weights)

    def __bool__(self) -> bool:
        """True if API keys are configured. Without them no key is needed, and the server listens on loopback only."""
        return bool(self._entries)

    @property
    def has_several_owners(self) -> bool:
        """True if the keys belong to more than one owner, who then share each queue."""
        return len({name for name, _ in self._entries}) > 1

    @property
    def owners(self) -> list[str]:
        """The names of all keys."""
        return sorted({name for name, _ in self._entries})

    def holds(self, owner: str, digest: bytes) -> bool:
        """True if a key of this owner has this digest."""
        return any(name == owner and hmac.compare_digest(digest, known) for name, known in self._entries)

    def weight(self, owner: str) -> int:
        """Return how many jobs of this owner run for each job of an owner of weight 1, while both have waiting jobs."""
        return self._weights.get(owner, 1)

    def owner(self, key: str | None) -> str:
        """Return the name that the key belongs to. Every entry is compared, in constant time. Raises Unauthorized."""
        if not self._entries:
            return LOCAL_OWNER
        if not key:
            raise Unauthorized("an API key is needed: send `Authorization: Bearer <key>`")
        digest = digest_of(key)
        found = None
        for name, known in self._entries:
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Unauthorized("this API key is not known here")
        return found


def digest_of(key: str) -> bytes:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: str, place: str) -> list[str]:
    """Return the lines of a file of keys, which no other user may change. Raises SettingsError."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read().splitlines()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        raise SettingsError(f"{place}: {error}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise SettingsError(f"{place}: every user may write to it; run `chmod o-w` on it")
    return lines


def _check_any(entries: list[tuple[str, bytes]], place: str) -> None:
    if not entries:
        raise SettingsError(
            f"{place} is set and has no key: give `name:sha256-hex`, as `scorepool key NAME` prints, "
            "or leave the variable out for a server without keys"
        )


def _parse(lines: list[str], place: str, weights: dict[str, int]) -> list[tuple[str, bytes]]:
    """Parse entries and add their weights to `weights`. Blank lines and `#` comments are skipped.

    The text of a bad entry is not shown, because it may be a key.
    """
    entries = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        entry = _ENTRY.fullmatch(text)
        if entry is None:
            raise SettingsError(
                f"{place} {number}: expected `name:sha256-hex`, as `scorepool key NAME` prints, "
                "or `name:sha256-hex:weight` with a weight of 1 to 999"
            )
        name, weight = entry["name"], int(entry["weight"] or 1)
        if name == LOCAL_OWNER:
            raise SettingsError(
                f"{place} {number}: the name {LOCAL_OWNER!r} belongs to servers without keys; expected another"
            )
        if weights.setdefault(name, weight) != weight:
            raise SettingsError(
                f"{place} {number}: another key of {name} has the weight {weights[name]}, this {weight}"
            )
        entries.append((name, bytes.fromhex(entry["digest"])))
    return entries
