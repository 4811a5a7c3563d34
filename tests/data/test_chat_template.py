"""Chat templates beside transformers, which renders the same text of them, and refuses the same."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_cases import CHATS, NAMED, TEMPLATES, TOOLS, chats_of, template_of, turns

from meshwright.data.chat_template import ChatTemplate
from meshwright.spec import UserError

utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="transformers is not installed")
NOW = datetime(2026, 7, 9, 8, 5)
WAYS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"enable_thinking": False},
    {"bos_token": "<other>", "preserve_thinking": True},
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give transformers a clock that stands still."""

    class Clock:
        @staticmethod
        def now() -> datetime:
            return NOW

    monkeypatch.setattr(utils, "datetime", Clock)


def theirs(source: str, messages: Any, tools: Any, marked: bool = False, **variables: Any) -> Any:
    """The text and spans that transformers renders, or the error that it raises."""
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        text, spans = utils.render_jinja_template(
            [chat], tools, chat_template=source, return_assistant_tokens_mask=marked, **{**NAMED, **variables}
        )
    except Exception as error:
        return error
    return text[0], spans[0] if marked else []


def ours(template: ChatTemplate, messages: Any, tools: Any, marked: bool = False, **variables: Any) -> Any:
    """The text and spans that we render, or the error."""
    try:
        if marked:
            return template.render_with_spans(messages, tools, **variables)
        return template.render(messages, tools, **variables), []
    except UserError as error:
        return error


@pytest.mark.skipif(not TEMPLATES, reason="trl is not installed")
def test_there_are_templates() -> None:
    assert len(TEMPLATES) >= 60


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.usefixtures("clock")
def test_texts_are_those_of_transformers(name: str) -> None:
    template, rendered = template_of(name).at(NOW), 0
    for chat, tools in chats_of(name).values():
        for way in WAYS:
            for marked in (False, True):
                wanted = theirs(TEMPLATES[name], chat, tools, marked, **way)
                found = ours(template, chat, tools, marked, **way)
                if isinstance(wanted, Exception):
                    assert isinstance(found, UserError)
                    assert str(found).startswith(f"{name} does not render this chat (")
                    assert str(wanted) in str(found)
                else:
                    assert found == wanted
                    rendered += 1
    assert rendered >= 20


@pytest.mark.parametrize("name", TEMPLATES)
def test_markers_are_found_where_there_are_any(name: str) -> None:
    native = name.startswith("lfm2_2_5")
    assert template_of(name).has_markers == (name.endswith("_training") or native)


def test_markers_in_a_comment_are_none() -> None:
    assert not ChatTemplate("{# {% generation %}x{% endgeneration %} #}{{ 1 }}").has_markers


def test_a_marked_part_of_a_macro_is_where_transformers_has_it() -> None:
    source = (
        "{% macro said(m) %}{% generation %}{{ m.content }}!{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}: {{ said(m) }}\n{% endfor %}"
    )
    chat = CHATS["several turns"]
    assert ours(ChatTemplate(source), chat, None, True) == theirs(source, chat, None, True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ tools | tojson(sort_keys=true) }}",
        "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "  {% if true %}\n  a\n  {% endif %}\n b\n",
        "{{ namespace(a=1).a }}{{ dict(a=1).a }}",
        "a\n",
        "a\r\nb\r\n\r\n",
        "{{ documents }}{{ missing }}{{ messages[0].missing }}",
        "{{ strftime_now('%d %b %Y %H:%M') }}",
        "{{ messages[1].reasoning_content }}{{ messages[1].thinking }}",
        "{{ bos_token }}{{ eos_token }}{{ sep_token }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    ],
)
@pytest.mark.usefixtures("clock")
def test_settings_and_functions_are_those_of_transformers(source: str) -> None:
    chat = turns("é < 1", "b", thinking="so")
    template = ChatTemplate(source, variables=NAMED, now=NOW)
    assert ours(template, chat, TOOLS) == theirs(source, chat, TOOLS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ dict.__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns['__a'] = 1 %}{{ ns.a }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ range(10000000) | list | length }}",
        "{{ self.__init__ }}x{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_hostile_template_is_refused(source: str) -> None:
    chat = turns("a", "b")
    before = json.dumps(chat)
    with pytest.raises(UserError, match="hostile"):
        print(ChatTemplate(source, "hostile").render(chat))
    assert json.dumps(chat) == before


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"])
def test_pythons_own_attributes_render_nothing(source: str) -> None:
    assert ChatTemplate(source).render(turns("a")) == ""


def test_what_is_no_template_is_told_with_its_line() -> None:
    with pytest.raises(
        UserError, match=r"^x cannot be read as a Jinja2 template \(.*endfor.* at line 2\); mend it"
    ):
        ChatTemplate("a\n{% for m in messages %}", "x")


def test_the_reason_of_a_template_is_told() -> None:
    template = ChatTemplate("{{ raise_exception('Roles must alternate') }}", "x")
    with pytest.raises(UserError, match=r"^x does not render this chat \(Roles must alternate\)$"):
        template.render(turns("a"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from chat_cases import backend_of

    backend_of("").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED))
    return tmp_path


MANY = [{"name": "default", "template": "{{ bos_token }}d"}, {"name": "tool_use", "template": "t"}]
FILES: dict[str, tuple[Any, dict[str, str]]] = {
    "in the config": ("{{ bos_token }}c", {}),
    "several in the config": (MANY, {}),
    "a file": (None, {"chat_template.jinja": "{{ bos_token }}f☃\r\n"}),
    "a file before the config": ("c", {"chat_template.jinja": "f"}),
    "files": (
        "c",
        {"chat_template.jinja": "f", "additional_chat_templates/tool_use.jinja": "{{ tools[0].type }}"},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_folders_template_is_the_one_that_transformers_takes(name: str, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config, files = FILES[name]
    named = NAMED | ({} if config is None else {"chat_template": config})
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "additional_chat_templates").mkdir()
    for file, text in files.items():
        (folder / file).write_bytes(text.encode())
    opened = PreTrainedTokenizerFast.from_pretrained(folder)
    template = ChatTemplate.open(folder, "data.tokenizer")
    for tools in (None, TOOLS):
        wanted = opened.apply_chat_template(turns("a"), tools=tools, tokenize=False)
        assert template.of(tools).render(turns("a"), tools) == wanted


def test_a_template_by_name(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED | {"chat_template": MANY}))
    assert ChatTemplate.open(folder, "k", "tool_use").render(turns("a")) == "t"
    with pytest.raises(
        UserError, match=r"^k: .* has no chat template called 'rag'; it has default, tool_use$"
    ):
        ChatTemplate.open(folder, "k", "rag")


def test_the_template_of_a_processor_is_read_where_there_is_no_other(folder: Path) -> None:
    (folder / "chat_template.json").write_text('{"chat_template": "p"}')
    assert ChatTemplate.open(folder, "k").render(turns("a")) == "p"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "has no chat template; give a folder"),
        (3, "chat_template in"),
        ([{"name": "default"}], "chat_template in"),
    ],
)
def test_a_folder_without_a_template_is_told(config: Any, words: str, folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMED | {"chat_template": config}))
    with pytest.raises(UserError, match=f"^k: .*{words}"):
        ChatTemplate.open(folder, "k")


def test_a_template_that_is_a_link_out_of_its_folder_is_refused(folder: Path, tmp_path_factory: Any) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("secret")
    (folder / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(UserError, match="is a link to a file outside of its folder"):
        ChatTemplate.open(folder, "k")
