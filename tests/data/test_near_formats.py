"""Rows that are almost in a format: what is said of them, and their keys under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from meshwright.data.chat_formats import KEYS, conversation_of, near_format
from meshwright.data.near_formats import advice, nearest_format, renamed
from meshwright.spec import UserError, load
from meshwright.spec.load import from_tree
from meshwright.units import counted

TURNS = [{"from": "human", "value": "a"}]
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "format", "columns", "missing"),
    [
        ({"question": "a", "answer": "b"}, "alpaca", {"instruction": "question", "output": "answer"}, []),
        ({"query": "a", "response": "b"}, "alpaca", {"instruction": "query", "output": "response"}, []),
        ({"Question": "a", "Answer": "b"}, "alpaca", {"instruction": "Question", "output": "Answer"}, []),
        (
            {"instruction": "a", "context": "c", "response": "b"},
            "alpaca",
            {"output": "response", "input": "context"},
            [],
        ),
        ({"instruction": "a", "context": "c", "output": "b"}, "alpaca", {"input": "context"}, []),
        ({"prompt": "a", "response": "b"}, "prompt", {"completion": "response"}, []),
        ({"instruction": "a"}, "alpaca", {}, ["output"]),
        ({"prompt": "a"}, "prompt", {}, ["completion"]),
        ({"prompt": "a", "chosen": "b"}, "prompt", {}, ["completion"]),
        ({"dialog": MESSAGES}, "chat", {"messages": "dialog"}, []),
        ({"conversation": TURNS}, "sharegpt", {"conversations": "conversation"}, []),
        ({"messages": MESSAGES}, "chat", {}, []),
    ],
)
def test_the_nearest_format_of_a_row(
    row: dict[str, Any], format: str, columns: Mapping[str, str], missing: list[str]
) -> None:
    near = nearest_format(row, KEYS)
    assert near is not None and (near.format, near.columns, near.missing) == (format, columns, missing)
    if not missing and format != "prompt":
        assert conversation_of(renamed(row, near.columns), format).messages  # type: ignore[arg-type]


def test_what_is_said_names_flags_or_what_is_missing() -> None:
    assert near_format({"question": "a", "answer": "b"}) == (
        "data.format = 'alpaca' (instruction and output) reads them with --data.columns.instruction question "
        "--data.columns.output answer"
    )
    assert advice({"prompt": "a"}, KEYS).endswith("(prompt and completion), for which completion is missing")
    assert "need a corpus each, mixed by data.mixture" in near_format({"messages": MESSAGES})
    assert near_format({"title": "a", "dialog": "b"}) == ""


def test_renamed_rows_keep_what_else_they_have() -> None:
    row = {"question": "a", "answer": "b", "output": "other", "system": "s"}
    columns = {"instruction": "question", "output": "answer"}
    assert renamed(row, columns) == {"system": "s", "instruction": "a", "output": "b"}
    assert renamed(row, {}) is row and renamed(["a"], columns) == ["a"]


def test_flags_and_files_name_columns() -> None:
    flags = [("data.columns.instruction", "question"), ("data.columns.output", "7")]
    assert load(None, flags).data.columns == {"instruction": "question", "output": "7"}
    tree: dict[str, Any] = {"data": {"columns": {"output": "answer"}}}
    assert from_tree(tree).data.columns == {"output": "answer"}
    assert from_tree(tree, [("data.columns", "none")]).data.columns == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"columns": {"instructon": "a"}}, "data.columns.instructon: .*; did you mean 'instruction'"),
        ({"columns": {"question": "instruction"}}, "give the key of the format first, and then its name"),
        ({"columns": {"output": ""}}, "data.columns.output: '' names no column"),
        ({"columns": {"output": "a"}, "format": "text"}, "data.columns: names keys of chats"),
        ({"columns": {"output": {"a": "b"}}}, "where a text should be"),
    ],
)
def test_a_column_that_no_format_has_is_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_tree({"data": data})


def test_numbers_take_the_singular() -> None:
    plural = "chats without a token to train on"
    assert (counted(1, plural), counted(2, plural)) == ("1 chat without a token to train on", f"2 {plural}")
    assert [counted(1, each) for each in ("microbatches", "empty", "pairs with an answer")] == [
        "1 microbatch", "1 empty", "1 pair with an answer",
    ]  # fmt: skip
