"""The chat templates of a tokenizer's folder, found where transformers 5 finds them, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.spec.errors import UserError
from meshwright.spec.files import MAX_JSON, read_text
from meshwright.spec.hf.json_object import read_json_object
from meshwright.spec.hf.special_tokens import check_within
from meshwright.spec.records import show

DEFAULT = "default"
"""Name of the template that renders a chat where nothing names another."""
TOOL_USE = "tool_use"
"""Name of the template that renders chats with tools, where a folder has one."""


class TemplateFile(NamedTuple):
    """The source of a chat template, and the file that it stands in."""

    source: str
    file: Path


def chat_template_files(folder: Path, key: str) -> dict[str, TemplateFile]:
    """Return the templates of a folder by name; a folder without any gives an empty dict.

    Files `chat_template.jinja` and `additional_chat_templates/NAME.jinja` come before the key chat_template
    of `tokenizer_config.json`, which is a text or a list of named ones. A `chat_template.json`, in which
    processors kept theirs, is read where none of these is there. Raises `UserError`, which starts with `key`.
    """
    found = dict(_jinja_files(folder, key))
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not found and (file := folder / name).is_file():
            found = {
                each: TemplateFile(source, file)
                for each, source in _named(read_json_object(file, key).get("chat_template"), file, key)
            }
    return found


def _jinja_files(folder: Path, key: str) -> Iterator[tuple[str, TemplateFile]]:
    own = folder / "chat_template.jinja"
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for name, file in ((DEFAULT, own), *((file.stem, file) for file in others)):
        if file.is_file():
            check_within(file, folder, key)
            try:
                yield name, TemplateFile(read_text(file, MAX_JSON), file)
            except (OSError, ValueError) as error:
                raise UserError(f"{key}: {file} cannot be read ({error}); give a text in UTF-8") from error


def _named(value: Any, file: Path, key: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of each template that the key chat_template of a config holds."""
    if value is None:
        return
    if isinstance(value, str):
        yield DEFAULT, value
        return
    for entry in value if isinstance(value, list) else [value]:
        name, source = map(entry.get, ("name", "template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise UserError(
                f"{key}: chat_template in {file} has {show(entry)}; give the template as a text, or a list "
                'of objects with the texts "name" and "template"'
            )
        yield name, source
