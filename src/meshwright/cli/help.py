"""Help texts, generated from the table of verbs and the fields of the spec, within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from meshwright.cli.overview import WIDTH, section
from meshwright.cli.parser import Flag, Verb
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import Key, known_keys, parts_of


def verb(entry: Verb) -> str:
    """Return the text of `meshwright VERB --help`."""
    lines = [f"usage: {entry.usage}", ""]
    lines += textwrap.wrap(f"{entry.summary[0].upper()}{entry.summary[1:]}.", WIDTH)
    lines += section("words", [(argument.name, argument.summary) for argument in entry.arguments])
    flags = [(f"--{flag.name} {flag.value}".strip(), _summary(flag)) for flag in entry.flags]
    lines += section("flags", flags)
    for flag in entry.flags:
        if flag.values is not None:
            lines += section(f"values of --{flag.name}", [*flag.values().items()])
    listed = [name for argument in entry.arguments for name in argument.listed]
    return "\n".join([*lines, "", *_keys(listed)] if entry.keys else lines)


def _summary(flag: Flag) -> str:
    if flag.required:
        return f"{flag.summary} (required)"
    return flag.summary if flag.default in (None, ()) else f"{flag.summary} (default {flag.default})"


def _keys(listed: Sequence[str]) -> list[str]:
    """List dotted keys, by default every one, under their tables: name, type, default, description below."""
    keys = [key for key in known_keys().values() if not listed or key.name in listed]
    lines = textwrap.wrap(
        "keys: tables of the run file; as flags, --layout.dp 2 or --layout.dp=2, they override it. 'none' "
        "unsets a key, or empties a list. For editors, the first line of a file can name the schema that "
        "meshwright spec schema prints: #:schema FILE.",
        WIDTH,
    )
    for table in RunSpec.model_fields:
        if not any(key.name.startswith(f"{table}.") for key in keys):
            continue
        lines += ["", *textwrap.wrap(f"[{table}]  {_about(table)}", WIDTH, subsequent_indent="  ")]
        for key in keys:
            lines += _key(key) if key.name.startswith(f"{table}.") else []
    return lines


def _key(key: Key) -> list[str]:
    table, name = key.name.split(".", 1)
    of_preset = table == "model" and "." not in name
    default = f"= {key.default}" if key.default else ("from the preset" if of_preset else "")
    indent = " " * 26
    lines = [f"  {name:<22}  {key.text:<32}  {default}".rstrip()]
    if len(lines[0]) > WIDTH:
        first, *more = textwrap.wrap(key.text.replace("|", "| "), WIDTH - len(indent))
        lines = [f"  {name:<22}  {first}", *(indent + line for line in more), indent + default]
        lines = [line.replace("| ", "|") for line in lines]
    return lines + textwrap.wrap(key.description, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _about(table: str) -> str:
    """Return the first docstring line of a table; if it can be one of several classes, that of each."""
    parts = parts_of(table)
    about = {part: (part.__doc__ or "").strip().splitlines()[0] for part in parts}
    if len(parts) == 1:
        return about[parts[0]]
    return " ".join(f"{next(iter(part.model_fields.values())).default}: {about[part]}" for part in parts)
