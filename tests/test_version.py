"""The commit of the program's source: that of a checkout, of a package that was built of one, or none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from meshwright import __version__, version

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    ran = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package in place of this one, two folders below the root of a checkout to be."""
    folder = tmp_path / "src" / "package"
    folder.mkdir(parents=True)
    (folder / "module.py").write_text("one = 1\n")
    monkeypatch.setattr(version, "PACKAGE", folder)
    return folder


@needs_git
def test_the_commit_is_that_of_a_checkout_and_tells_changes(package: Path, tmp_path: Path) -> None:
    assert version.commit() is None  # no repository
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "all")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert version.commit() == head
    assert version.full_version() == f"{__version__} (commit {head})"
    (package / "module.py").write_text("one = 2\n")
    assert version.commit() == f"{head}-dirty"


@needs_git
def test_a_repository_around_an_installed_package_is_not_its(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(version, "PACKAGE", package / "lib" / "site-packages" / "package")
    assert version.commit() is None and version.full_version() == __version__


def test_a_built_package_has_its_commit_in_a_file(package: Path) -> None:
    (package / version.COMMIT).write_text("0123456789ab\n")
    assert version.commit() == "0123456789ab"


def test_without_git_there_is_no_commit(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert version.commit() is None
