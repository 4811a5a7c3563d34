"""The outputs that the README and the tour show are what the commands print."""

from __future__ import annotations

import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "shown_outputs.py"))
README, TOUR = (
    TOOL["shown"]((ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "docs/tour.md")
)

pytestmark = pytest.mark.timeout(900)  # the tour trains three times, beside other tests


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The output of a command, which is run once, in a folder with the examples and sources."""
    folder = tmp_path_factory.mktemp("tour")
    for name in ("examples", "src"):
        (folder / name).symlink_to(ROOT / name)

    @cache
    def run(command: str) -> str:
        words = [sys.executable, "-m", *shlex.split(command)]
        return subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout

    return run


def params(blocks: list[Any], quick: list[Any]) -> list[Any]:
    """Blocks as parameters, with the marker `full` but for those that are `quick`.

    A run under faults takes a minute, and tests/chaos has shorter ones; so has tests/cli of the other verbs.
    """
    return [
        pytest.param(block, id=block.verb, marks=() if block in quick else pytest.mark.full)
        for block in blocks
    ]


@pytest.mark.parametrize("block", params(TOUR, TOUR[:2]))
def test_the_tour_shows_what_its_commands_print(block: Any, printed: Callable[[str], str]) -> None:
    printed(TOUR[0].command)  # the run that others look at and go on from
    TOOL["present"](block, printed(block.command))


@pytest.mark.parametrize("block", params(README, [README[0], README[2]]))
def test_the_readme_shows_what_its_commands_print(block: Any, printed: Callable[[str], str]) -> None:
    # `make train` trains for minutes; a shorter run prints lines of the same form.
    command = TOUR[0].command if block.command.startswith("make train ") else block.command
    TOOL["present"](block, printed(command))


def test_the_tour_trains_looks_verifies_plans_breaks_and_resumes() -> None:
    assert [block.verb for block in TOUR] == ["train", "checkpoint", "verify", "plan", "chaos", "train"]
    assert [block.verb for block in README] == ["train", "verify", "plan"]


SHOWN = "```console\n$ meshwright verify run.toml\nloss  1  2.1e-15  head\n...\nequal: 3 numbers\n```\n"


def test_differences_and_cuts_do_not_matter() -> None:
    (block,) = TOOL["shown"](SHOWN)
    output = "loss  1  7.3e-16  embed\nnorm  2  0  a\nequal: 3 numbers\n"
    assert TOOL["present"](block, output) == ["loss  1  7.3e-16  embed", "...", "equal: 3 numbers"]
    assert TOOL["updated"](SHOWN, lambda command: output) == SHOWN.replace("2.1e-15  head", "7.3e-16  embed")


@pytest.mark.parametrize(
    "output",
    [
        "loss  2  2.1e-15  head\nequal: 3 numbers\n",  # another number
        "new\nloss  1  2.1e-15  head\nequal: 3 numbers\n",  # a line before the first
        "loss  1  2.1e-15  head\nequal: 3 numbers\nnew\n",  # a line after the last
        "loss  1  2.1e-15  head\nunequal: 3 numbers\n",
        "equal: 3 numbers\nloss  1  2.1e-15  head\n",  # another order
    ],
)
def test_another_form_is_found(output: str) -> None:
    (block,) = TOOL["shown"](SHOWN)
    with pytest.raises(LookupError, match=r"does not print"):
        TOOL["present"](block, output)
