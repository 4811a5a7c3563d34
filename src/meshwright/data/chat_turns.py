"""Where the assistant's turns begin and end in a rendered chat, for templates that do not mark them.

A template is a program, so it is asked: chats that differ in one place are rendered, and the texts compared.
Every place is one of the whole chat's text, since a template may render earlier turns differently once later
ones are there, as those do that leave out the thinking before the last question.

- A turn's words end where a mark that is put behind them stands; what the template puts next, if the chat
  ends there, ends the turn, and is trained on: the model must learn to stop.
- A turn's words begin where all turns of other words begin to differ, and where the prompt for a generation
  leaves off if that is earlier. A block of reasoning that such a prompt opens is of the assistant's words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from meshwright.data.chat_template import ChatTemplate, Span
from meshwright.spec.errors import UserError

Message = Mapping[str, Any]

MARK = "Q7zMarkJ4x"
"""A word that no chat has; letters and digits pass through any filter of a template."""
_WORDS = ("0kQ", "Zq9")
"""Answers that differ in their first characters."""
_REASONING = re.compile(r"<[^<>\s]*think[^<>\s]*>|\[THINK\]|◁think▷")
"""Texts that open a block of reasoning."""


def assistant_spans(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    variables: Mapping[str, Any],
    special: Sequence[str] = (),
    stops: Sequence[str] = (),
) -> tuple[str, list[Span]]:
    """Return the text of a chat, and the spans that the assistant writes.

    `special` are the tokenizer's added tokens, which are not divided, and `stops` the tokens that end a
    generation. Raises `UserError` with the template and the turn where a span cannot be told with certainty.
    """
    turns = _Turns(template, messages, tools, variables, special, stops)
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            span = turns.start(number), turns.end(number)
            if span[0] > span[1] or (spans and span[0] < spans[-1][1]):
                raise turns.unsure(number, "it begins before the text that is in front of it ends")
            spans.append(span)
    return turns.text, spans


def turn_ending(template: ChatTemplate) -> str:
    """Return what a template puts behind the words of an answer at the end of a chat.

    It is empty where the template puts nothing there, or does not render such a chat.
    """
    chat = [{"role": "user", "content": _WORDS[0]}, {"role": "assistant", "content": MARK}]
    try:
        return template.render(chat).rpartition(MARK)[2]
    except UserError:
        return ""


class _Turns:
    """A chat with its text, and what its template makes of other chats."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        special: Sequence[str],
        stops: Sequence[str],
    ) -> None:
        self.template, self.messages = template, list(messages)
        self.special, self.stops = special, stops
        self._tools, self._variables = tools, variables
        self.text = self.render(messages)
        self.after = cache(self._after)

    def render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return self.template.render(messages, self._tools, prompt, **self._variables)

    def behind_mark(
        self, messages: Sequence[Message], prompt: bool = False, marked: bool = True
    ) -> str | None:
        """Return what is rendered behind the mark, or all of it if no message is marked; None where the
        template refuses the chat or drops the mark."""
        try:
            text = self.render(messages, prompt)
        except UserError:
            return None
        if not marked:
            return text
        _, mark, rest = text.partition(MARK)
        return rest.replace(MARK, "") if mark else None

    def unsure(self, number: int, why: str) -> UserError:
        return UserError(
            f"{self.template.name} has no generation markers, and where the assistant's words begin and end "
            f"cannot be told from what it renders: message {number + 1} of {len(self.messages)}, "
            f"{self.messages[number]['role']}: {why}; put {{% generation %}} and {{% endgeneration %}} "
            "around these words in the template"
        )

    def _after(self, number: int) -> tuple[int, Message]:
        """Return where the words of a message end in the text, and the message with a mark there."""
        why = "its content is neither a text nor a list of parts"
        for marked in _marked(self.messages[number]):
            why = "the template does not render it"
            text = self.render([*self.messages[:number], marked, *self.messages[number + 1 :]])
            before, mark, rest = text.partition(MARK)
            if not mark:
                continue
            rest = rest.replace(MARK, "")  # a tool's answer may repeat the name of its call
            end = len(self.text) - len(rest)
            if self.text.endswith(rest) and self.text[:end].rstrip() == before.rstrip():
                return end, marked
            why = "a word more in it changes other parts of the text"
        raise self.unsure(number, why)

    def start(self, number: int) -> int:
        """Return where the words of an assistant's turn begin."""
        place, ahead = 0, list[Message]()
        if number:
            place, marked = self.after(number - 1)
            ahead = [*self.messages[: number - 1], marked]
        header = self._header(number, ahead, self.text[place:])
        if found := _REASONING.search(header):
            header = header[: found.start()]
        return place + len(header)

    def _header(self, number: int, ahead: list[Message], text: str) -> str:
        """Return what `text` has in front of the words of a turn, whose chat is `ahead` before it."""
        marked = bool(ahead)
        chats = _other_turns(self.messages[number], ahead)
        rendered = (self.behind_mark(chat, marked=marked) for chat in chats)
        others = [text, *(each for each in rendered if each is not None)]
        if len(others) == 1:
            raise self.unsure(number, "the template refuses a turn of other words there")
        header = self._common(others)
        prompt, without = (self.behind_mark(ahead, asked, marked) for asked in (True, False))
        if prompt is None or (prompt == without and self._cue and header.endswith(self._cue)):
            return header
        own = self._common([header, prompt])
        if without not in (None, prompt) and len(own) <= len(self._common([prompt, without or ""])) < len(
            header
        ):
            raise self.unsure(
                number,
                f"the turn begins with {header[len(own) :]!r}, and prompts with {prompt[len(own) :]!r}",
            )
        return own

    def end(self, number: int) -> int:
        """Return where an assistant's turn ends, with what the template puts there.

        Spaces behind that are left out: a tokenizer joins them with the next turn's first word. Where it is
        no token that ends a generation, and the next turn begins with one, this ends the turn, as in GLM-4.5.
        """
        place, marked = self.after(number)
        rest = self.text[place:]
        if number == len(self.messages) - 1:
            return place + len(rest.rstrip(" ") or rest)
        endings = []
        for ending in self._endings([*self.messages[:number], marked]):
            endings.append(ending)
            if ending and rest.startswith(ending):
                return place + max(len(ending.rstrip(" ") or ending), self._stopped(ending, rest))
        for ending in endings:  # a line end that only the last turn, or no other, has
            if ending.strip() and rest.startswith(ending.rstrip()):
                return place + len(self._common([ending, rest]))
        if not any(endings):
            return place + self._stopped("", rest)
        raise self.unsure(number, f"it ends with {endings!r} alone, and here {rest[:40]!r} follows")

    def _stopped(self, ending: str, rest: str) -> int:
        """Return how long an ending is with the token behind it, if that and not it ends a generation."""
        if any(stop in ending for stop in self.stops):
            return 0
        return max((len(ending + stop) for stop in self.stops if rest.startswith(ending + stop)), default=0)

    def _endings(self, chat: list[Message]) -> Iterator[str]:
        """Yield what may end the turn at the end of a chat, which has the mark."""
        if (alone := self.behind_mark(chat)) is not None:
            yield alone
        prompted = self.behind_mark(chat, True)
        if prompted is not None and (cue := self._cue) and prompted.endswith(cue):
            yield prompted[: -len(cue)]

    @cached_property
    def _cue(self) -> str:
        """The text that a prompt for generation adds behind a question; empty where it adds nothing."""
        first = next((n for n, message in enumerate(self.messages) if message["role"] == "user"), None)
        if first is None:
            return ""
        asked = [*self.messages[:first], self.after(first)[1]]
        prompt, without = (self.behind_mark(asked, each) for each in (True, False))
        return "" if prompt is None or without is None else prompt[len(self._common([prompt, without])) :]

    def _common(self, texts: Sequence[str]) -> str:
        """Return the longest text that all begin with, which divides no special token of any."""
        first, last = min(texts), max(texts)  # between which the others lie
        pairs = enumerate(zip(first, last, strict=False))
        length = next((place for place, (one, other) in pairs if one != other), min(len(first), len(last)))
        for token in self.special:
            for place in range(max(0, length - len(token) + 1), length):
                if any(text.startswith(token, place) for text in texts):
                    length = place
        return texts[0][:length]


def _marked(message: Message) -> Iterator[Message]:
    """Yield a message with the mark behind what a template renders last of it: its calls, or its content."""
    calls = list(message.get("tool_calls") or ())
    for place in reversed(range(len(calls))):  # some templates render the first call alone
        function = calls[place].get("function", calls[place])
        named = {**function, "name": f"{function.get('name', '')}{MARK}"}
        call = {**calls[place], "function": named} if "function" in calls[place] else named
        yield {**message, "tool_calls": [*calls[:place], call, *calls[place + 1 :]]}
    content = message.get("content") or ""
    if isinstance(content, str):
        yield {**message, "content": content + MARK}
    elif isinstance(content, list):
        texts = [n for n, part in enumerate(content) if isinstance(part, dict) and "text" in part]
        last = texts[-1] if texts else len(content)
        part = content[last] if texts else {"type": "text", "text": ""}
        yield {
            **message,
            "content": [*content[:last], {**part, "text": part["text"] + MARK}, *content[last + 1 :]],
        }


def _other_turns(message: Message, ahead: list[Message]) -> Iterator[list[Message]]:
    """Yield chats that go on `ahead` with another turn of the assistant in place of `message`."""
    in_parts = any(isinstance(each.get("content"), list) for each in [message, *ahead])

    def said(role: str, text: str) -> Message:
        return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}

    for words in _WORDS:
        yield [*ahead, said("assistant", words)]
    yield [*ahead, said("assistant", _WORDS[0]), said("user", _WORDS[1])]
