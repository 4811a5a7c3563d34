"""Help texts, generated from the table of verbs and the fields of the spec, within 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from meshwright.cli.parser import Flag, Verb
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import Key, known_keys, parts_of

WIDTH = 100


def program(verbs: Iterable[Verb], version: str) -> str:
    """Return the text of `meshwright --help`."""
    return "\n".join(
        [
            f"meshwright {version}: trains and checks large language models on any mesh of devices",
            "",
            "usage: meshwright VERB [RUN.toml | RUN_FOLDER] [--TABLE.KEY VALUE ...] [FLAGS]",
            *_section("verbs", [(verb.name, verb.summary) for verb in verbs]),
            "",
            "  meshwright VERB --help     the flags of a verb, and every key of a run",
            "  meshwright spec schema     the JSON schema of a run file, for editors",
            "  meshwright --version",
            "",
            "Every verb works without a run file, from presets and flags alone:",
            "  meshwright train --model.preset tiny --train.steps 200 --nproc 2 --out runs/first",
            "",
            "exit codes: 0 success; 1 failed, or unequal (verify); 2 a mistake in the command or the file;",
            "70 verify compared nothing: ranks disagree, or one failed or hung;",
            "75 stopped by SIGTERM, SIGHUP or SIGUSR1 and saved: start it again with --resume auto;",
            "76 storage failed; 77 training data changed or is damaged; 78 the numbers went wrong;",
            "79 a crash loop: ranks that were started again fail again without getting further;",
            "128 + n ended by signal n: 130 Ctrl-C (saved or not, as it says), 143 SIGTERM before it saved",
        ]
    )


def verb(entry: Verb) -> str:
    """Return the text of `meshwright VERB --help`."""
    lines = [f"usage: {entry.usage}", ""]
    lines += textwrap.wrap(f"{entry.summary[0].upper()}{entry.summary[1:]}.", WIDTH)
    lines += _section("words", [(argument.name, argument.summary) for argument in entry.arguments])
    flags = [(f"--{flag.name} {flag.value}".strip(), _summary(flag)) for flag in entry.flags]
    lines += _section("flags", flags)
    for flag in entry.flags:
        if flag.values is not None:
            lines += _section(f"values of --{flag.name}", [*flag.values().items()])
    listed = [name for argument in entry.arguments for name in argument.listed]
    return "\n".join([*lines, "", *_keys(listed)] if entry.keys else lines)


def group(name: str, verbs: Sequence[Verb]) -> str:
    """Return the verbs of a group, as in `meshwright spec --help`."""
    rows = [(verb.name, verb.summary) for verb in verbs]
    return "\n".join([f"usage: meshwright {name} VERB ...", *_section("verbs", rows)])


def _summary(flag: Flag) -> str:
    if flag.required:
        return f"{flag.summary} (required)"
    return flag.summary if flag.default is None else f"{flag.summary} (default {flag.default})"


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
        lines = [f"  {name:<22}  {key.text}", indent + default]
    return lines + textwrap.wrap(key.description, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _about(table: str) -> str:
    """Return the first docstring line of a table; if it can be one of several classes, that of each."""
    parts = parts_of(table)
    about = {part: (part.__doc__ or "").strip().splitlines()[0] for part in parts}
    if len(parts) == 1:
        return about[parts[0]]
    return " ".join(f"{next(iter(part.model_fields.values())).default}: {about[part]}" for part in parts)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines of a title and two columns, or none without rows.

    The second column is wrapped, and a long entry of the first gets a line of its own.
    """
    if not rows:
        return []
    left = min(26, max(len(first) for first, _ in rows))
    lines = ["", f"{title}:"]
    for first, second in rows:
        wrapped = textwrap.wrap(second, WIDTH - left - 4)
        if len(first) > left:
            lines.append(f"  {first}")
            first = ""
        lines.append(f"  {first:<{left}}  {wrapped[0]}")
        lines += [" " * (left + 4) + more for more in wrapped[1:]]
    return lines
