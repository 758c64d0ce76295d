"""What a JSON body holds is counted before it is built, in time that grows with its length."""

import json

import pytest

from scorepool.api.http import bodies
from scorepool.api.http.errors import TooLarge


@pytest.mark.parametrize("text", ['a"[{', "\\", '\\"[', '\\\\"{"', "", "[" * 70_000])
def test_brackets_in_strings_are_no_lists(text: str):
    few = json.dumps([text, {"key": [text]}] * 3).encode()

    assert bodies._num_containers(few) == 1 + 3 * 2


def test_an_unterminated_string_of_quotes_is_read_once():
    """A search that begins again at every escaped quote takes hours."""
    body = b"[" * 200_000 + b'"' + b'\\"' * 500_000

    with pytest.raises(TooLarge, match="200000 lists and objects"):
        bodies.Body("alice", body, "json")._parse_large(lambda *_: None)
