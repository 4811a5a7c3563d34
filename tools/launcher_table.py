"""The table of docs/cluster.md: what ends a run under each launcher, and what follows.

Its rows are in tests/launch/launcher_table.toml, and the tests that a row names hold it to what they see. Run
as `python tools/launcher_table.py` from the repository's root to write the table anew.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/cluster.md"
FILE = ROOT / "tests/launch/launcher_table.toml"
BEGIN, END = "<!-- table of launchers -->\n", "<!-- end of the table -->\n"
_HEAD = (
    "| launcher | what happens | a rank exits with | the launcher exits with | `status` | then |",
    "| --- | --- | --- | --- | --- | --- |",
)


@dataclass(frozen=True)
class Row:
    """An end of a run: who has started its ranks, what has happened, and what was seen of it.

    `rank` and `launcher_code` are exit codes, "-" where there is none to be seen; `then` is what the same
    command, or the job's script, does afterwards. `test` is the file and the function that see it.
    """

    launcher: str
    event: str
    rank: str
    launcher_code: str
    status: str
    then: str
    test: str

    @property
    def function(self) -> str:
        """The name of the test."""
        return self.test.partition("::")[2]


def rows() -> list[Row]:
    """Return the rows in their order."""
    return [Row(**row) for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["row"]]


def row_of(launcher: str, event: str) -> Row:
    """Return the row of an event under a launcher."""
    return next(row for row in rows() if (row.launcher, row.event) == (launcher, event))


def table() -> str:
    """Return the table in Markdown."""
    lines = list(_HEAD)
    for row in rows():
        cells = list(asdict(row).values())[:-1]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """Return the text of the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
