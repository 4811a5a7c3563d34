"""Help texts, generated from the table of verbs and the fields of the spec, within 100 columns.

`--help` alone shows the keys of `COMMON`; words after it name the tables, keys and flags to show in full.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from meshwright.cli.overview import HELP, WIDTH, section
from meshwright.cli.parser import Flag, Verb
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import Key, known_keys, parts_of

ALL = "all"
MOST = 140
"""Characters of a summary that `--help` alone shows: two lines of the second column."""

_LAYOUT = ("layout.dp", "layout.zero", "layout.tp", "layout.cp", "layout.pp", "layout.ep")
_RUN = (
    "model.preset", "data.corpus", "data.seq_len", "train.batch_tokens", "train.steps", "train.lr",
    "layout.dp", "layout.tp", "precision.compute", "checkpoint.every",
)  # fmt: skip
_STEP = ("model.preset", "data.seq_len", "train.batch_tokens", *_LAYOUT)
COMMON = {
    "verify": (*_STEP, "precision.compute"),
    "plan": (*_LAYOUT, "layout.micro_batch", "layout.schedule", "recompute.policy", "train.optimiser"),
    "fit": ("lora.rank", "lora.targets", "train.optimiser", *_LAYOUT, "recompute.policy"),
    "explain": (*_STEP, "recompute.policy"),
    "dryrun": (*_STEP, "recompute.policy"),
    "simulate": (
        "model.preset", "data.seq_len", "train.batch_tokens", "layout.pp", "layout.schedule",
        "layout.virtual", "layout.stages", "layout.micro_batch", "layout.tp", "recompute.policy",
    ),
    "tokenize": (
        "data.corpus", "data.tokenizer", "data.text_key", "data.special_tokens", "data.val_fraction",
        "data.cache", "model.preset", "model.hf", "model.vocab_size", "model.weights",
    ),
    "chaos": (*_RUN[:-2], "checkpoint.every", "recovery.max_restarts"),
    "distil": (
        "distil.teacher", "distil.top_k", "distil.temperature", "model.preset", "model.vocab_size",
        "data.corpus", "data.tokenizer", "data.seq_len", "train.batch_tokens", "train.steps",
    ),
}  # fmt: skip
"""The ten keys of a run that each verb is given most often; verbs that are not here have those of `train`."""


def wanted(words: Sequence[str]) -> list[str]:
    """Return the names that a command line asks for help on, without any for help on the verb.

    They follow `--help` up to the next flag, or one stands in `--help=NAME`; files and folders are the run's.
    """
    names: list[str] = []
    asked = False
    for word in words:
        if word.startswith("--help="):
            names.append(word.removeprefix("--help="))
        elif word.startswith("-"):
            asked = word in HELP
        elif asked and _is_name(word):
            names.append(word)
    return names


def _is_name(word: str) -> bool:
    """Return False for a run file or folder, unless a table of the run has the same name."""
    return word in RunSpec.model_fields or not (word.endswith(".toml") or Path(word).exists())


def verb(entry: Verb, names: Sequence[str] = ()) -> str:
    """Return the text of `meshwright VERB --help`, short, or with all that `names` name in full.

    Raises `UserError` for a name of nothing.
    """
    if names and ALL not in names:
        return "\n".join(_named(entry, names)).strip("\n")
    full = bool(names) or not entry.keys
    lines = [f"usage: {entry.usage}", ""]
    lines += textwrap.wrap(f"{entry.summary[0].upper()}{entry.summary[1:]}.", WIDTH)
    lines += section("words", [(argument.name, argument.summary) for argument in entry.arguments])
    lines += section("flags", [_flag(entry, flag, full) for flag in entry.flags])
    if full:
        for flag in entry.flags:
            lines += _values(flag)
    if not entry.keys:
        return "\n".join(lines)
    return "\n".join([*lines, "", *_about_keys(), *_keys(_listed(entry))] if full else lines + _common(entry))


def _flag(entry: Verb, flag: Flag, full: bool) -> tuple[str, str]:
    """Return a flag and its summary, cut to `MOST` characters unless it is shown in full."""
    summary = flag.summary
    if flag.values is not None and not full:
        summary += f" ({len(flag.values())} values: meshwright {entry.name} --help {flag.name})"
    elif not full:
        summary = _cut(summary)
    if flag.required:
        summary += " (required)"
    elif flag.default not in (None, ()):
        summary += f" (default {flag.default})"
    return f"--{flag.name} {flag.value}".strip(), summary


def _cut(text: str) -> str:
    """Return a text of at most `MOST` characters, which ends between two parts of its sentence."""
    if len(text) <= MOST:
        return text
    ends = [text.rfind(mark, 0, MOST) for mark in ("; ", ": ", ", ", " (")]
    return f"{text[: ends[0] if ends[0] > MOST / 2 else max(ends)]} ..."


def _values(flag: Flag) -> list[str]:
    return section(f"values of --{flag.name}", [*flag.values().items()]) if flag.values is not None else []


def _listed(entry: Verb) -> list[Key]:
    """Return the keys that a verb takes."""
    listed = {name for argument in entry.arguments for name in argument.listed}
    return [key for key in known_keys().values() if not listed or key.name in listed]


def _common(entry: Verb) -> list[str]:
    """Return the lines of the keys that are most used, and where the others are."""
    taken = {key.name: key for key in _listed(entry)}
    names = taken if len(taken) < len(known_keys()) else COMMON.get(entry.name, _RUN)
    rows = [(f"--{name}", _brief(taken[name])) for name in names]
    title = "keys of a run" if names is taken else "keys of a run, the most used"
    tables = ", ".join(name for name in RunSpec.model_fields if any(k.startswith(f"{name}.") for k in taken))
    help_ = f"meshwright {entry.name} --help"
    more = (
        f"{help_} NAME shows a flag, a key or a table of keys in full (tables: {tables}); {help_} {ALL} "
        f"shows everything, with {len(taken)} keys"
    )
    return [*section(title, rows), "", *textwrap.wrap(more, WIDTH, break_on_hyphens=False)]


def _brief(key: Key) -> str:
    """Return a key's values, if they are words, or else what it means, and its default."""
    words = len(key.choices) > 1 and any(isinstance(choice, str) for choice in key.choices)
    text = _cut(" | ".join(map(str, key.choices)) if words else key.description or key.text)
    return text if key.optional and key.default == "none" else f"{text} (default {key.default})"


def _named(entry: Verb, names: Iterable[str]) -> list[str]:
    """Return the lines of what is named: flags, tables, dotted keys, and last words of keys.

    Raises `UserError` for a name of nothing.
    """
    taken, lines = _listed(entry) if entry.keys else [], []
    for name in names:
        flags = [flag for flag in entry.flags if flag.name == name.removeprefix("--")]
        keys = [key for key in taken if f"{key.name}.".startswith(f"{name}.")]
        keys = keys or [key for key in taken if f".{name}." in f"{key.name}."]
        if not flags and not keys:
            raise _unknown(entry, name, taken)
        for flag in flags:
            lines += [*section("flag", [_flag(entry, flag, full=True)]), *_values(flag)]
        lines += _keys(keys)
    return lines


def _unknown(entry: Verb, name: str, taken: Sequence[Key]) -> UserError:
    tables = [
        table for table in RunSpec.model_fields if any(key.name.startswith(f"{table}.") for key in taken)
    ]
    names = [*tables, *(flag.name for flag in entry.flags), *(key.name for key in taken)]
    last = {key.name.rpartition(".")[2]: key.name for key in reversed(taken)}
    kinds = (
        f"neither a flag of {entry.name} nor a table or key of a run" if taken else f"no flag of {entry.name}"
    )
    hint = did_you_mean(name, names) or did_you_mean(name, last)
    hint = hint or (f"; the tables are {', '.join(tables)}" if tables else "")
    return UserError(f"--help: '{name}' is {kinds}{hint or '; give --help alone'}")


def _about_keys() -> list[str]:
    return textwrap.wrap(
        "keys: tables of the run file; as flags, --layout.dp 2 or --layout.dp=2, they override it. 'none' "
        "unsets a key, or empties a list. For editors, the first line of a file can name the schema that "
        "meshwright spec schema prints: #:schema FILE.",
        WIDTH,
    )


def _keys(keys: Sequence[Key]) -> list[str]:
    """List keys under their tables: name, type, default, description below."""
    lines: list[str] = []
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
