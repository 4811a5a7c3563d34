"""A run file with comments: keys with their reasons, in the order of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from meshwright.spec import RunSpec
from meshwright.spec.load import from_tree
from meshwright.spec.toml import toml_value

WIDTH = 100
_SIZING = ("train.", "layout.", "data.seq_len")


@dataclass
class Draft:
    """Keys of a run file, dotted, each with its text and a comment.

    Those in `given` are the user's, and stay as they are.
    """

    head: list[str] = field(default_factory=list)
    """Sentences at the top of the file."""
    given: Mapping[str, str] = field(default_factory=dict)
    keys: dict[str, tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        self.keys = {key: (text, "") for key, text in self.given.items()}

    def add(self, key: str, value: Any, comment: str = "") -> None:
        """Set a key, in place of what it was, unless the user has given it."""
        if key not in self.given:
            self.keys[key] = (_flag_text(value), comment)

    def add_table(
        self, table: str, values: Mapping[str, Any], usual: Mapping[str, Any], comment: str
    ) -> None:
        """Set the keys of a table that are not as usual; the first has the comment."""
        for name, value in values.items():
            if value != usual.get(name):
                self.add(f"{table}.{name}", value, comment)
                comment = ""

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The keys with their texts, as flags have them."""
        return [(key, text) for key, (text, _) in self.keys.items()]

    @property
    def spec(self) -> RunSpec:
        """The run that the file describes. Raises `UserError`."""
        return from_tree({}, self.texts)

    @property
    def sizeless(self) -> RunSpec:
        """The run in samples of four tokens, as few as a pair of answers takes, on one device: it is valid
        before sizes are chosen."""
        kept = [(key, text) for key, text in self.texts if not key.startswith(_SIZING)]
        return from_tree({}, [*kept, ("data.seq_len", "4")])

    def toml(self) -> str:
        """Return the file: values as the spec reads them, comments behind the keys or in lines before."""
        tree = self.spec.to_json()
        lines = [
            line
            for sentence in self.head
            for line in wrap(sentence, WIDTH, initial_indent="# ", subsequent_indent="# ")
        ]
        for table, rows in self._tables():
            lines += ["", f"[{table}]"]
            for name, key, comment in rows:
                value = tree
                for part in key.split("."):
                    value = value[part]
                lines += _line(f"{name} = {toml_value(value)}", comment)
        return "\n".join(lines) + "\n"

    def _tables(self) -> Iterator[tuple[str, Sequence[tuple[str, str, str]]]]:
        """Yield each table with its keys' names, dotted names and comments, as the spec orders tables."""
        tables: dict[str, list[tuple[str, str, str]]] = {}
        for key, (_, comment) in self.keys.items():
            table, _, name = key.rpartition(".")
            if not table:  # a table that is none, as it is without the key
                continue
            tables.setdefault(table, []).append((name, key, comment))
        order = list(RunSpec.model_fields)
        yield from sorted(tables.items(), key=lambda each: (order.index(each[0].partition(".")[0]), each[0]))


def _flag_text(value: Any) -> str:
    """Return a value as a flag has it: text as it is, lists with commas."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(_flag_text, value))
    return value if isinstance(value, str) else toml_value(value)


def _line(text: str, comment: str) -> list[str]:
    if not comment:
        return [text]
    joined = f"{text}  # {comment}"
    if len(joined) <= WIDTH:
        return [joined]
    return [*wrap(comment, WIDTH, initial_indent="# ", subsequent_indent="# "), text]
