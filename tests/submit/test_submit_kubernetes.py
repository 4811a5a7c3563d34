"""Manifests of Kubernetes, held to the models of kubeflow-trainer-api, made from the CRDs' schemas."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright import api
from meshwright.rank.failure import FATAL
from meshwright.spec import UserError
from meshwright.spec.errors import (
    CRASH_LOOP,
    REQUEUE,
    CollectiveError,
    DataError,
    NumericalError,
    StorageError,
)
from meshwright.submit.kubernetes import state_of

MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
}
"""The model of each kind."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "one GPU": {"layout": "dp = 1", "gpus_per_node": 1},
    "a part of a node": {"layout": "dp = 2, tp = 2"},
    "two nodes": {"layout": "dp = 16, zero = 3"},
    "a pipeline over eight nodes": {"layout": "pp = 8, tp = 8, dp = 1", "kind": "jobset"},
    "a range of nodes": {"layout": "dp = 16", "nodes": "1:2"},
    "processors alone": {"layout": "dp = 4", "gpus_per_node": 2, "cpu": True},
    "a sweep": {"layout": "dp = 8", "sweep": [("train.lr", ("1e-4", "3e-4"))]},
}


def manifests(folder: Path, layout: str = "dp = 16", **options: Any) -> list[dict[str, Any]]:
    """The objects of a run of the layout."""
    run = folder / "run.toml"
    run.write_text(f'model = {{ preset = "llama3-8b" }}\nlayout = {{ {layout} }}\n', encoding="utf-8")
    given = {"image": "example.org/meshwright:1", "volume": [("shared", "/shared")], **options}
    found = api.launch(run, on="kubernetes", dry_run=True, **given)
    return list(yaml.safe_load_all(found["file"]))


def spec_of_job(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of the first job among objects."""
    spec = next(each["spec"] for each in objects if each["kind"] in ("JobSet", "TrainingRuntime"))
    [job] = spec.get("template", {}).get("spec", spec)["replicatedJobs"]
    return dict(job["template"]["spec"])


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_manifest_is_one_of_its_models(case: str, kind: str, tmp_path: Path) -> None:
    """A model drops fields that it does not know, so what it gives back must be all of the object."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed here"
    )
    options = {"kind": kind, "service_account": "trainer", "namespace": "team", "env": [("A", "b c")]}
    objects = manifests(tmp_path, **{**options, **LAYOUTS[case]})
    assert {each["kind"] for each in objects} <= {*MODELS}
    for each in objects:
        model = getattr(models, MODELS[each["kind"]]).from_dict(each)
        assert model.to_dict() == each


def test_a_field_that_no_model_has_is_noticed(tmp_path: Path) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed here"
    )
    [_, jobset] = manifests(tmp_path, kind="jobset")
    spec_of_job([jobset])["template"]["spec"]["containers"][0]["comand"] = ["meshwright"]
    assert models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() != jobset
    spec_of_job([jobset])["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] = ["2"]
    with pytest.raises(ValueError, match="values"):
        models.JobsetV1alpha2JobSet.from_dict(jobset)


def test_exit_codes_are_those_of_the_program(tmp_path: Path) -> None:
    errors = (UserError, CollectiveError, StorageError, DataError, NumericalError)
    assert sorted([*(error.code for error in errors), CRASH_LOOP]) == [*FATAL]
    rules = spec_of_job(manifests(tmp_path))["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore", "Count"]
    assert rules[0]["onExitCodes"]["values"] == [*FATAL] and rules[2]["onExitCodes"]["values"] == [REQUEUE]
    container = spec_of_job(manifests(tmp_path))["template"]["spec"]["containers"][0]["name"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container}


@pytest.mark.parametrize(
    ("case", "nodes", "gpus", "words"),
    [
        ("one GPU", 1, 1, "--nproc 1"),
        ("a part of a node", 1, 4, "--nproc 4"),
        ("two nodes", 2, 8, "--nproc 8 --nodes 2:2 --address $(POD_IP)"),
        ("a pipeline over eight nodes", 8, 8, "--nproc 8 --nodes 8:8 --address $(POD_IP)"),
        ("a range of nodes", 2, 8, "--nproc 8 --nodes 1:2 --address $(POD_IP)"),
        ("processors alone", 2, None, "--nproc 2 --nodes 2:2 --address $(POD_IP)"),
    ],
)
def test_pods_and_gpus_are_those_of_the_layout(
    case: str, nodes: int, gpus: int | None, words: str, tmp_path: Path
) -> None:
    objects = manifests(tmp_path, **{**LAYOUTS[case], "kind": "jobset", "restarts": 3})
    job = spec_of_job(objects)
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (nodes, nodes, 3 * nodes)
    [container] = job["template"]["spec"]["containers"]
    assert container.get("resources") == (None if gpus is None else {"limits": {"nvidia.com/gpu": gpus}})
    start = "meshwright train /etc/meshwright/run.toml --out /shared/run --resume auto --doctor"
    assert " ".join(container["command"]) == f"{start} {words}"


def test_a_trainjob_names_its_runtime_and_has_the_size(tmp_path: Path) -> None:
    run, runtime, job = manifests(tmp_path, name="my-run", service_account="trainer", namespace="team")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "my-run"
    assert job["spec"]["trainer"]["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2
    assert {each["metadata"]["namespace"] for each in (run, runtime, job)} == {"team"}
    assert spec_of_job([runtime])["template"]["spec"]["serviceAccountName"] == "trainer"
    assert 'preset = "llama3-8b"' in run["data"]["run.toml"]


def test_runs_of_a_sweep_have_folders_and_flags_of_their_own(tmp_path: Path) -> None:
    objects = manifests(tmp_path, **LAYOUTS["a sweep"], kind="jobset")
    jobs = [each for each in objects if each["kind"] == "JobSet"]
    assert [each["metadata"]["name"] for each in jobs] == ["run-0", "run-1"]
    commands = [spec_of_job([each])["template"]["spec"]["containers"][0]["command"] for each in jobs]
    assert [words[words.index("--out") + 1] for words in commands] == ["/shared/run/0", "/shared/run/1"]
    assert [words[-1] for words in commands] == ["--train.lr=1e-4", "--train.lr=3e-4"]


def test_fields_of_pods_may_be_added_and_time_is_a_deadline(tmp_path: Path) -> None:
    option = ["nodeSelector={gpu: h100}", "priorityClassName=high"]
    job = spec_of_job(manifests(tmp_path, option=option, time=3600))
    assert job["template"]["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert job["template"]["spec"]["priorityClassName"] == "high"
    assert job["activeDeadlineSeconds"] == 3600
    assert "activeDeadlineSeconds" not in spec_of_job(manifests(tmp_path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"image": None}, "--image: is missing"),
        ({"out": Path("/elsewhere/run")}, "--out: /elsewhere/run is on none of the volumes"),
        ({"out": Path("runs/x")}, "--out: runs/x is not an absolute path"),
        ({"volume": None}, "--volume: is missing"),
        ({"option": ["containers=[]"]}, "--option: 'containers=[]' is not a further field"),
        ({"option": ["nodeSelector={a"]}, "--option: 'nodeSelector={a' has no YAML"),
        ({"name": "My_run"}, "--name: 'My_run' is not valid"),
        ({"gpus_per_node": 3}, "--gpus-per-node: 16 ranks"),
        ({"nodes": "3"}, "--nodes: 3 nodes cannot share 16 ranks"),
        ({"nodes": "4", "gpus_per_node": 8}, "--nodes: 4 nodes of 8 ranks are 32"),
        ({"nodes": "4:2"}, "--nodes: '4:2' is not a number of nodes"),
    ],
)
def test_mistakes_are_sentences(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        manifests(tmp_path, **options)


def test_states_are_those_of_conditions() -> None:
    true = {"status": "True"}
    assert state_of({}) == "pending"
    assert state_of({"conditions": [{"type": "Suspended", **true}]}) == "pending"
    assert state_of({"replicatedJobsStatus": [{"name": "node", "ready": 0, "active": 2}]}) == "running"
    assert state_of({"jobsStatus": [{"name": "node", "ready": 1}]}) == "running"
    assert state_of({"conditions": [{"type": "Completed", **true}]}) == "done"  # of a JobSet
    assert state_of({"conditions": [{"type": "Complete", **true}]}) == "done"  # of a TrainJob
    assert state_of({"conditions": [{"type": "Failed", "status": "False"}]}) == "pending"
    assert state_of({"conditions": [{"type": "Failed", **true}]}) == "failed"


def test_models_have_the_conditions_that_states_are_read_of() -> None:
    """Field names of what kubectl prints are those of the models."""
    pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed here")
    for module, names in {
        "jobset_v1alpha2_job_set_status": ("conditions", "replicatedJobsStatus"),
        "trainer_v1alpha1_train_job_status": ("conditions", "jobsStatus"),
    }.items():
        found = import_module(f"kubeflow_trainer_api.models.{module}")
        [model] = [each for name, each in vars(found).items() if name.lower() == module.replace("_", "")]
        assert {*names} <= {field.alias or name for name, field in model.model_fields.items()}
