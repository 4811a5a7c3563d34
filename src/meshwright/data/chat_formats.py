"""Rows of a corpus of chats as conversations, in the formats that data sets of instructions come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NoReturn, get_args

from meshwright.data.near_formats import advice, flags, nearest_format
from meshwright.spec.errors import UserError
from meshwright.spec.files import parse_json
from meshwright.spec.records import show

DataFormat = Literal["chat", "prompt", "alpaca", "sharegpt", "preference", "judged", "text"]
Message = dict[str, Any]
Row = Mapping[str, Any]

KEYS: Mapping[DataFormat, tuple[str, ...]] = MappingProxyType({
    "chat": ("messages",),
    "prompt": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
    "judged": ("prompt", "completion", "label"),
    "text": ("text",),
})  # fmt: skip
"""The keys that a row of each format has."""
ROLES = ("system", "developer", "user", "assistant", "tool")
FROM = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "model": "assistant", "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
"""The role of each speaker of ShareGPT."""
EMPTY = "rows without a message"
"""Name of the count of rows that have no message at all."""


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, as chat templates take them, or its prompt and completion.

    For the formats 'prompt', 'judged' and 'preference', `prompt` and `completion` are both texts or both
    messages, and `messages` is empty for texts. `label` says of a judged completion whether it is wanted. In
    a pair of answers `completion` is the chosen one, and `rejected` the other, of the same kind. `tools` is
    None for none, and `variables` are the row's own for the template. `place` is where messages say that the
    row is.
    """

    messages: tuple[Message, ...] = ()
    tools: list[Any] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | tuple[Message, ...] | None = None
    completion: str | tuple[Message, ...] | None = None
    rejected: str | tuple[Message, ...] | None = None
    label: bool | None = None
    place: str = "a row"

    @property
    def is_text(self) -> bool:
        """True for a prompt and its completion that are texts, and need no template."""
        return isinstance(self.prompt, str)


def format_of(keys: Iterable[str]) -> DataFormat:
    """Return the format that a row's keys tell. Raises `UserError` where they tell none, or several."""
    given = list(keys)
    found = [each for each, wanted in KEYS.items() if set(wanted) <= set(given)]
    if "judged" in found:
        found.remove("prompt")
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(
            f"data.format: a row's keys are {', '.join(given)}, which may be {' or '.join(found)}; give one "
            "of them as data.format"
        )
    wanted = "; ".join(f"{' and '.join(needed)} for {name}" for name, needed in KEYS.items())
    near = advice(dict.fromkeys(given), KEYS)
    raise UserError(
        f"data.format: a row's keys are {', '.join(given) or 'none'}, which are those of no format; "
        f"{near or f'it takes {wanted}'}"
    )


def conversation_of(row: Row, format: DataFormat, place: str = "a row") -> Conversation:
    """Return the conversation of a row, which messages call `place`.

    Raises `UserError` for a row that is not in the format, with the key and the reason.
    """
    if format not in _READERS:
        can = ", ".join(name for name in get_args(DataFormat) if name != "text")
        raise ValueError(f"rows of the format {format!r} are no conversations; those of {can} are")
    if not isinstance(row, Mapping):
        raise UserError(f"data.corpus: {place} is {show(row)}, no object; give one with the keys of a chat")
    reader = _Reader(row, place)
    if missing := [key for key in KEYS[format] if key not in row]:
        reader.missing(missing[0], _remedy(row, format))
    return _READERS[format](reader)


def near_format(row: Row) -> str:
    """Return which format a row is almost in, and what to do for it to be; '' where none is near."""
    return advice(row, KEYS)


def _remedy(row: Row, format: DataFormat) -> str:
    """Return the end of the sentence about a row that lacks a key of its format."""
    others = [other for other, keys in KEYS.items() if set(keys) <= row.keys()]
    if others:
        return (
            f", which make it {' or '.join(others)}, and it is read as {format}, as data.format or the first "
            "row says; keep rows of one format in a corpus, and mix corpora by data.mixture"
        )
    near = nearest_format(row, {format: KEYS[format]})
    if near is not None and near.columns and not near.missing:
        return f"; give {flags(near.columns)}"
    return "; add it, or remove the row"


def conversations_of(
    rows: Iterable[tuple[str, Any]], format: DataFormat, skipped: Counter[str]
) -> Iterator[Conversation]:
    """Yield the conversation of each (place, row); those without a message are left out, and counted.

    Raises `UserError` as `conversation_of` does.
    """
    for place, row in rows:
        found = conversation_of(row, format, place)
        if found.messages or found.is_text:
            yield found
        else:
            skipped[EMPTY] += 1


class _Reader:
    """The values of a row by key, checked as they are read."""

    def __init__(self, row: Row, place: str) -> None:
        self.row, self.place = row, place

    def wrong(self, key: str, why: str) -> NoReturn:
        raise UserError(f"data.corpus: {self.place}, key '{key}': {why}")

    def missing(self, key: str, remedy: str) -> NoReturn:
        """Raise the error of a row that lacks a key."""
        self.wrong(
            key, f"it is missing; the row's keys are {', '.join(map(str, self.row)) or 'none'}{remedy}"
        )

    def text(self, key: str, needed: bool = False) -> str:
        """The text of a key; '' where it is not there and not needed."""
        value = self.row.get(key)
        if value is None and not needed:
            return ""
        if not isinstance(value, str):
            self.wrong(key, f"it is {show(value)}; give a text")
        return value

    def listed(self, key: str) -> list[Any]:
        """The list of a key, or of its JSON text, as tables of text have it; null is an empty one."""
        value = self.row[key]
        if isinstance(value, str) and (not value.strip() or value.lstrip().startswith("[")):
            value = self.json(key, value) if value.strip() else None
        if isinstance(value, str) or not isinstance(value, Sequence | None):
            self.wrong(key, f"it is {show(value)}; give a list")
        return list(value or ())

    def messages(self, key: str) -> tuple[Message, ...]:
        """The messages of a key."""
        return tuple(self.message(value, f"{key}[{number}]") for number, value in enumerate(self.listed(key)))

    def message(self, value: Any, key: str) -> Message:
        """Return a message without its null keys; what is not known of it is left to the template."""
        if not isinstance(value, Mapping):
            self.wrong(key, f'it is {show(value)}; give an object with "role" and "content"')
        found = {name: self.plain(part, f"{key}.{name}") for name, part in value.items() if part is not None}
        if found.get("role") not in ROLES:
            self.wrong(f"{key}.role", f"it is {shown_of(value, 'role')}; give one of {', '.join(ROLES)}")
        if not isinstance(found.get("tool_calls", []), list):
            self.wrong(f"{key}.tool_calls", f"it is {show(found['tool_calls'])}; give a list of calls")
        if "content" not in found and not found.get("tool_calls"):
            self.wrong(f"{key}.content", f"it is {shown_of(value, 'content')}; give a text, or tool_calls")
        content = found.get("content", "")
        if found["role"] != "tool" and not isinstance(content, str | list):
            self.wrong(f"{key}.content", f"it is {show(content)}; give a text, or a list of parts")
        return found

    def plain(self, value: Any, key: str) -> Any:
        """Return a value as JSON has it: all that a template is to see."""
        if isinstance(value, Mapping):
            return {str(name): self.plain(part, f"{key}.{name}") for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(part, f"{key}[{number}]") for number, part in enumerate(value)]
        if value is not None and type(value) not in (str, int, float, bool):
            self.wrong(key, f"it is of the type {type(value).__name__}; give texts, numbers, lists, objects")
        if isinstance(value, str) and not value.isascii():
            self._check_text(value, key)
        return value

    def _check_text(self, value: str, key: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            self.wrong(key, f"it is not valid text ({error.reason}); give whole characters of Unicode")

    def tools(self) -> list[Any] | None:
        """The tools of the row: a list, or the JSON text of one; None for none, also for an empty list."""
        value = self.row.get("tools")
        if isinstance(value, str):
            value = self.json("tools", value) if value.strip() else None
        if not value:
            return None
        tools = self.plain(value, "tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            self.wrong("tools", f"it is {show(value)}; give a list of JSON schemas, or its JSON text")
        return tools

    def json(self, key: str, text: str) -> Any:
        """The value of a JSON text."""
        try:
            return parse_json(text)
        except ValueError as error:
            self.wrong(key, f"{show(text)} is not JSON ({error}); write it as json.dumps does")

    def variables(self) -> dict[str, Any]:
        """The row's variables for the template, which TRL reads of the same key."""
        value = self.row.get("chat_template_kwargs")
        if value is not None and not isinstance(value, Mapping):
            self.wrong("chat_template_kwargs", f"it is {show(value)}; give an object")
        return dict(self.plain(value or {}, "chat_template_kwargs"))

    def conversation(self, messages: Iterable[Message], **others: Any) -> Conversation:
        """Return the conversation of messages with what else the row says."""
        common: dict[str, Any] = {"tools": self.tools(), "variables": self.variables(), "place": self.place}
        return Conversation(tuple(messages), **{**common, **others})


def shown_of(row: Row, key: str) -> str:
    """Return the value of a key as messages show it."""
    return show(row[key]) if key in row else "missing"


def _chat(reader: _Reader) -> Conversation:
    return reader.conversation(reader.messages("messages"))


def _prompt(reader: _Reader) -> Conversation:
    values = [reader.row.get(key) for key in KEYS["prompt"]]
    if any(isinstance(value, str) for value in values):
        prompt, completion = (reader.text(key, needed=True) for key in KEYS["prompt"])
        for key in KEYS["prompt"]:
            reader.plain(reader.row[key], key)
        return reader.conversation((), prompt=prompt, completion=completion)
    asked, answered = (reader.messages(key) for key in KEYS["prompt"])
    for key, found in (("prompt", asked), ("completion", answered)):
        if not found:
            reader.wrong(key, "it has no message; give a text, or a list with one or more messages")
    return reader.conversation((*asked, *answered), prompt=asked, completion=answered)


def _judged(reader: _Reader) -> Conversation:
    """A prompt with a completion, and whether that is wanted."""
    label = reader.row.get("label")
    if not isinstance(label, bool):
        reader.wrong("label", f"it is {show(label)}; give true or false, or data.format = 'prompt'")
    return replace(_prompt(reader), label=label)


def _preference(reader: _Reader) -> Conversation:
    """A pair of answers to one prompt, which is the row's, or else what both begin with."""
    keys = ("chosen", "rejected")
    prompt = reader.row.get("prompt")
    if any(isinstance(reader.row.get(key), str) for key in keys):
        chosen, rejected = (str(reader.plain(reader.text(key, needed=True), key)) for key in keys)
        if prompt is not None:
            asked = str(reader.plain(reader.text("prompt", needed=True), "prompt"))
        else:
            length = common_beginning(chosen, rejected)
            asked, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        return reader.conversation((), prompt=asked, completion=chosen, rejected=rejected)
    answers = [reader.messages(key) for key in keys]
    for key, found in zip(keys, answers, strict=True):
        if not found:
            reader.wrong(key, "it has no message; give a text, or a list with one or more messages")
    if prompt is None or isinstance(prompt, str):  # a text beside messages repeats what these begin with
        length = common_beginning(*answers)
        before, answers = answers[0][:length], [each[length:] for each in answers]
    else:
        before = reader.messages("prompt")
    chosen_messages, rejected_messages = answers
    return reader.conversation(
        (*before, *chosen_messages), prompt=before, completion=chosen_messages, rejected=rejected_messages
    )


def common_beginning(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return how many messages, or characters, of both answers are their prompt, as TRL's `extract_prompt`.

    Something is left of each; a space in front of the first difference belongs to the answers.
    """
    shorter = min(len(chosen), len(rejected))
    found = next((n for n in range(shorter) if chosen[n] != rejected[n]), max(shorter - 1, 0))
    return found - (found > 0 and chosen[found - 1] == " ")


def _alpaca(reader: _Reader) -> Conversation:
    """A system message, earlier pairs of question and answer, the instruction over its input, the output."""
    pairs = []
    for number, pair in enumerate(reader.listed("history") if "history" in reader.row else ()):
        texts = [each for each in pair if isinstance(each, str)] if isinstance(pair, list | tuple) else []
        if len(texts) != 2 or len(pair) != 2:
            reader.wrong(f"history[{number}]", f"it is {show(pair)}; give a question and its answer")
        pairs.append((texts[0], texts[1]))
    parts = [reader.text("instruction", needed=True), reader.text("input")]
    pairs.append(("\n".join(filter(None, parts)), reader.text("output", needed=True)))
    turns = [(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    if system := reader.text("system"):
        turns.insert(0, ("system", system))
    messages = [{"role": role, "content": text} for role, text in turns]
    return reader.conversation(reader.plain(messages, "messages"))


def _sharegpt(reader: _Reader) -> Conversation:
    """Turns with `from` and `value`, as LLaMA-Factory documents them; turns with roles are a chat."""
    listed = reader.listed("conversations")
    if listed and isinstance(listed[0], Mapping) and "role" in listed[0]:
        messages = list(reader.messages("conversations"))
    else:
        messages = [_turn(reader, turn, f"conversations[{number}]") for number, turn in enumerate(listed)]
    system = reader.text("system")
    if system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": reader.plain(system, "system")})
    tools = reader.tools()
    return reader.conversation(messages, tools=tools and [_schema(tool) for tool in tools])


def _turn(reader: _Reader, turn: Any, key: str) -> Message:
    if not isinstance(turn, Mapping):
        reader.wrong(key, f'it is {show(turn)}; give an object with "from" and "value"')
    speaker, value = turn.get("from"), turn.get("value")
    if not isinstance(speaker, str) or speaker not in FROM:
        reader.wrong(f"{key}.from", f"it is {shown_of(turn, 'from')}; give one of {', '.join(FROM)}")
    if not isinstance(value, str):
        reader.wrong(f"{key}.value", f"it is {shown_of(turn, 'value')}; give a text")
    reader.plain(value, f"{key}.value")
    if speaker != "function_call":
        return {"role": FROM[speaker], "content": value}
    called = reader.json(f"{key}.value", value)
    calls = called if isinstance(called, list) else [called]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            reader.wrong(f"{key}.value", f'{show(value)} is no call; give JSON with "name" and "arguments"')
    functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
    called_tools = [{"type": "function", "function": function} for function in functions]
    return {"role": FROM[speaker], "content": "", "tool_calls": called_tools}


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as templates take it: ShareGPT's rows have the function alone."""
    return tool if "function" in tool else {"type": "function", "function": tool}


_READERS: Mapping[str, Callable[[_Reader], Conversation]] = MappingProxyType(
    {
        "chat": _chat,
        "prompt": _prompt,
        "alpaca": _alpaca,
        "sharegpt": _sharegpt,
        "preference": _preference,
        "judged": _judged,
    }
)
