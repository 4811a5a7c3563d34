"""Answers to chats by a trained model: those of a file, or a conversation of one turn after the other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.api.generation import (
    Generation,
    OnText,
    Prompts,
    check_generation,
    continue_prompts,
    model_ranks,
    open_decoder,
    run_tokenizer,
)
from meshwright.api.models import existing
from meshwright.api.prompt_files import Row, read_rows
from meshwright.api.prompt_remarks import warn_of_prompts
from meshwright.data.chat_formats import Conversation, Message, conversation_of
from meshwright.data.chat_template import ChatTemplate
from meshwright.data.chat_turns import turn_ending
from meshwright.spec import UserError
from meshwright.spec.load import Overrides

if TYPE_CHECKING:
    from meshwright.data.tokenizer import Tokenizer
    from meshwright.model.decoder import Decoder

WANTED = '{"messages": [{"role": "user", "content": "Hello"}]}'
"""A row of a file of chats, as messages show it."""


def read_chats(file: Path) -> list[tuple[Row, Conversation]]:
    """Return the rows of a JSONL file with the chat of each. Raises `UserError`."""
    return [(row, chat_of(row, place)) for place, row in read_rows(file, WANTED)]


def chat_of(row: Row, place: str) -> Conversation:
    """Return the chat of a row with "messages" or ShareGPT's "conversations", or with a "prompt", which is a
    question or messages. Raises `UserError`."""
    if "conversations" in row and "messages" not in row:
        return conversation_of(row, "sharegpt", place)
    if "messages" not in row and isinstance(prompt := row.get("prompt"), str | list):
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return conversation_of({**row, "messages": asked}, "chat", place)
    if "messages" not in row:
        keys = ", ".join(row) or "none"
        raise UserError(
            f"--prompts: the keys of {place} are {keys}, which hold no chat; write objects such as {WANTED}"
        )
    return conversation_of(row, "chat", place)


def answer_chats(
    run: Path,
    chats: Sequence[tuple[Row, Conversation]],
    how: Generation,
    layout: Overrides = (),
    on_text: OnText | None = None,
    system: str | None = None,
) -> list[Row]:
    """Return the rows, each with the answer to the last question of its chat.

    Their keys are those of `continue_prompts`; `system` is the system message of chats that have none. What
    follows the last question of a chat is left out. Raises `UserError`.
    """
    template = _Template(run, how)
    prompts = [{"prompt": template.prompt(chat, system)} for _, chat in chats]
    found = continue_prompts(run, prompts, template.how, layout, on_text, also_stop=template.also_stop)
    return [
        {**row, **{key: value for key, value in answer.items() if key != "prompt"}}
        for (row, _), answer in zip(chats, found, strict=False)  # none on other ranks of a torchrun
    ]


@contextmanager
def open_chat(run: Path, how: Generation, system: str | None = None) -> Iterator[Chat]:
    """Open a conversation with a model on this device. Raises `UserError`."""
    check_generation(how)
    model_ranks(run, (), how["weights"], how["step"])
    template = _Template(run, how)
    template.prompt(Conversation(({"role": "user", "content": "?"},)), system)  # before the weights are read
    with open_decoder(run, how, ()) as (decoder, _):
        yield Chat(template, decoder, system)


class Chat:
    """A conversation with a model; `messages` are all that was said."""

    def __init__(self, template: _Template, decoder: Decoder, system: str | None) -> None:
        self._template, self._decoder, self._system = template, decoder, system
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, question: str, on_text: OnText | None = None) -> str:
        """Return the model's answer to what the user says; `on_text` is told pieces of it as it comes.

        Raises `UserError`, where the conversation stays as it was.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        rows = [{"prompt": self._template.prompt(Conversation(tuple(asked)), None)}]
        prompts = Prompts(
            self._template.tokenizer, rows, self._template.how, also_stop=self._template.also_stop
        )
        if len(self.messages) <= (self._system is not None):
            warn_of_prompts(self._template.run, self._template.tokenizer, rows, prompts.ids, "rendered")
        (row,) = prompts.continued(self._decoder, None, on_text)
        text: str = row["text"]
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return text


class _Template:
    """The chat template of a model's folder, with its tokenizer and how chats are answered."""

    def __init__(self, run: Path, how: Generation) -> None:
        self.run = existing(run, "the folder of a run or of an HF model")
        if how["special_tokens"] == "text":
            raise UserError(
                "--special-tokens: with 'text' the tokens that the chat template writes would be read as "
                "characters; remove it, or --chat"
            )
        self.how: Generation = {**how, "special_tokens": "rendered"}
        self.tokenizer: Tokenizer = run_tokenizer(run, reads_special=True)
        self._template = ChatTemplate.open(run, "--chat")
        self.also_stop = self._own_end()

    def prompt(self, chat: Conversation, system: str | None) -> str:
        """Return the text of a chat up to its last question, and what an answer begins with."""
        messages = list(chat.messages)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            raise UserError(f"--prompts: {chat.place} asks nothing; give a message of the role 'user'")
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        chosen = self._template.of(chat.tools)
        return chosen.render(messages, chat.tools, add_generation_prompt=True, **chat.variables)

    def _own_end(self) -> tuple[int, ...]:
        """Return the token that ends a turn by the template, unless the folder's configs name it."""
        first = self.tokenizer.encode(turn_ending(self._template).lstrip())[:1]
        if not first or first[0] not in self.tokenizer.added_tokens:
            return ()
        if first[0] in (stops := self.tokenizer.tokens.stop_ids):
            return ()
        named, own = self.tokenizer.decode(stops), self.tokenizer.decode(first)
        warnings.warn(
            f"generate: {self.run} ends generations at {named or stops} by its configs, and turns at {own} "
            "by its chat template; answers end at both, where transformers goes on behind the latter",
            stacklevel=3,
        )
        return (first[0],)
