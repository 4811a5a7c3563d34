"""Jobs of Kubernetes: a TrainJob of Kubeflow Trainer v2 with its runtime, or a JobSet.

A pod is a node, whose launcher (`meshwright train --nodes`) starts its ranks, meets the others' in the run's
folder, and ends with the run's exit code. By that code the podFailurePolicy tells what a new pod would mend.
A sweep is one such object for each run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meshwright.rank.failure import FATAL
from meshwright.spec import UserError
from meshwright.spec.errors import REQUEUE
from meshwright.submit.job import ClusterJob
from meshwright.submit.program import answer_of, output_of
from meshwright.submit.scheduler import Scheduler, State
from meshwright.submit.submission import Submission
from meshwright.submit.yaml_text import documents

GPU = "nvidia.com/gpu"
RUN_FOLDER = "/etc/meshwright"
"""Where pods find the run file, which a ConfigMap carries."""
NODE = "node"
"""The name of the replicated job and of its container, as Kubeflow Trainer has it."""

Object = dict[str, Any]


class Kubernetes(Scheduler):
    """Kubernetes, by kubectl."""

    here = False
    file = "job.yaml"
    run_file = f"{RUN_FOLDER}/run.toml"
    sweeps = True

    def check(self, job: ClusterJob) -> None:
        """Raise `UserError` for what pods cannot have."""
        if job.image is None:
            raise UserError(
                "--image: is missing, and a pod runs an image; give one that has meshwright in it"
            )
        if not any(Path(job.out).is_relative_to(target) for _, target in job.mounts):
            raise UserError(
                f"--out: {job.out} is on none of the volumes, so it would go with its pod, and other pods "
                f"would not see it; give --volume CLAIM:PATH of a claim that all pods may write "
                f"(ReadWriteMany), and an --out below PATH"
            )

    def render(self, job: ClusterJob) -> str:
        """The objects as YAML, one document each."""
        return documents(objects(job))

    def commands(self, job: ClusterJob, file: Path) -> list[list[str]]:
        """The one call of kubectl, which also replaces what is left of an earlier job of the name."""
        return [["kubectl", "replace", "--force", *_namespace(job), "--filename", str(file)]]

    def submit(self, job: ClusterJob, file: Path) -> list[str]:
        """Create the objects; return their names."""
        output_of(self.commands(job, file)[0])
        return names(job)

    def states(self, submission: Submission) -> list[State]:
        """The states of the objects by their conditions."""
        job = submission.job
        found: list[State] = []
        for name in submission.ids:
            words = ["kubectl", "get", job.kind, name, *_namespace(job), "--output", "json"]
            told = answer_of(words, unknown="not found")
            found.append("unknown" if told is None else state_of(json.loads(told).get("status") or {}))
        return found

    def log(self, submission: Submission, member: int) -> list[str]:
        """The command that prints the logs of the pods of a run."""
        label = f"jobset.sigs.k8s.io/jobset-name={submission.ids[member]}"
        words = ["kubectl", "logs", *_namespace(submission.job), "--selector", label, "--container", NODE]
        return [*words, "--tail=-1", "--prefix", f"--max-log-requests={max(5, submission.job.nodes)}"]

    def stop(self, submission: Submission) -> None:
        """Delete the objects: their pods get SIGTERM, and save in their grace period."""
        job = submission.job
        output_of(["kubectl", "delete", job.kind, *submission.ids, *_namespace(job), "--ignore-not-found"])


def names(job: ClusterJob) -> list[str]:
    """The names of the objects, one for each run."""
    return [f"{job.name}-{number}" for number in range(len(job.members))] or [job.name]


def objects(job: ClusterJob) -> list[Object]:
    """The run file as a ConfigMap, and for each run a JobSet, or a TrainJob with the runtime it names."""
    made: list[Object] = []
    if job.run_text is not None:
        data = {"run.toml": job.run_text}
        made.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, job.name), "data": data}
        )
    for member, name in enumerate(names(job)):
        made += _jobset(job, name, member) if job.kind == "jobset" else _trainjob(job, name, member)
    return made


def _jobset(job: ClusterJob, name: str, member: int) -> list[Object]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(job, name),
            "spec": _set_of_pods(job, member),
        }
    ]


def _trainjob(job: ClusterJob, name: str, member: int) -> list[Object]:
    """A runtime of this job's own, as only that may have a podFailurePolicy, and the TrainJob."""
    api = "trainer.kubeflow.org/v1alpha1"
    template = _set_of_pods(job, member)
    [container] = template["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    trainer = {"numNodes": job.nodes, "image": job.image, "command": container.pop("command")}
    trainer |= {"resourcesPerNode": container.pop("resources")} if job.gpus else {}
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, name),
        "spec": {"mlPolicy": {"numNodes": job.nodes}, "template": {"spec": template}},
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    return [
        runtime,
        {
            "apiVersion": api,
            "kind": "TrainJob",
            "metadata": _metadata(job, name),
            "spec": {"runtimeRef": reference, "trainer": trainer},
        },
    ]


def _metadata(job: ClusterJob, name: str) -> Object:
    place = {} if job.namespace is None else {"namespace": job.namespace}
    return {"name": name, **place, "labels": {"app.kubernetes.io/name": "meshwright"}}


def _set_of_pods(job: ClusterJob, member: int) -> Object:
    """The spec of a JobSet of one job, whose pods are the nodes of a run.

    Pods that fail are made again by their job, `restarts` times a node, so the set itself never restarts.
    """
    only = {"containerName": NODE, "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**only, "values": list(FATAL)}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Count", "onExitCodes": {**only, "values": [REQUEUE]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.restarts * job.nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        **({} if job.seconds is None else {"activeDeadlineSeconds": job.seconds}),
        "template": {"spec": _pod(job, member)},
    }
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"} if job.kind == "trainjob" else None
    template = {"metadata": {"labels": labels}, "spec": spec} if labels else {"spec": spec}
    return {
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def _pod(job: ClusterJob, member: int) -> Object:
    """The spec of a node's pod."""
    claims = dict.fromkeys(source for source, _ in job.mounts)
    volumes: list[Object] = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(claims)
    ]
    places = list(claims)
    mounts = [
        {"name": f"volume-{places.index(source)}", "mountPath": target} for source, target in job.mounts
    ]
    # NCCL and snapshots of the state are in shared memory, of which a container has 64 MB otherwise.
    volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if job.run_text is not None:
        volumes.append({"name": "run", "configMap": {"name": job.name}})
        mounts.append({"name": "run", "mountPath": RUN_FOLDER})
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container: Object = {
        "name": NODE,
        "image": job.image,
        "command": _command(job, member),
        "env": [
            *({"name": name, "value": value} for name, value in job.environment),
            {"name": "POD_IP", "valueFrom": address},
        ],
        "volumeMounts": mounts,
    }
    if job.gpus:
        container["resources"] = {"limits": {GPU: job.ranks}}
    account = {} if job.service_account is None else {"serviceAccountName": job.service_account}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        **account,
        "containers": [container],
        "volumes": volumes,
        **_options(job),
    }


def _command(job: ClusterJob, member: int) -> list[str]:
    words = [word.replace("$(", "$$(") for word in job.train_words(member)]  # else Kubernetes fills them in
    name = names(job)[member]
    first = f"{name}-{NODE}-0-0.{name}"  # the first pod of the first job, in the subdomain of its set
    return words if job.nodes == 1 else [*words, *job.meeting_words(first), "--address", "$(POD_IP)"]


def _options(job: ClusterJob) -> Object:
    """The `options` of a job as further fields of its pods, whose values are YAML."""
    found: Object = {}
    for option in job.options:
        name, equals, text = option.partition("=")
        taken = name in ("restartPolicy", "containers", "volumes")
        if not equals or not name.isidentifier() or taken:
            raise UserError(
                f"--option: {option!r} is not a further field of a pod's spec; give such as "
                f"priorityClassName=high, or 'nodeSelector={{gpu: h100}}'"
            )
        try:
            found[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise UserError(f"--option: {option!r} has no YAML behind {name}= ({reason})") from None
    return found


def state_of(status: Mapping[str, Any]) -> State:
    """The state that the status of a TrainJob or of a JobSet tells."""
    conditions: Sequence[Mapping[str, str]] = status.get("conditions") or []
    true = {each["type"] for each in conditions if each.get("status") == "True"}
    if true & {"Complete", "Completed"}:
        return "done"
    if "Failed" in true:
        return "failed"
    jobs = status.get("replicatedJobsStatus") or status.get("jobsStatus") or []
    return "running" if any(each.get("ready") or each.get("active") for each in jobs) else "pending"


def _namespace(job: ClusterJob) -> list[str]:
    return [] if job.namespace is None else ["--namespace", job.namespace]
