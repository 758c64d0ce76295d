"""The SDK's keyword arguments are the fields of the requests, with the same types."""

from typing import get_type_hints

import pytest

from scorepool import Classify, Compare, Embed, Generate, Score, Tokenize
from scorepool.options import (
    ClassifyOptions,
    CompareOptions,
    EmbedOptions,
    GenerateOptions,
    ScoreOptions,
    TokenizeOptions,
)
from scorepool.wire.score import NOT_COMPARED


@pytest.mark.parametrize(
    ("options", "request_type", "positional"),
    [
        (ScoreOptions, Score, {"model", "items"}),
        (CompareOptions, Compare, {"model", "base", "items", *NOT_COMPARED}),
        (GenerateOptions, Generate, {"model", "prompt"}),
        (ClassifyOptions, Classify, {"model", "items"}),
        (EmbedOptions, Embed, {"model", "items"}),
        (TokenizeOptions, Tokenize, {"model", "prompt"}),
    ],
)
def test_options_are_the_fields_of_the_request(options: type, request_type: type, positional: set[str]):
    fields = get_type_hints(request_type)
    assert get_type_hints(options) == {name: fields[name] for name in fields if name not in positional}
