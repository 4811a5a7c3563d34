"""The command as a process: what it imports, how fast, its exit codes, and one line for a mistake."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from meshwright.profile.machine import GPU_DRIVERS
from meshwright.spec.errors import REQUEUE

GOODPUT = ["goodput", "--save-seconds", "9", "--restart-seconds", "60", "--mtbf-hours", "3", "--runs", "2"]
HEAVY = ("torch", "transformers", "numpy", "tokenizers")


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


LIGHT = [
    ["--help"],
    ["train", "--help"],
    ["spec", "show", "--layout.dp", "2"],
    ["spec", "schema"],
    ["spec", "check"],
    ["simulate", "--layout.pp", "2", "--out", "/dev/null/step.html"],
    ["simulate", "--layout.pp", "2"],
    [*GOODPUT, "--step-seconds", "5"],
    ["explain", "--layout.dp", "2", "--cluster", "h100", "--out", "/dev/null/plan.html"],
    ["explain", "--layout.dp", "2", "--cluster", "h100"],
    ["fit", "gpt2", "--gpu", "rtx-3090"],
    ["clusters"],
    ["clusters", "h100-sxm", "--count", "64", "--json"],
    ["profile", "--out", "/no/such/folder/it.json"],
    ["train", "--train.stpes", "3"],
    ["verify", "--nproc", "3"],
]


def test_nothing_heavy_is_imported_for_help_spec_and_mistakes() -> None:
    """By one process after the other's commands, and by the package alone."""
    program = (
        "import sys, traceback\n"
        "def heavy(words):\n"
        f"    found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    print('heavy:', words, found, file=sys.stderr)\n"
        "import meshwright\nheavy('import')\nfrom meshwright.cli.main import run\n"
        f"for words in {LIGHT!r}:\n"
        "    sys.argv = ['meshwright', *words]\n"
        "    try:\n        run()\n    except SystemExit:\n        pass\n    heavy(' '.join(words))\n"
    )
    found = python("-c", program)
    assert "Traceback" not in found.stderr
    reported = [line for line in found.stderr.splitlines() if line.startswith("heavy: ")]
    assert reported == [f"heavy: {words} []" for words in ("import", *map(" ".join, LIGHT))]


@pytest.mark.parametrize(("flag", "more"), [("--help", ""), ("--version", " meshwright.version")])
def test_the_list_of_verbs_imports_next_to_nothing(flag: str, more: str) -> None:
    program = (
        f"import sys; from meshwright.cli.entry import run; sys.argv[1:] = ['{flag}']; run()\n"
        "print(*(name for name in sys.modules if name.startswith(('meshwright', 'pydantic'))))"
    )
    found = python("-c", program).stdout.splitlines()
    assert found[0].startswith("meshwright 0.")
    assert found[-1] == f"meshwright meshwright.cli meshwright.cli.overview meshwright.cli.entry{more}"


def test_the_list_of_verbs_is_shown_at_once() -> None:
    """In time of the processor, which other programs do not take."""

    def seconds() -> float:
        before = os.times()
        python("-m", "meshwright", "--help")
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.1


def test_help_imports_neither_the_planner_nor_the_interface() -> None:
    """But for what its lists say: names of clusters, and of objectives."""
    program = (
        "import sys; from meshwright.cli.main import main; main(['--help'])\n"
        "print(*(name for name in sys.modules if name.startswith(('meshwright.planner.', 'meshwright.api'))))"
    )
    assert python("-c", program).stdout.splitlines()[-1] == ""


def test_importing_the_package_is_quick() -> None:
    """In time of the processor, which other programs do not take."""
    program = "import time; t = time.process_time(); import meshwright; print(time.process_time() - t)"
    assert min(float(python("-c", program).stdout) for _ in range(5)) < 0.2


def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nstpes = 3\n")
    found = python("-m", "meshwright", "train", str(file))
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr == (
        f"meshwright: error: {file}: train.stpes: unknown key; did you mean 'train.steps'?\n"
    )


def test_control_characters_of_a_mistake_are_escaped() -> None:
    found = python("-m", "meshwright", "train", "--x\n\x1b[31m")
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert "\x1b" not in found.stderr


def test_version_and_the_console_script() -> None:
    from meshwright.version import full_version

    assert python("-m", "meshwright", "--version").stdout == f"meshwright {full_version()}\n"
    script = Path(sys.executable).with_name("meshwright")
    shown = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, f"meshwright {full_version()}\n")


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    shown = subprocess.run(
        f"{sys.executable} -m meshwright train --help | head -n 1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in shown.stderr
    assert "Exception ignored" not in shown.stderr
    assert shown.returncode in (0, 141)


def test_a_warning_that_comes_again_is_shown_again() -> None:
    program = (
        "import sys\nfrom meshwright import api\nfrom meshwright.cli.main import find, run\nfind('train')\n"
        "code = 'import warnings\\nfor _ in range(2): warnings.warn(message)'\n"
        "def train(*_, **__):\n"
        "    exec(code, {'__name__': 'meshwright.recover', 'message': 'a rank failed'})\n"
        "    sys.exit(0)\n"
        "api.train = train\nsys.argv = ['meshwright', 'train', '--layout.dp', '1']\nrun()\n"
    )
    assert python("-c", program).stderr == "meshwright: warning: a rank failed\n" * 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_is_an_exit_code_and_a_sentence(name: str) -> None:
    program = (
        "import sys, time\nfrom meshwright import api\n"
        "from meshwright.cli.main import find, run\nfind('train')\n"
        "def train(*_, **__):\n    print('training', flush=True)\n    time.sleep(60)\n"
        "api.train = train\nsys.argv = ['meshwright', 'train', '--layout.dp', '1']\nrun()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    time.sleep(0.1)
    process.send_signal(signal.Signals[name])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.Signals[name]
    assert err == f"meshwright: stopped by {name}\n"


def test_leaving_finishes_threads_exit_functions_and_output() -> None:
    program = (
        "import atexit, threading, time, torch.distributed\nfrom meshwright.rank.child import leave\n"
        "atexit.register(print, 'exit function')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('main')\nleave(3)\n"
    )
    found = python("-c", program)
    assert (found.returncode, found.stdout.split("\n")) == (3, ["main", "thread", "exit function", ""])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it has no /dev/full")
def test_an_output_without_space_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [sys.executable, "-m", "meshwright", "clusters"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    words = "meshwright: error: standard output: cannot be written (No space left on device); give it space"
    assert told.returncode == 1 and told.stderr.startswith(words) and told.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it has no /dev/full")
def test_a_run_whose_output_fails_goes_on_to_its_end(tmp_path: Path) -> None:
    """Its supervisor does not import torch: 180 MB of the run's memory, and a second of its start."""
    keys = (
        "--model.preset tiny --model.layers 1 --data.corpus synthetic --data.seq_len 32 "
        "--train.batch_tokens 64 --train.steps 3 --train.eval_tokens 64 --layout.dp 1"
    )
    program = (
        "import atexit, sys; from meshwright.cli.main import run\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        f"sys.argv = ['meshwright', 'train', *{keys.split()!r}, '--out', {str(tmp_path / 'run')!r}]\nrun()\n"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    assert "progress is shown no more" in ended.stderr and "Traceback" not in ended.stderr
    gpu = any(Path(file).exists() for file in GPU_DRIVERS)
    assert str(gpu) in ended.stderr.splitlines(), ended.stderr
    assert ended.returncode == 1  # the result could not be printed
    assert (tmp_path / "run" / "result.json").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-00000003").is_dir()


def descendants(pid: int) -> list[int]:
    """The process ids of all children of a process, and of theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks for the ranks in /proc")
def test_a_run_outlives_its_terminal_and_saves_when_all_its_processes_are_stopped(tmp_path: Path) -> None:
    """Under nohup SIGHUP changes nothing; of SIGTERM each rank gets a scheduler's two and the launcher's."""
    words = ["--model.preset", "tiny", "--model.layers", "1", "--data.corpus", "synthetic", "--data.seq_len"]
    words += ["16", "--train.batch_tokens", "32", "--train.steps", "1000000", "--nproc", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", "train", *words, "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN),
    )
    assert process.stdout is not None
    steps = (line for line in process.stdout if line.startswith("step "))
    next(steps)
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGTERM):
        for pid in (process.pid, *descendants(process.pid)):
            os.kill(pid, number)
        if number == signal.SIGHUP:
            assert next(steps) and next(steps)
        time.sleep(0.05)
    _, err = process.communicate(timeout=120)
    assert process.returncode == REQUEUE
    (step,) = re.findall(r"^meshwright: stopped by SIGTERM after step (\d+), which is saved", err)
    assert err.splitlines()[1:] == ["meshwright: status: requeue"]
    assert (tmp_path / "run" / "checkpoints" / f"step-{int(step):08d}").is_dir()


def test_an_output_without_unicode_gets_escapes(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom meshwright.api import generation\nfrom meshwright.cli.main import run\n"
        "def tell(run, rows, how, layout, on_text):\n"
        "    on_text(0, 'na\\u00efve \\u2028\\x1b[31m')\n    on_text(0, '\\ud800 text\\n\\tend')\n"
        "generation.continue_prompts = tell\n"
        "sys.argv = ['meshwright', 'generate', '.', '--prompt', 'a']\nrun()\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert shown.stdout == b"na\\xefve \\u2028\\x1b[31m\\ud800 text\n\tend\n"
