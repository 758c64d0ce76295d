"""What is in a column is taken as it is, or named as the fault of its row."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scorepool import wire
from scorepool.files.formats.registry import open_source
from scorepool.files.scoring.columns import PromptColumn, ScoreColumns


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**63, 2**64, 10**30])
def test_an_integer_that_is_no_token_id_is_a_fault_of_its_row(token_id: int):
    sentence = f"column 'a' has the token id {token_id}: expected 0 to 2147483647"
    with pytest.raises(ValueError, match=sentence):
        PromptColumn("a").prompt({"a": [0, token_id]})
    with pytest.raises(ValueError, match=sentence):
        ScoreColumns("a", "b").item({"a": [token_id], "b": [1]})
    assert PromptColumn("a").prompt({"a": [0, 2**31 - 1]}) == {"prompt": [0, 2**31 - 1]}


def test_chats_of_a_parquet_file_have_no_keys_of_each_other(tmp_path: Path):
    call = {"id": "1", "name": "look", "arguments": {"city": "Bern"}}
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "user", "content": "Hi", "name": "Ann"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "1"},
        ],
    ]
    pq.write_table(pa.table({"chat": chats}), tmp_path / "in.parquet")
    with open_source(str(tmp_path / "in.parquet"), None) as source:
        found = [PromptColumn("chat").prompt(row.readable_values())["messages"] for row in source.rows]
    calls = [wire.ToolCall(**call)]
    assert found == [
        [wire.Message(role="user", content="Hi")],
        [
            wire.Message(role="user", content="Hi", name="Ann"),
            wire.Message(role="assistant", content="", tool_calls=calls),
            wire.Message(role="tool", content="rain", tool_call_id="1"),
        ],
    ]
