"""Rows of chats as conversations, in each format, and what is said of rows that are in none."""

from __future__ import annotations

import json
from collections import Counter
from datetime import date
from typing import Any

import pytest
from chat_cases import TOOLS, call, turns

from meshwright.data.chat_formats import EMPTY, conversation_of, conversations_of, format_of
from meshwright.spec import UserError

CALL = {"name": "weather", "arguments": {"city": "Köln"}}


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["messages"], "chat"),
        (["id", "messages", "tools"], "chat"),
        (["prompt", "messages", "prompt_id"], "chat"),
        (["prompt", "completion"], "prompt"),
        (["instruction", "input", "output"], "alpaca"),
        (["conversations", "system"], "sharegpt"),
        (["text", "url"], "text"),
    ],
)
def test_keys_tell_the_format(keys: list[str], wanted: str) -> None:
    assert format_of(keys) == wanted


def test_keys_of_no_format_are_told_with_what_would_work() -> None:
    words = r"keys are url, id, .* messages for chat; prompt and completion for prompt; instruction and "
    with pytest.raises(UserError, match=f"^data.format: a row's {words}output for alpaca"):
        format_of(["url", "id"])
    with pytest.raises(UserError, match=r"'alpaca' .* with --data.columns.instruction question --data"):
        format_of(["question", "answer"])
    with pytest.raises(UserError, match="keys are none"):
        format_of([])


def test_keys_of_two_formats_ask_for_one() -> None:
    with pytest.raises(UserError, match=r"which may be alpaca or text; give one of them as data\.format$"):
        format_of(["instruction", "output", "text"])


def plain(*pairs: tuple[str, str]) -> tuple[dict[str, Any], ...]:
    return tuple({"role": role, "content": text} for role, text in pairs)


ROWS: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], ...]]] = {
    "a chat": ("chat", {"messages": turns("a", "b")}, plain(("user", "a"), ("assistant", "b"))),
    "null keys": (
        "chat",
        {"messages": [{"role": "user", "content": "a", "tool_calls": None, "name": None}]},
        plain(("user", "a")),
    ),
    "an instruction": (
        "alpaca",
        {"instruction": "Add", "input": "1 1", "output": "2"},
        plain(("user", "Add\n1 1"), ("assistant", "2")),
    ),
    "an instruction alone": (
        "alpaca",
        {"instruction": "Add", "input": "", "output": "2"},
        plain(("user", "Add"), ("assistant", "2")),
    ),
    "an instruction with a system and a history": (
        "alpaca",
        {"instruction": "c", "input": None, "output": "d", "system": "s", "history": [["a", "b"]]},
        plain(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")),
    ),
    "sharegpt": (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
        plain(("system", "s"), ("user", "a"), ("assistant", "b")),
    ),
    "sharegpt of other names": (
        "sharegpt",
        {
            "conversations": [
                {"from": name, "value": name} for name in ("system", "user", "model", "assistant", "tool")
            ]
        },
        plain(
            ("system", "system"),
            ("user", "user"),
            ("assistant", "model"),
            ("assistant", "assistant"),
            ("tool", "tool"),
        ),
    ),
    "sharegpt with a system of its own": (
        "sharegpt",
        {
            "conversations": [{"from": "system", "value": "own"}, {"from": "human", "value": "a"}],
            "system": "s",
        },
        plain(("system", "own"), ("user", "a")),
    ),
    "sharegpt with roles": (
        "sharegpt",
        {"conversations": turns("a", "b")},
        plain(("user", "a"), ("assistant", "b")),
    ),
    "sharegpt with a call": (
        "sharegpt",
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "sunny"},
            ]
        },
        (
            *plain(("user", "a")),
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
            *plain(("tool", "sunny")),
        ),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_messages(name: str) -> None:
    format, row, wanted = ROWS[name]
    found = conversation_of(row, format)  # type: ignore[arg-type]
    assert found.messages == wanted
    assert found.tools is None and not found.is_text


def test_prompts_are_texts_or_messages() -> None:
    found = conversation_of({"prompt": "a", "completion": "b"}, "prompt", "x line 2")
    assert (found.prompt, found.completion, found.is_text, found.place) == ("a", "b", True, "x line 2")
    chat = turns("a", "b", "c")
    found = conversation_of({"prompt": chat[:1], "completion": chat[1:]}, "prompt")
    assert (found.prompt, found.completion, found.messages) == ((chat[0],), (*chat[1:],), (*chat,))
    assert not found.is_text


@pytest.mark.parametrize("given", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_a_list_or_its_json(given: Any) -> None:
    assert conversation_of({"messages": turns("a"), "tools": given}, "chat").tools == TOOLS


@pytest.mark.parametrize("given", [None, [], "", "  "])
def test_no_tools_are_none(given: Any) -> None:
    assert conversation_of({"messages": turns("a"), "tools": given}, "chat").tools is None


def test_tools_of_sharegpt_are_wrapped_as_templates_take_them() -> None:
    row = {"conversations": [{"from": "human", "value": "a"}], "tools": json.dumps([TOOLS[0]["function"]])}
    assert conversation_of(row, "sharegpt").tools == TOOLS


def test_variables_are_trls() -> None:
    row = {"messages": turns("a"), "chat_template_kwargs": {"enable_thinking": False}}
    assert conversation_of(row, "chat").variables == {"enable_thinking": False}


def test_calls_and_parts_stay() -> None:
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": [call("weather", 1, city="Rome")], "reasoning_content": "so"},
        {"role": "tool", "content": {"sky": "blue"}, "tool_call_id": "1"},
    ]
    assert conversation_of({"messages": chat}, "chat").messages == tuple(chat)


def test_rows_without_a_message_are_counted() -> None:
    rows = [("1", {"messages": []}), ("2", {"messages": turns("a")}), ("3", {"messages": None})]
    skipped: Counter[str] = Counter()
    assert [each.place for each in conversations_of(rows, "chat", skipped)] == ["2"]
    assert skipped == {EMPTY: 2}


WRONG: dict[str, tuple[str, Any, str]] = {
    "no object": ("chat", ["a"], r"f line 3 is \[\"a\"\], no object"),
    "no messages": (
        "chat",
        {"text": "a"},
        r"f line 3, key 'messages': it is missing; the row's keys are text",
    ),
    "messages as a text": ("chat", {"messages": "a"}, r"key 'messages': it is \"a\"; give a list"),
    "a message that is a text": (
        "chat",
        {"messages": ["a"]},
        r"key 'messages\[0\]': .* give an object with \"role\"",
    ),
    "no role": (
        "chat",
        {"messages": [{"content": "a"}]},
        r"key 'messages\[0\].role': it is missing; give one of system, ",
    ),
    "another role": (
        "chat",
        {"messages": [{"role": "bot", "content": "a"}]},
        r"\.role': it is \"bot\"; give one of",
    ),
    "no content": (
        "chat",
        {"messages": [{"role": "user"}]},
        r"\.content': it is missing; give a text, or tool_calls",
    ),
    "a number": (
        "chat",
        {"messages": [{"role": "user", "content": 3}]},
        r"\.content': it is 3; give a text, or a list",
    ),
    "calls that are none": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": "x"}]},
        r"\.tool_calls': it is \"x\"; give a list",
    ),
    "a value that is not JSON's": (
        "chat",
        {"messages": [{"role": "user", "content": "a", "day": date(2026, 1, 1)}]},
        r"key 'messages\[0\].day': it is of the type date; give texts",
    ),
    "half a letter": (
        "chat",
        {"messages": turns("\ud800")},
        r"key 'messages\[0\].content': it is not valid text",
    ),
    "tools that are no JSON": (
        "chat",
        {"messages": turns("a"), "tools": "{"},
        r"key 'tools': \"{\" is not JSON",
    ),
    "tools that are no list": (
        "chat",
        {"messages": turns("a"), "tools": {"a": 1}},
        r"key 'tools': .* JSON schemas",
    ),
    "variables that are none": (
        "chat",
        {"messages": turns("a"), "chat_template_kwargs": "x"},
        r"chat_template_kwargs': .* give an object",
    ),
    "a prompt without a completion": (
        "prompt",
        {"prompt": "a"},
        r"key 'completion': it is missing; the row's keys are prompt; add it, or remove the row",
    ),
    "a prompt of both": (
        "prompt",
        {"prompt": "a", "completion": turns("a")},
        r"key 'completion': .* give a text",
    ),
    "an empty prompt": (
        "prompt",
        {"prompt": [], "completion": turns("a")},
        r"key 'prompt': it has no message",
    ),
    "no output": (
        "alpaca",
        {"instruction": "a"},
        r"key 'output': it is missing; the row's keys are instruction;",
    ),
    "a null output": (
        "alpaca",
        {"instruction": "a", "output": None},
        r"key 'output': it is null; give a text",
    ),
    "other names": (
        "alpaca",
        {"Question": "a", "answer": "b"},
        r"key 'instruction': it is missing; .* --data.columns.instruction Question --data.columns.output",
    ),
    "another format": (
        "chat",
        {"instruction": "a", "output": "b"},
        r"f line 3, key 'messages': it is missing; .* make it alpaca, and it is read as chat, .*mixture",
    ),
    "a null role": ("chat", {"messages": [{"role": None}]}, r"\.role': it is null; give one of"),
    "a list that speaks": (
        "sharegpt",
        {"conversations": [{"from": ["gpt"], "value": "a"}]},
        r"\.from': it is \[\"gpt\"\]; give one of",
    ),
    "a list as Python writes it": (
        "chat",
        {"messages": "[{'role': 'user'}]"},
        r"key 'messages': .* is not JSON .*; write it as json.dumps does",
    ),
    "several outputs": (
        "alpaca",
        {"instruction": "a", "output": ["b"]},
        r"key 'output': it is \[\"b\"\]; give a text",
    ),
    "a history of threes": (
        "alpaca",
        {"instruction": "a", "output": "b", "history": [["a", "b", "c"]]},
        r"history\[0\]': .* a question and",
    ),
    "another speaker": (
        "sharegpt",
        {"conversations": [{"from": "bing", "value": "a"}]},
        r"conversations\[0\].from': it is \"bing\"; give",
    ),
    "no value": (
        "sharegpt",
        {"conversations": [{"from": "human"}]},
        r"\.value': it is missing; give a text",
    ),
    "a call that is no JSON": (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "x"}]},
        r"\.value': \"x\" is not JSON",
    ),
    "a call without a name": (
        "sharegpt",
        {"conversations": [{"from": "function_call", "value": "{}"}]},
        r"\.value': .* is no call; give",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_is_wrong_is_told_with_place_key_and_reason(name: str) -> None:
    format, row, words = WRONG[name]
    with pytest.raises(UserError, match=f"^data.corpus: .*{words}"):
        conversation_of(row, format, "f line 3")  # type: ignore[arg-type]


def test_text_is_no_conversation() -> None:
    with pytest.raises(
        ValueError,
        match="'text' are no conversations; those of chat, prompt, alpaca, sharegpt, preference, judged are",
    ):
        conversation_of({"text": "a"}, "text")
