"""The commit of the program's source: that of a checkout, and of nothing else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright import commit as module

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    ran = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@needs_git
def test_the_commit_is_that_of_a_checkout_and_tells_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "commit.py").write_text("one = 1\n")
    monkeypatch.setattr(module, "_FOLDER", package)
    assert module.commit() is None  # no repository
    git(tmp_path, "init", "-q")
    (tmp_path / "other").write_text("")
    git(tmp_path, "add", "other")
    git(tmp_path, "commit", "-qm", "other")
    assert module.commit() is None  # a repository around an installed package
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert module.commit() == head
    (tmp_path / "other").write_text("changed")
    assert module.commit() == head  # not a part of the program
    (package / "commit.py").write_text("one = 2\n")
    assert module.commit() == f"{head}+"


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert module.commit() is None
