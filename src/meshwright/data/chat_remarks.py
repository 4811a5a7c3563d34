"""Chats that teach a model less than they say: turns that a template does not render, and empty answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshwright.data.chat_formats import Conversation, Message
from meshwright.data.chat_template import ChatTemplate, Span

UNSAID = "the chat template does not render words, tools or calls"
SILENT = "the assistant says nothing in a turn, and that is trained on"
"""Remarks on some chats of a corpus, as the end of a sentence."""


def remarks_of(
    template: ChatTemplate, chat: Conversation, text: str, spans: Sequence[Span], special: Iterable[str]
) -> set[str]:
    """Return which of the remarks above hold of a chat, its text and the assistant's spans in it.

    `special` are the texts of tokens that are no words. Spans that are not one for each turn tell nothing.
    """
    found = {UNSAID} if chat.tools and "tools" not in template.source else set[str]()
    turns = [message for message in chat.messages if message["role"] == "assistant"]
    for turn in turns:
        if not _says(turn):
            found.add(SILENT)
    if len(turns) == len(spans):
        rendered = [text[start:end] for start, end in spans]
        for token in special:
            rendered = [each.replace(token, "") for each in rendered]
        if any(_says(turn) and not each.strip() for turn, each in zip(turns, rendered, strict=True)):
            found.add(UNSAID)
    return found


def _says(turn: Message) -> bool:
    """True if a turn has words, or calls of tools."""
    content = turn.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    words = [str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in parts]
    return bool(turn.get("tool_calls")) or any(each.strip() for each in words)
