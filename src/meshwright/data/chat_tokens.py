"""Conversations as token ids, each with whether it is trained on: what the assistant writes, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_formats import Conversation, Message
from meshwright.data.chat_remarks import remarks_of
from meshwright.data.chat_template import ChatTemplate, Span
from meshwright.data.chat_turns import assistant_spans
from meshwright.data.tokenizer import IDs, Tokenizer
from meshwright.spec.errors import UserError


class ChatTokens(NamedTuple):
    """The tokens of a conversation: `ids` (n,), and `trained` (n,), True for those that are learned."""

    ids: IDs
    trained: NDArray[np.bool_]

    @property
    def trained_tokens(self) -> int:
        """How many tokens are trained on."""
        return int(self.trained.sum())


class ChatEncoder:
    """Encodes conversations as transformers and TRL do.

    The ids of messages are those of transformers' `apply_chat_template(tokenize=True)`. The assistant's
    tokens are those in the template's generation blocks, or if it has none those of `assistant_spans`. Of a
    prompt and its completion all that follows their common beginning is trained on, as TRL's SFTTrainer has
    it.

    `changed_prompts` counts those whose prompt alone has other tokens than before its completion, and
    `unended` the chats whose last trained word is followed by no added token: a model does not learn of these
    where to stop. `remarks` counts what else chats fail to teach (`chat_remarks`).
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        if not (tokenizer.reads_special or tokenizer.never_reads_special):
            raise ValueError("chats need a tokenizer that reads special tokens; open it with reads_special")
        if template is not None and template.now is None:
            template = template.at(datetime.now())  # all chats of a corpus tell one date
        self._tokenizer, self._template = tokenizer, template
        self.changed_prompts = self.unended = 0
        self.remarks: Counter[str] = Counter()
        self._added = tokenizer.added_tokens
        self._stops = [tokenizer.decode([token]) for token in tokenizer.tokens.stop_ids]

    def encode(self, conversation: Conversation) -> ChatTokens:
        """Return the tokens of a conversation. Raises `UserError` with its place."""
        try:
            if conversation.is_text:
                return self._text(conversation)
            template = self._chosen(conversation)
            if conversation.prompt is not None:
                return self._completed(template, conversation)
            return self._messages(template, conversation)
        except UserError as error:
            raise UserError(f"{error} ({conversation.place})") from error

    def encode_pair(self, conversation: Conversation) -> tuple[ChatTokens, ChatTokens]:
        """Return the tokens of the chosen and the rejected answer, each behind the prompt, as TRL has them.

        Both are trained on from where one of them differs from the prompt alone. Raises `UserError`.
        """
        answers = [replace(conversation, rejected=None)]
        answers.append(
            replace(answers[0], completion=conversation.rejected, messages=_rejected(conversation))
        )
        changed_before = self.changed_prompts
        chosen, rejected = (self.encode(each) for each in answers)
        self.changed_prompts = min(self.changed_prompts, changed_before + 1)  # it is one prompt
        if chosen.trained.any() and rejected.trained.any():
            first = min(int(each.trained.argmax()) for each in (chosen, rejected))
            chosen.trained[first:], rejected.trained[first:] = True, True
        return chosen, rejected

    def _chosen(self, conversation: Conversation) -> ChatTemplate:
        if self._template is None:
            raise UserError(
                "data.tokenizer: its folder has no chat template, and messages need one; put a "
                "chat_template.jinja there, or give prompts and completions that are texts"
            )
        return self._template.of(conversation.tools)

    def _messages(self, template: ChatTemplate, conversation: Conversation) -> ChatTokens:
        messages, tools, variables = conversation.messages, conversation.tools, conversation.variables
        if template.has_markers:
            text, spans = template.render_with_spans(messages, tools, **variables)
        else:
            text, spans = assistant_spans(
                template, messages, tools, variables, list(self._added.values()), self._stops
            )
        self.remarks.update(remarks_of(template, conversation, text, spans, self._added.values()))
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        trained = tokens_in(spans, offsets)
        if not trained.any() and any(message["role"] == "assistant" for message in messages):
            raise UserError(
                f"{template.name} puts none of the assistant's words between its generation markers; put "
                "{% generation %} and {% endgeneration %} around them"
            )
        self.unended += int(trained.any() and not self._ends(ids[trained]))
        return ChatTokens(ids, trained)

    def _ends(self, trained: IDs) -> bool:
        """Return True if the last of these tokens that is not white space is an added one."""
        blank = takewhile(lambda token: not self._tokenizer.decode([int(token)]).strip(), trained[::-1])
        last = trained[: len(trained) - sum(1 for _ in blank)][-1:]
        return bool(len(last)) and int(last[0]) in self._added

    def _completed(self, template: ChatTemplate, conversation: Conversation) -> ChatTokens:
        tools, variables = conversation.tools, conversation.variables
        asked = template.render(conversation.prompt or (), tools, True, **variables)  # type: ignore[arg-type]
        whole = template.render(conversation.messages, tools, **variables)
        return self._split(self._tokenizer.encode(asked), self._tokenizer.encode(whole))

    def _text(self, conversation: Conversation) -> ChatTokens:
        """Return prompt, completion and the token that ends a text, with what the tokenizer puts around."""
        prompt, completion = str(conversation.prompt), str(conversation.completion)
        end = self._tokenizer.decode([self._tokenizer.end_id])
        whole = prompt + completion + ("" if completion.endswith(end) else end)
        encode, around = self._tokenizer.encode, self._tokenizer.around
        return self._split(around(encode(prompt)), around(encode(whole)))

    def _split(self, prompt: Sequence[int], whole: Sequence[int]) -> ChatTokens:
        """Return the tokens `whole`, trained on from where they differ from those of the prompt alone."""
        pairs = zip(prompt, whole, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.changed_prompts += int(common < len(prompt))
        trained = np.arange(len(whole)) >= common
        return ChatTokens(np.asarray(whole, dtype=np.uint32), trained)


def _rejected(conversation: Conversation) -> tuple[Message, ...]:
    """The messages of the prompt and the rejected answer; none of texts."""
    prompt, rejected = conversation.prompt, conversation.rejected
    return (*prompt, *rejected) if isinstance(prompt, tuple) and isinstance(rejected, tuple) else ()


def tokens_in(spans: Sequence[Span], offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each token whether a character of it is in a span; `offsets` (n, 2) are the tokens' own.

    A token across the end of a span counts, as in transformers, and so does each of several tokens of one
    character.
    """
    found = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        found |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return found
