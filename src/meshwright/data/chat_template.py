"""Chat templates: the Jinja2 source of a tokenizer's folder that renders messages as one text.

A template is a program from strangers. It runs in the sandbox that transformers runs it in: it sees plain
values alone, changes none of them, and reaches nothing else of the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from meshwright.spec.errors import UserError
from meshwright.spec.hf.chat_template_files import DEFAULT, TOOL_USE, TemplateFile, chat_template_files
from meshwright.spec.hf.text_tokens import open_published

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
"""First character, and the one after the last."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys that a message's reasoning is known by; templates read the first, those of GPT-OSS the second."""


class _Marked(NamedTuple):
    """The pieces that a rendering has written so far, and the spans of its generation blocks."""

    written: list[str]
    spans: list[Span]


_MARKED: ContextVar[_Marked | None] = ContextVar("_MARKED", default=None)
"""The rendering that asks for its generation blocks; None while none does."""


class ChatTemplate:
    """A compiled chat template; it renders what transformers' `apply_chat_template` renders.

    `name` is what messages call it. `variables` are known to the template by name, such as bos_token. `now`
    is the time that `strftime_now` tells, by default that of the clock. `with_tools` renders the chats that
    come with tools. Raises `UserError` for a source that is no template.
    """

    def __init__(
        self,
        source: str,
        name: str = "the chat template",
        variables: Mapping[str, Any] = MappingProxyType({}),
        now: datetime | None = None,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        self.source, self.name, self.variables, self.now = source, name, dict(variables), now
        self._with_tools = with_tools
        environment = _environment()
        environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            place = f" at line {line}" if line else ""
            raise UserError(
                f"{name} cannot be read as a Jinja2 template ({_reason(error)}{place}); mend it"
            ) from error

    @staticmethod
    def open(folder: Path, key: str, name: str | None = None, now: datetime | None = None) -> ChatTemplate:
        """Read the template of a tokenizer's folder, or the one of its templates that has a name.

        Without a name it is the one called 'default', and 'tool_use' renders the chats with tools where it
        is there. Raises `UserError`, which starts with `key`.
        """
        found = chat_template_files(folder, key)
        if not found:
            raise UserError(
                f"{key}: {folder} has no chat template; give a folder with a chat_template.jinja, such as "
                "that of the model's instruct version"
            )
        if (name or DEFAULT) not in found:
            raise UserError(
                f"{key}: {folder} has no chat template called '{name or DEFAULT}'; it has {', '.join(found)}"
            )
        variables = special_tokens(folder, key)

        def compiled(chosen: TemplateFile, with_tools: ChatTemplate | None = None) -> ChatTemplate:
            return ChatTemplate(chosen.source, f"{key}: {chosen.file}", variables, now, with_tools)

        tools = found.get(TOOL_USE) if name is None else None
        return compiled(found[name or DEFAULT], compiled(tools) if tools is not None else None)

    def of(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template that renders chats with these tools, or without any for None."""
        return self if tools is None or self._with_tools is None else self._with_tools

    def at(self, now: datetime) -> ChatTemplate:
        """Return the same template with a time to tell."""
        with_tools = None if self._with_tools is None else self._with_tools.at(now)
        return ChatTemplate(self.source, self.name, self.variables, now, with_tools)

    @cached_property
    def has_markers(self) -> bool:
        """True if `{% generation %}` marks what the assistant writes."""
        calls = self._template.environment.parse(self.source).find_all(nodes.CallBlock)
        return any(
            isinstance(call.call.node, nodes.ExtensionAttribute)
            and call.call.node.identifier == GenerationBlock.identifier
            for call in calls
        )

    @property
    def tells_time(self) -> bool:
        """True if what it renders may depend on the time."""
        return "strftime_now" in self.source

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of messages; with `add_generation_prompt`, and what the assistant's turn begins
        with.

        `variables` come before those of the template. Raises `UserError` with what the template says.
        """
        with self._errors():
            return self._template.render(self._context(messages, tools, add_generation_prompt, variables))

    def render_with_spans(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> tuple[str, list[Span]]:
        """Return the text of messages, and the span of each generation block in it. Raises `UserError`."""
        marked = _Marked([], [])
        token = _MARKED.set(marked)
        try:
            with self._errors():
                context = self._context(messages, tools, add_generation_prompt, variables)
                for piece in self._template.generate(context):
                    marked.written.append(piece)
        finally:
            _MARKED.reset(token)
        return "".join(marked.written), marked.spans

    def _context(
        self, messages: Messages, tools: Sequence[Any] | None, prompt: bool, variables: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "messages": [_message(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **self.variables,
            **variables,
        }

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise as `UserError` whatever the template raises, which may be anything: it is a program."""
        try:
            yield
        except Exception as error:
            raise UserError(f"{self.name} does not render this chat ({_reason(error)})") from error

    def _strftime_now(self, form: str) -> str:
        return (self.now or datetime.now()).strftime(form)


class GenerationBlock(jinja2.ext.Extension):
    """The block `{% generation %}...{% endgeneration %}`, which is around what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_mark` with the body of the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        text: str = caller()
        marked = _MARKED.get()
        if marked is not None:
            start = sum(map(len, marked.written))
            marked.spans.append((start, start + len(text)))
        return text


def special_tokens(folder: Path, key: str) -> dict[str, str]:
    """Return the named tokens of a tokenizer's folder, as its template knows them: bos_token, eos_token...

    Raises `UserError`, which starts with `key`.
    """
    file = folder / "tokenizer.json"
    return open_published(file, key).named_tokens if file.is_file() else {}


class _Dict:
    """`dict` in templates: makes dicts, and has no other attribute of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in templates, without names that begin with an underscore: those are Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # without self, so that a key may be called that
        for name in (names := dict(*args[1:], **kwargs)):
            _refuse_underscore(name)
        Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with the settings and functions that transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise, dict=_Dict(), namespace=_Namespace)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja2's own filter escapes what HTML would.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: without empty keys, its reasoning by each name of it."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in REASONING_KEYS if key in found), None)
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _reason(error: BaseException) -> str:
    said = str(getattr(error, "message", None) or error).strip()
    own = isinstance(error, TemplateError)
    return said if said and own else f"{type(error).__name__}: {said}" if said else type(error).__name__
