"""A wheel and an sdist: built, checked, and used where there is no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from hashlib import sha256
from pathlib import Path

import pytest

from meshwright.version import full_version

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "meshwright"


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    """Return what a command prints, run without the variables by which Python would find the checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=kept, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(wheel: Path) -> dict[str, str]:
    """Return the files of a wheel with their hashes, but for its own list of them, whose order is free."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: sha256(archive.read(name)).hexdigest() for name in names}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, the wheel that is built of it, and the wheel that is built of the checkout."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation, hatchling is that of the extra `dev`: nothing is downloaded.
    build = [sys.executable, "-P", "-m", "build", "--no-isolation", ROOT, "--outdir"]
    run(*build, folder)
    run(*build, folder / "direct", "--wheel")
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    (direct,) = (folder / "direct").glob("*.whl")
    return {"sdist": sdist, "wheel": wheel, "direct": direct}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a fresh environment with the sdist's wheel.

    torch and the other requirements are those of the environment that the tests run in, by a line of a .pth
    file: they would be gigabytes. Where that environment has the checkout installed, this one does not see
    it: lines of its .pth files are not read.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", built["wheel"])
    (packages,) = folder.glob("lib/python*/site-packages")
    around = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "requirements.pth").write_text("".join(f"{path}\n" for path in around), encoding="utf-8")
    return folder / "bin"


def test_a_package_index_would_take_both(built: dict[str, Path]) -> None:
    run(sys.executable, "-P", "-m", "twine", "check", "--strict", built["wheel"], built["sdist"])
    with zipfile.ZipFile(built["wheel"]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        said = Parser().parsestr(archive.read(name).decode())
    assert said["License-Expression"] == "Apache-2.0" and said["Requires-Python"] == ">=3.11"
    assert said.get_payload().startswith("# Meshwright")
    assert "Typing :: Typed" in said.get_all("Classifier", [])


def test_a_wheel_has_every_file_of_the_package(built: dict[str, Path]) -> None:
    """Templates, sources of kernels and tables included, and the same by way of the sdist."""
    files = {path for path in SOURCE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    expected = {f"meshwright/{path.relative_to(SOURCE).as_posix()}" for path in files}
    wheel = contents(built["wheel"])
    held = {name for name in wheel if name.startswith("meshwright/")}
    assert held - {"meshwright/commit.txt"} == expected
    assert ("meshwright/commit.txt" in held) == ("commit" in full_version())
    assert wheel == contents(built["direct"])


def test_an_sdist_has_what_builds_the_wheel_and_the_documentation(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "docs/index.md"}
    assert not any(name.startswith(("tests/", "bench/", "runs/", ".venv/")) for name in held)


def test_the_program_runs_outside_a_checkout(installed: Path, tmp_path: Path) -> None:
    program = installed / "meshwright"
    where = "import meshwright; print(meshwright.__file__)"
    assert Path(run(installed / "python", "-c", where, cwd=tmp_path).strip()).is_relative_to(installed.parent)
    assert run(program, "--version", cwd=tmp_path) == f"meshwright {full_version()}\n"
    plan = ["tiny", "--cluster", "h100-sxm", "--gpus", "8", "--seq-len", "2048", "--batch-tokens", "1M"]
    planned = json.loads(run(program, "plan", *plan, "--json", cwd=tmp_path))
    assert planned["best"]["tokens_per_second"] > 0
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one fish two fish red fish blue fish\n" * 400, encoding="utf-8")
    sizes = ["--model.layers", "1", "--model.vocab_size", "300", "--data.seq_len", "32"]
    data = ["--data.corpus", "text", "--data.tokenizer", "byte", "--data.val_fraction", "0.1"]
    steps = ["--train.batch_tokens", "128", "--train.steps", "3", "--train.eval_tokens", "256"]
    run(program, "train", *sizes, *data, *steps, "--nproc", "1", "--out", "run", cwd=tmp_path)
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["steps"] == 3
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "<style>" in report and "<svg" in report
