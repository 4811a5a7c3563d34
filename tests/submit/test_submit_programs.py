"""Programs of schedulers in whose place scripts stand: what they are given, and what is made of theirs."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright import api
from meshwright.cli.main import main
from meshwright.runs.status import going_on, write_status
from meshwright.spec import UserError
from meshwright.submit.job import ClusterJob, name_of
from meshwright.submit.skypilot import state_in
from meshwright.submit.slurm import Slurm, image_of

IMAGE = {"image": "example.org/meshwright:1", "volume": [("shared", "/shared")]}
Program = Callable[..., Callable[[], list[list[str]]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file in the current folder, for sixteen GPUs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text("layout = { dp = 16 }\n", encoding="utf-8")
    return Path("run.toml")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Make a program that prints `told` and ends with `code`; return what says the words of its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, told: str = "", code: int = 0, error: str = "") -> Callable[[], list[list[str]]]:
        calls = tmp_path / f"{name}.calls"
        (folder / f"{name}.out").write_text(told, encoding="utf-8")
        (folder / name).write_text(
            f'#!/bin/sh\nprintf "%s\\0" "$@" >> {calls}; echo >> {calls}\n'
            f"cat {folder}/{name}.out; echo '{error}' >&2; exit {code}\n",
            encoding="utf-8",
        )
        (folder / name).chmod(0o755)
        return lambda: [line.split("\0")[:-1] for line in calls.read_text().splitlines()]

    return make


def status_of(*conditions: str) -> str:
    """Return an object as kubectl prints it, of which these conditions are true."""
    found = [{"type": name, "status": "True"} for name in conditions]
    return json.dumps({"status": {"conditions": found, "jobsStatus": [{"name": "node", "ready": 2}]}})


def test_kubectl_replaces_looks_at_and_deletes_the_job(run: Path, program: Program) -> None:
    calls = program("kubectl", status_of())
    found = api.launch(run, on="kubernetes", namespace="team", **IMAGE)
    folder = Path(found["folder"])
    assert folder == Path.cwd() / "runs" / "run" and found["ids"] == ["run"]
    assert (folder / "job.yaml").read_text() == found["file"]
    assert api.status(folder)["runs"][0]["state"] == "running"
    with pytest.raises(UserError, match="has the job run of kubernetes already, which is running"):
        api.launch(run, on="kubernetes", **IMAGE)
    list(api.logs(folder))
    api.stop(folder)
    replaced, asked, _, logs, _, deleted = calls()
    assert replaced == ["replace", "--force", "--namespace", "team", "--filename", str(folder / "job.yaml")]
    assert asked == ["get", "trainjob", "run", "--namespace", "team", "--output", "json"]
    assert logs[:3] == ["logs", "--namespace", "team"] and "jobset.sigs.k8s.io/jobset-name=run" in logs
    assert deleted == ["delete", "trainjob", "run", "--namespace", "team", "--ignore-not-found"]


def test_a_job_is_followed_by_its_states(
    run: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("kubectl", status_of("Complete"))
    flags = ["--image", "example.org/m:1", "--volume", "shared:/shared", "--follow"]
    assert main(["launch", str(run), "--on", "kubernetes", *flags]) == 0
    assert "kubernetes: done" in capsys.readouterr().out
    program("kubectl", status_of("Failed"))
    assert main(["launch", str(run), "--on", "kubernetes", *flags]) == 1


def test_a_job_that_kubernetes_has_forgotten_is_unknown(run: Path, program: Program) -> None:
    program("kubectl", status_of("Complete"))
    folder = Path(api.launch(run, on="kubernetes", **IMAGE)["folder"])
    program("kubectl", code=1, error='Error from server (NotFound): trainjobs "run" not found')
    assert api.status(folder)["runs"][0]["state"] == "unknown"
    program("kubectl", code=1, error="Unable to connect to the server")
    with pytest.raises(UserError, match=r"kubectl: `kubectl get .*` ended with 1: Unable to connect"):
        api.status(folder)


def test_a_program_that_refuses_leaves_no_record(run: Path, program: Program) -> None:
    program("sbatch", code=1, error="sbatch: error: Invalid partition name specified")
    with pytest.raises(UserError, match="ended with 1: sbatch: error: Invalid partition"):
        api.launch(run, on="slurm", out=Path("out"))
    assert not Path("out").exists()
    Path("out").mkdir()
    Path("out/slurm.sbatch").write_text("of an earlier job")
    with pytest.raises(UserError, match="Invalid partition"):
        api.launch(None, on="slurm", out=Path("out"), overrides=[("layout.dp", "16")])
    assert Path("out/slurm.sbatch").read_text() == "of an earlier job"
    assert [file.name for file in Path("out").iterdir()] == ["slurm.sbatch"]


def test_a_dry_run_refuses_the_folder_of_a_job_that_runs(run: Path, program: Program) -> None:
    program("kubectl", status_of())
    api.launch(run, on="kubernetes", **IMAGE)
    sentences = []
    for dry_run in (False, True):
        with pytest.raises(
            UserError, match="has the job run of kubernetes already, which is running"
        ) as told:
            api.launch(run, on="kubernetes", dry_run=dry_run, **IMAGE)
        sentences.append(str(told.value))
    assert sentences[0] == sentences[1]


def test_a_pending_job_says_what_it_waits_for(
    run: Path, program: Program, capsys: pytest.CaptureFixture[str]
) -> None:
    program("sbatch", "7\n")
    out = Path(api.launch(run, on="slurm", out=Path("out"))["folder"])
    calls = program("squeue")
    squeue = Path(os.environ["PATH"].partition(os.pathsep)[0]) / "squeue"
    answers = 'case "$*" in *%r*) echo "7|Priority";; *) echo "7|PENDING";; esac'
    squeue.write_text(squeue.read_text().replace("cat ", f"{answers}; cat "))
    [found] = api.status(out)["runs"]
    assert (found["state"], found["waits_for"]) == ("pending", "Priority")
    assert main(["status", str(out)]) == 0 and "waits for Priority" in capsys.readouterr().out
    assert len(calls()) == 4  # states and reasons, each time


def test_a_run_that_was_told_to_stop_has_stopped_and_goes_on_by_launch(run: Path, program: Program) -> None:
    """Its script ends with the code of an interruption, which Slurm counts as a failure."""
    program("sbatch", "7\n")
    out = Path(api.launch(run, on="slurm", out=Path("out"))["folder"])
    program("squeue", "7|FAILED\n")
    assert api.status(out)["runs"][0]["state"] == "failed"
    write_status(out, "stopped", "stopped by SIGINT")
    assert api.status(out)["runs"][0]["state"] == "stopped"
    assert going_on(out) == (
        f"meshwright launch {run.absolute()} --on slurm --out {out} and the options that it had"
    )
    assert going_on(out / "0") == going_on(out)  # a run of a sweep
    assert going_on(Path("other")) == "meshwright train other --resume auto"


def test_a_missing_program_is_a_sentence(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for on, options in {"slurm": {}, "ray": {}, "kubernetes": IMAGE}.items():
        with pytest.raises(UserError, match=r"is not installed here, where the job is submitted; install it"):
            api.launch(run, on=on, **options)


def test_sky_launches_looks_at_and_cancels_the_job(run: Path, program: Program) -> None:
    rows = [{"job_id": 7, "job_name": "run", "status": "RUNNING"}]
    calls = program("sky", json.dumps(rows))
    volume = [("disk", "/shared")]
    found = api.launch(run, on="skypilot", accelerator="H100", volume=volume)
    folder = Path(found["folder"])
    assert api.status(folder)["runs"][0]["state"] == "running"
    api.stop(folder)
    launched, asked, _, cancelled = calls()
    assert launched == ["jobs", "launch", "--yes", "--detach-run", "--name", "run", str(folder / "job.yaml")]
    assert asked == ["jobs", "queue", "--all", "--output", "json"]
    assert cancelled == ["jobs", "cancel", "--yes", "--name", "run"]


def test_the_newest_job_of_a_name_counts() -> None:
    rows = [
        {"job_id": 9, "job_name": "run", "status": "FAILED_NO_RESOURCE"},
        {"job_id": 10, "job_name": "run", "status": "RECOVERING"},
        {"job_id": 11, "job_name": "other", "status": "SUCCEEDED"},
    ]
    assert state_in(f"Fetching jobs...\n{json.dumps(rows)}", "run") == "pending"
    assert state_in(json.dumps(rows[:1]), "run") == "failed"
    assert state_in(json.dumps(rows), "none") == "unknown"
    assert state_in("", "run") == "unknown"


def test_the_task_of_skypilot_is_one(run: Path, tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed here")
    options = {"accelerator": "H100", "volume": [("disk", "/shared")], "option": ["disk_size=512"]}
    found = api.launch(run, on="skypilot", dry_run=True, env=[("A", "b")], **options)
    (tmp_path / "job.yaml").write_text(found["file"], encoding="utf-8")
    task = sky.Task.from_yaml(str(tmp_path / "job.yaml"))
    assert (task.name, task.num_nodes, task.envs) == ("run", 2, {"A": "b"})
    [resources] = task.resources
    assert resources.accelerators == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize(
    ("on", "options", "words"),
    [
        ("slurm", {"nodes": "1:2", "ranks_by": "torchrun"}, "--ranks-by: torchrun makes a world of one size"),
        ("slurm", {"volume": [("/a,b", "/c")], "image": "x"}, "--volume: /a,b:/c has a comma"),
        ("slurm", {"option": ["partition=a\nb"]}, "--option: 'partition=a\\nb' is not valid"),
        ("slurm", {"env": [("A-B", "c")]}, "--env: 'A-B' is not valid"),
        (
            "slurm",
            {"sweep": [("layout.dp", ("8", "16"))]},
            "--sweep: layout.dp=8 changes the number of ranks",
        ),
        ("slurm", {"sweep": [("train.lr", ("1", "2"))] * 2}, "--sweep: a key is given twice"),
        ("slurm", {"sweep": [("train.seed", tuple(map(str, range(1001))))]}, "--sweep: 1,001 runs are more"),
        ("slurm", {"option": ["a b"]}, "--option: 'a b' begins with no name that sbatch could know"),
        ("slurm", {"at_once": 2}, "--at-once: 2 is of a sweep's runs; add --sweep"),
        ("ssh", {"hosts": ("a", "a")}, "--hosts: a,a has a host twice"),
        ("ssh", {"hosts": ("a",)}, "--hosts: 1 host for 2 nodes; give a host for each"),
        ("ssh", {"hosts": ("a", "-oProxyCommand=x")}, "has a word that ssh takes for a flag"),
        ("ssh", {"hosts": ("a", "b"), "image": "x"}, "--image: ssh starts the run on the hosts as they are"),
        ("ssh", {"hosts": ("a", "b"), "time": 60}, "--time: nothing ends what ssh has started"),
        ("ssh", {"hosts": ("a", "b"), "sweep": [("train.lr", ("1", "2"))]}, "--sweep: ssh has no jobs of"),
        ("ray", {"image": "x"}, "--image: a cluster of Ray has its own already"),
        ("skypilot", {"volume": [("a", "/a")]}, "--accelerator: is missing"),
        ("skypilot", {"volume": [("a", "/a")], "accelerator": "H100", "time": 60}, "--time: a managed job"),
        (
            "skypilot",
            {"volume": [("a", "/a")], "accelerator": "H100", "out": Path("/b")},
            "--out: /b is on none",
        ),
    ],
)
def test_mistakes_are_sentences(on: str, options: dict[str, Any], words: str, run: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        api.launch(run, on=on, dry_run=True, **options)


def test_a_script_of_slurm_quotes_what_it_is_given(run: Path) -> None:
    given = {"env": [("A", "b'; rm -rf /")], "sweep": [("data.corpus", ("a b", "$(c)"))]}
    text = api.launch(run, on="slurm", dry_run=True, **given)["file"]
    assert """export A='b'"'"'; rm -rf /'""" in text
    assert "0) set -- \"$@\" '--data.corpus=a b' ;;" in text
    assert "1) set -- \"$@\" '--data.corpus=$(c)' ;;" in text


def test_a_container_of_pyxis_has_the_folders_of_the_run(run: Path) -> None:
    given = {"image": "nvcr.io/nvidia/pytorch:25.01-py3", "volume": [("/data", "/in")], "out": Path("/x/out")}
    text = api.launch(run, on="slurm", dry_run=True, env=[("A", "b")], **given)["file"]
    assert "'--container-image=nvcr.io#nvidia/pytorch:25.01-py3'" in text
    assert f"--container-mounts={Path.cwd()}:{Path.cwd()},/x/out:/x/out,/data:/in" in text
    assert "--container-env=A" in text and "export MESHWRIGHT_JOB_END=" in text


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("nvcr.io/nvidia/pytorch:1", "nvcr.io#nvidia/pytorch:1"),
        ("localhost.test:5000/a", "localhost.test:5000#a"),
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("org/name", "org/name"),
        ("/images/a.sqsh", "/images/a.sqsh"),
    ],
)
def test_an_image_is_named_as_enroot_has_it(given: str, found: str) -> None:
    assert image_of(given) == found


@pytest.mark.parametrize(
    ("text", "limit"),
    [("90", "01:30:00"), ("24:00:00", "24:00:00"), ("2-01:00:30", "49:01:00"), ("00:00:01", "00:01:00")],
)
def test_times_are_read_as_slurm_has_them(text: str, limit: str, run: Path, capsys: Any) -> None:
    assert main(["launch", str(run), "--on", "slurm", "--out", "/x", "--dry-run", "--time", text]) == 0
    assert f"#SBATCH --time={limit}" in capsys.readouterr().out


def test_time_is_what_the_planner_predicts(run: Path) -> None:
    model = [("model.preset", "llama3-8b"), ("layout.zero", "3"), ("train.batch_tokens", "1048576")]
    step = api.explain(
        api_spec(run, [*model, ("train.steps", "1")]), cluster="h100-sxm"
    ).interval[1]  # fmt: skip
    for steps in (1, 2000):
        given = [*model, ("train.steps", str(steps))]
        text = api.launch(run, on="slurm", cluster="h100-sxm", overrides=given, dry_run=True)["file"]
        hours, minutes = map(int, re.findall(r"--time=(\d+):(\d+):00", text)[0])
        least = 1200 + steps * step
        assert least <= 60 * (60 * hours + minutes) < least + 900 + 60
    text = api.launch(
        run, on="slurm", cluster="h100-sxm", overrides=[*model, ("train.steps", "10000000")], dry_run=True
    )["file"]
    assert "--time=24:00:00" in text


def api_spec(run: Path, overrides: list[tuple[str, str]]) -> Any:
    """Return the spec of a run file with flags."""
    from meshwright.spec import load

    return load(run, overrides)


def test_a_job_may_come_of_flags_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = [("model.preset", "tiny"), ("layout.dp", "8")]
    found = api.launch(None, on="slurm", overrides=flags, out=Path("out"), dry_run=True)
    assert found["commands"][0][-2:] == [str(tmp_path / "out/run.toml"), str(tmp_path / "out")]


def test_a_damaged_record_is_a_sentence(tmp_path: Path) -> None:
    for text, words in {
        "[]": "holds no JSON object",
        '{"scheduler": "slurm"}': "ids is not as meshwright",
    }.items():
        (tmp_path / "job.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=words):
            api.status(tmp_path)
    (tmp_path / "job.json").unlink()
    with pytest.raises(UserError, match=r"has no job\.json"):
        api.stop(tmp_path)


def test_a_run_without_a_job_has_a_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"has no job\.json"):
        api.status(tmp_path)
    (tmp_path / "status").write_text("requeue\nstopped by SIGTERM\n", encoding="utf-8")
    assert main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "requeue" in shown and "stopped by SIGTERM" in shown and "no step yet" in shown


def test_names_follow_the_run_file() -> None:
    assert [name_of(Path(name)) for name in ("a.toml", "Llama 3_8b.toml", "8b.toml")] == [
        "a",
        "llama-3-8b",
        "mw-8b",
    ]


def test_a_state_that_nobody_knows_is_a_failure(program: Program, run: Path) -> None:
    program("sbatch", "42\n")
    folder = Path(api.launch(run, on="slurm", out=Path("out"))["folder"])
    for told, state in {
        "42|NODE_FAIL": "failed",
        "42|CONFIGURING": "pending",
        "42|CANCELLED": "stopped",
    }.items():
        program("squeue", f"{told}\n")
        assert api.status(folder)["runs"][0]["state"] == state
    program("squeue", code=1, error="slurm_load_jobs error: Invalid job id specified")
    assert api.status(folder)["runs"][0]["state"] == "unknown"
    job = ClusterJob(name="a", run="/r", out="/o", nodes=2, ranks=8)
    assert Slurm().commands(job, Path("/o/f"))[0][-3:] == ["/o/f", "/r", "/o"]


LARGE = "train = { batch_tokens = 4_194_304 }\nlayout = { dp = 1024 }\n"
"""A run for 128 nodes of eight GPUs, which are more than meet in a folder."""
MEETINGS: dict[str, tuple[dict[str, Any], str]] = {
    "kubernetes": (IMAGE, "--nodes 128:128 --rendezvous run-node-0-0.run:29400 --address $(POD_IP)"),
    "skypilot": (
        {"accelerator": "H100", "volume": [("shared", "/shared")]},
        '--nodes 128:128 --rendezvous $first:29400 --address "$address"',
    ),
    "ssh": (
        {"hosts": tuple(f"me@node{n}" for n in range(128))}, "--nodes 128:128 --rendezvous node0:29400",
    ),
}  # fmt: skip


@pytest.mark.parametrize("on", MEETINGS)
def test_more_nodes_than_a_folder_serves_meet_in_a_store_on_the_first(run: Path, on: str) -> None:
    options, expected = MEETINGS[on]
    run.write_text(LARGE, encoding="utf-8")
    text = api.launch(run, on=on, out=Path("/shared/run"), dry_run=True, **options)["file"]
    assert expected in " ".join(line.strip().removeprefix("- ").strip("'") for line in text.splitlines())
    run.write_text(LARGE.replace("1024", "512"), encoding="utf-8")
    fewer = {**options, "hosts": options["hosts"][:64]} if on == "ssh" else options
    text = api.launch(run, on=on, out=Path("/shared/run"), dry_run=True, **fewer)["file"]
    assert "64:64" in text and "--rendezvous" not in text


def test_the_script_of_slurm_names_the_first_of_many_nodes(
    run: Path, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write_text(LARGE, encoding="utf-8")
    program("scontrol", "node7\nnode8\n")
    calls = program("srun")
    for name, value in {"JOB_ID": "1234567", "NNODES": "128", "JOB_NODELIST": "node[7-134]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for nodes, words in (("64:128", ["--rendezvous", "node7:29967"]), ("32:64", [])):
        run.write_text(LARGE.replace("1024", str(8 * int(nodes[3:]))), encoding="utf-8")
        text = api.launch(run, on="slurm", nodes=nodes, dry_run=True)["file"]
        (tmp_path / "job.sbatch").write_text(text, encoding="utf-8")
        subprocess.run(["bash", "job.sbatch", "run.toml", "out", "--a.b", "c"], check=True)
        told = calls()[-1]
        least = nodes.partition(":")[0]
        assert told[-5 - len(words) :] == [f"{least}:128", "--nproc", "8", *words, "--a.b", "c"]


def test_a_dry_run_for_many_hosts_names_the_first_commands(run: Path, capsys: Any) -> None:
    hosts = ",".join(f"node{number}" for number in range(16))
    words = [
        "--on",
        "ssh",
        "--hosts",
        hosts,
        "--out",
        "/x",
        "--dry-run",
        "--layout.dp",
        "16",
        "--gpus-per-node",
        "1",
    ]
    assert main(["launch", str(run), *words, "--cpu"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("# ")]
    assert sum(line.startswith("# submitted by: ssh") for line in told) == 4
    assert told[-1] == "# and 12 commands like these, which --json lists"
