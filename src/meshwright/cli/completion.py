"""The verb completion: a script for a shell, made of the table of verbs and the keys of the spec.

What may follow a word is in functions of the script (`_tables`), and how a shell asks for it in the files of
`completions/`, which end with `@TABLES@`, the place of these functions. So the shell starts no program to
complete a word. Libraries such as shtab make scripts of an `argparse` parser, in which each verb has
options of its own; here most verbs share the keys of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from meshwright.api.options import Choice
from meshwright.cli.help import ALL
from meshwright.cli.main import find
from meshwright.cli.overview import SUMMARIES
from meshwright.cli.parser import Argument, Call, Flag, Verb, verb
from meshwright.hardware.find import catalogue
from meshwright.spec import UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec
from meshwright.spec.schema import Key, known_keys

SHELLS = ("bash", "zsh", "fish")
FILE, FOLDER = "@file", "@folder"
"""Stand in a table for files and folders, and for folders alone."""

Rows = Sequence[tuple[str, str]]
"""Words with what each is, which may be empty."""


@verb("completion", Argument("SHELL", "bash, zsh or fish"))
def completion(call: Call) -> None:
    """Print the script, which the shell reads when it starts."""
    shell = call.words[0]
    if shell not in SHELLS:
        hint = did_you_mean(shell, SHELLS) or f"; give one of {', '.join(SHELLS)}"
        raise UserError(f"SHELL: '{shell}' has no script{hint}")
    text = resources.files("meshwright.cli").joinpath("completions", f"meshwright.{shell}").read_text("utf-8")
    print(text.replace("@TABLES@", "\n".join(_functions(shell))), end="")


def _functions(shell: str) -> Iterator[str]:
    """Yield a function of the script for each table: it prints the rows of the words it is called with."""
    for name, branches in _tables().items():
        yield _fish(name, branches) if shell == "fish" else _posix(name, branches)


def _posix(name: str, branches: Mapping[str, Rows]) -> str:
    lines = [f"_meshwright_{name}() {{", '    case "$*" in']
    for words, rows in branches.items():
        shown = " ".join("'" + line.replace("'", "'\\''") + "'" for line in map("\t".join, rows))
        lines.append(f"    {_patterns(words)}) printf '%s\\n' {shown} ;;")
    return "\n".join([*lines, "    esac", "}"])


def _fish(name: str, branches: Mapping[str, Rows]) -> str:
    lines = [f"function __meshwright_{name}", '    switch "$argv"']
    for words, rows in branches.items():
        escaped = (line.replace("\\", "\\\\").replace("'", "\\'") for line in map("\t".join, rows))
        shown = " ".join(f"'{line}'" for line in escaped)
        lines.append(f"        case {_patterns(words).replace('|', ' ')}\n            printf '%s\\n' {shown}")
    return "\n".join([*lines, "    end", "end"])


def _patterns(words: str) -> str:
    return "|".join(f"'{each}'" for each in words.split("|"))


def _tables() -> dict[str, dict[str, Rows]]:
    """Return the tables by name: rows by the words that they follow, several between bars.

    `verbs` are those of one word and groups, or a group's; `flags` and `places` those of a verb, `keys` the
    keys that it takes; `values` follow a flag of a verb, or a key.
    """
    verbs = [find(*name.split()) for name in SUMMARIES]
    groups = dict.fromkeys(each.name.split()[0] for each in verbs if " " in each.name)
    return {
        "verbs": {
            "": [
                *((name, summary) for name, summary in SUMMARIES.items() if " " not in name),
                *((group, f"{', '.join(_second_words(group))} ...") for group in groups),
                ("--help", "list the verbs"),
                ("--version", "print the version"),
            ],
            **{group: [*_second_words(group).items()] for group in groups},
        },
        "flags": {each.name: [*map(_flag, each.flags), ("--help", "explain the verb")] for each in verbs},
        "keys": dict(_keys(verbs)),
        "names": {each.name: [(name, "") for name in _names(each)] for each in verbs if each.keys},
        "places": {each.name: _places(each.arguments) for each in verbs if each.arguments},
        "values": {
            **{f"{v.name} --{flag.name}": _flag_values(flag) for v in verbs for flag in v.flags if flag.read},
            **{f"* --{key.name}": _key_values(key) for key in known_keys().values()},
        },
    }


def _second_words(group: str) -> dict[str, str]:
    start = f"{group} "
    return {name.removeprefix(start): said for name, said in SUMMARIES.items() if name.startswith(start)}


def _flag(flag: Flag) -> tuple[str, str]:
    return f"--{flag.name}", flag.summary


def _keys(verbs: Sequence[Verb]) -> Iterator[tuple[str, Rows]]:
    """Yield the verbs with the keys that they take: those that take all of them together."""
    rows = {key.name: (f"--{key.name}", key.description or key.text) for key in known_keys().values()}
    listed = {each.name: [name for place in each.arguments for name in place.listed] for each in verbs}
    yield "|".join(each.name for each in verbs if each.keys and not listed[each.name]), [*rows.values()]
    for name, keys in listed.items():
        if keys:
            yield name, [rows[key] for key in keys]


def _names(entry: Verb) -> list[str]:
    """Return what may follow `--help`."""
    return [ALL, *RunSpec.model_fields, *(flag.name for flag in entry.flags)]


def _places(arguments: Sequence[Argument]) -> Rows:
    """Return what a word that is no flag may be: files, and names of presets, clusters and shells."""
    rows: dict[str, str] = {}
    for argument in arguments:
        if argument.name == "MODEL":
            rows |= dict.fromkeys(PRESETS, "a preset")
        if argument.name == "SHELL":
            return [(shell, "") for shell in SHELLS]
        rows |= _clusters() if argument.name == "NAME" else {}
        rows[FILE] = ""
    return [*rows.items()]


def _clusters() -> dict[str, str]:
    return {name: cluster.device.name for name, cluster in catalogue().items()}


def _flag_values(flag: Flag) -> Rows:
    """Return the values of a flag; a row without a word stands for numbers and texts."""
    if flag.name in ("cluster", "gpu"):
        return [*_clusters().items(), (FILE, "")]
    if flag.values is not None:
        return [*flag.values().items()]
    if isinstance(flag.read, Choice):
        return [(name, "") for name in flag.read.names]
    words = [(word, "") for word in flag.value.split("|") if word.islower() and "=" not in word]
    if "DIR" in flag.value:
        return [*words, (FOLDER, "")]
    return [*words, (FILE if any(part in flag.value for part in ("FILE", "SOURCE", ".toml")) else "", "")]


def _key_values(key: Key) -> Rows:
    """Return the values of a key that are words, and files for a text; see `_flag_values`."""
    if key.name == "model.preset":
        return [(name, "") for name in PRESETS]
    words: list[Any] = [*key.choices, *(("true", "false") if key.is_switch else ())]
    if key.name == "data.corpus":
        words = ["stdlib", "synthetic"]
    rows = [(str(word), "") for word in (*words, *(("none",) if key.optional else ()))]
    return [*rows, (FILE if key.is_text and not key.choices else "", "")]
