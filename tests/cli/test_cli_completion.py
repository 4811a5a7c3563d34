"""Completion in real shells, typed on a terminal: verbs, flags, keys, their values, files."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.cli.completion import SHELLS
from meshwright.cli.main import main
from meshwright.cli.overview import SUMMARIES
from meshwright.spec import UserError
from meshwright.spec.schema import known_keys

WAIT_S = 60

CASES = [
    ("meshwright tr", ["train"]),
    ("meshwright spec sch", ["schema"]),
    ("meshwright train --lay", ["--layout."]),
    ("meshwright train --layout.seq", ["--layout.sequence_parallel"]),
    ("meshwright train --precision.compute mx", ["mxfp8"]),
    ("meshwright train --precision.compute=mx", ["mxfp8"]),
    ("meshwright train --train.compile tr", ["true"]),
    ("meshwright plan llama3-4", ["llama3-405b"]),
    ("meshwright plan --cluster h100-p", ["h100-pcie"]),
    ("meshwright fit smollm2-135m --gpu rtx-4", ["rtx-4090"]),
    ("meshwright merge --method ti", ["ties"]),
    ("meshwright export run out --dtype bf", ["bfloat16"]),
    ("meshwright train --help rec", ["recompute", "recovery"]),
    ("meshwright train --quiet my-r", ["my-run.toml"]),
    ("meshwright train --out my", ["my-folder"]),
    ("meshwright completion z", ["zsh"]),
]
"""Typed words, and all that the last one may become."""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a shell's script, in a folder with a run file and a folder."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "my-run.toml").touch()
    (folder / "my-folder").mkdir()

    def made(shell: str) -> Path:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        file = folder / f"meshwright.{shell}"
        if not file.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("builtins.print", lambda text, end: file.write_text(text))
                assert main(["completion", shell]) == 0
        return file

    return made


class Terminal:
    """A shell on a terminal, which `see` reads until a text is there."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self.pid, self.file = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.environ.update(TERM="dumb", PS1="> ", HOME=str(folder), INPUTRC="/dev/null")
            os.execvp(words[0], words)

    def type(self, text: str) -> None:
        os.write(self.file, text.encode())

    def see(self, text: str) -> str:
        seen, end = "", time.monotonic() + WAIT_S
        while text not in seen:
            assert time.monotonic() < end, f"{text!r} did not come, but {seen!r}"
            if select.select([self.file], [], [], 1)[0]:
                seen += os.read(self.file, 4096).decode(errors="replace")
        return seen

    def close(self) -> None:
        os.close(self.file)
        os.waitpid(self.pid, 0)


STARTS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set bell-style none'; source {0}"),
    "zsh": (["zsh", "-f", "-i"], "unsetopt beep; autoload -U compinit; compinit -u -D; source {0}"),
}


@pytest.mark.parametrize("shell", STARTS)
def test_typed_words_are_completed(shell: str, script: Callable[[str], Path]) -> None:
    file = script(shell)
    words, start = STARTS[shell]
    terminal = Terminal(words, file.parent)
    try:
        terminal.type(start.format(file.name) + "; echo REA'DY'\n")
        terminal.see("READY")
        for typed, found in CASES:
            if len(found) == 1:
                begun = re.split("[ =]", typed)[-1]
                terminal.type(f"{typed}\t")
                terminal.see(typed + found[0].removeprefix(begun))
                terminal.type("\x15")  # Ctrl-U: another line
    finally:
        terminal.close()


@pytest.mark.parametrize(("typed", "found"), CASES, ids=[typed for typed, _ in CASES])
def test_bash_offers_what_may_follow(typed: str, found: list[str], script: Callable[[str], Path]) -> None:
    file = script("bash")
    words = typed.replace("=", " = ").split(" ")  # as bash splits a line
    program = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _meshwright;'
    program += ' printf "%s\\n" "${COMPREPLY[@]}"'
    shown = subprocess.run(
        ["bash", "-c", program, "bash", str(file), *words],
        cwd=file.parent, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert (shown.stdout.splitlines(), shown.stderr) == (found, "")


@pytest.mark.parametrize(("typed", "found"), CASES, ids=[typed for typed, _ in CASES])
def test_fish_offers_what_may_follow(typed: str, found: list[str], script: Callable[[str], Path]) -> None:
    file = script("fish")
    shown = subprocess.run(
        ["fish", "--no-config", "-c", f"source {file}; complete -C '{typed}'"],
        cwd=file.parent, capture_output=True, text=True, timeout=WAIT_S,
        env={**os.environ, "HOME": str(file.parent)},
    )  # fmt: skip
    offered = [line.split("\t")[0].rpartition("=")[2].rstrip("/") for line in shown.stdout.splitlines()]
    assert (offered, shown.stderr) == (found, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_have_every_verb_and_key(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "@TABLES@" not in text
    assert all(f"'{name}'" in text for name in SUMMARIES)
    assert all(f"'--{name}\t" in text and f"'* --{name}'" in text for name in known_keys())


def test_another_shell_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"SHELL: 'tcsh' .* bash, zsh, fish"):
        main(["completion", "tcsh"])
