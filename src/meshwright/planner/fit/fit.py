"""The answer to `meshwright fit`: which ways of training and serving a model fit GPUs of one node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.hardware import find as hardware
from meshwright.hardware.catalogue import ALIASES
from meshwright.hardware.cluster import GPUS, Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.fit.command import served_model
from meshwright.planner.fit.published import PublishedWeights, other_format, published_weights
from meshwright.planner.fit.serving import ServingFit, serving_fits
from meshwright.planner.fit.training import TrainingFit, training_fit
from meshwright.planner.fit.vllm import UTILIZATION
from meshwright.planner.fit.ways import WAYS
from meshwright.planner.memory.host import with_host_room
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.errors import did_you_mean
from meshwright.spec.load import Overrides
from meshwright.spec.model_names import REPOSITORIES, is_trainable
from meshwright.spec.parameters import parameters
from meshwright.units import gigabytes, short

SEQUENCES = 16
"""Sequences of an optimiser step for each GPU, where no batch is given."""
_LIKELY = 0.9
"""Probability from which a way is said to fit."""
LONG = 4096
"""Tokens of a sequence where none are given, unless the model knows fewer."""


@dataclass(frozen=True)
class FitRequest:
    """A request for the ways in which a model fits `count` GPUs of one node.

    `model` is what `PlanRequest` takes, `gpu` a name of the catalogue, a hardware file or a `Cluster`;
    `seq_len` are tokens of a sequence, trained on or served; `batch` sequences are served at a time on a
    replica, and `host_memory` are bytes of the node's memory, for moments that are kept there; the default
    is the catalogue's share of these GPUs.
    """

    model: str | Path | RunSpec
    gpu: str | Cluster
    count: int = 1
    seq_len: int | None = None
    batch: int = 1
    host_memory: float | None = None
    overrides: Overrides = ()

    def cluster(self) -> Cluster:
        """The GPUs. Raises `UserError`."""
        kind = _cluster_named(self.gpu) if isinstance(self.gpu, str) else self.gpu
        if kind.device.kind not in GPUS:
            raise UserError(
                f"--gpu: {kind.name} has no GPUs, which fit is about; give such as rtx-4090, or ask "
                f"`meshwright plan --cluster {kind.name}`"
            )
        if not 1 <= self.count <= kind.node:
            raise UserError(
                f"--count: {self.count} is not a number of GPUs of one node of {kind.name}; give 1 to "
                f"{kind.node}, and for more `meshwright plan --cluster {kind.name} --gpus N`"
            )
        found = kind.resized(self.count)
        return found if self.host_memory is None else with_host_room(found, self.host_memory)

    def planned(self, cluster: Cluster) -> PlanRequest:
        """The request for a layout, with a length and a batch. Raises `UserError`."""
        if self.batch < 1:
            raise UserError(f"--batch: must be at least 1 sequence, got {self.batch}")
        asked = PlanRequest(
            self.model, cluster, gpus=self.count, seq_len=self.seq_len, overrides=self.overrides
        )
        length, sequences = self.seq_len or asked.given_in("data").get("seq_len"), self.count * SEQUENCES
        has_batch = "batch_tokens" in asked.given_in("train")
        if length is None:
            others = tuple(each for each in self.overrides if each[0] != "train.batch_tokens")
            (problem,), _ = replace(asked, batch_tokens=sequences * LONG, overrides=others).problems()
            length = min(problem.base.data.seq_len, LONG)
            asked = replace(asked, seq_len=length)
        return asked if has_batch else replace(asked, batch_tokens=sequences * length)


def _cluster_named(name: str) -> Cluster:
    """The cluster of a name or a hardware file. Raises `UserError`."""
    is_file = name.endswith(".json") or Path(name).is_file()
    if not is_file and not hardware.is_catalogued(name):
        gpus = [key for key, each in hardware.catalogue().items() if each.device.kind in GPUS]
        hint = did_you_mean(name.lower(), [*gpus, *ALIASES]) or f"; the names are {', '.join(gpus)}"
        raise UserError(
            f"--gpu: '{name}' is neither a name of the catalogue nor a hardware file{hint}; for another GPU "
            f"put its figures into what `meshwright clusters rtx-4090 --json > gpu.json` writes, and give it"
        )
    try:
        return hardware.cluster(name)
    except UserError as error:
        raise UserError(str(error).replace("cluster:", "--gpu:", 1)) from None


@dataclass(frozen=True)
class Fits:
    """How each way of training and serving a model fits some GPUs."""

    model: ModelSpec
    cluster: Cluster
    seq_len: int
    training: tuple[TrainingFit, ...]
    serving: tuple[ServingFit, ...]
    name: str = ""
    """The name that the model was asked for by; empty where that is a file or a folder."""

    @property
    def published(self) -> str | None:
        """The repository on the hub with trained weights of the model: the one that was asked for, or that
        its preset is of."""
        if self.is_named and is_trainable(self.name):
            return self.name
        return next(iter(REPOSITORIES.get(self.model.preset or "", ())), None)

    @property
    def is_named(self) -> bool:
        """True if the model was asked for by another name than its preset's: its positions may be others."""
        return self.name not in ("", self.model.preset)

    @property
    def other_format(self) -> str | None:
        """The format of an HF folder's weights that none of the rows is in."""
        return other_format(self.model)

    @property
    def routed_parameters(self) -> int:
        """Parameters of routed experts."""
        listed = (each for unit in parameters(self.model).values() for each in unit)
        return sum(each.size for each in listed if each.expert)

    @property
    def published_weights(self) -> PublishedWeights | None:
        """The model's weights in blocks of 4 or 8 bits, where it is published so."""
        return published_weights(self.model)

    @property
    def utilization(self) -> float:
        """Share of a GPU's memory that serving may fill."""
        return UTILIZATION

    @property
    def room(self) -> float:
        """Bytes of a GPU."""
        return room(self.cluster)

    @property
    def best(self) -> TrainingFit | None:
        """The first way of training, from all weights to adapters of a quantised base, that fits as plans do,
        or else more likely than not."""
        sure = (each for each in self.training if each.fits and each.probability >= _LIKELY)
        return next(sure, None) or next((each for each in self.training if each.fits), None)

    @property
    def advice(self) -> str:
        """The best way to train it, in one sentence."""
        model = self.model.preset or self.model.hf or self.model.family
        told = f"{model} ({short(self.model.parameters)} parameters) on {self.cluster.in_words}: "
        first, best = self.training[0], self.best
        if first is not best and first.plan is not None:
            need = f"{gigabytes(first.plan.memory.device)} of {gigabytes(self.room)}"
            verb = "may fit, and may not" if first.fits else "does not fit"
            told += f"{first.way.title} {verb} (needs {need}); "
        if best is None:
            needs = {each.way.title: each.plan.memory.device for each in self.training if each.plan}
            least = min(needs, key=needs.__getitem__, default=None)
            need = f"; {least} needs least, {gigabytes(needs[least])}" if least else ""
            return f"{told}no way of training fits{need}"
        assert best.plan is not None
        low, high = (f"{size / 1e9:.3g}" for size in best.interval)
        host = f", with {gigabytes(best.host_bytes)} of host memory" if best.host_bytes else ""
        verb = "fits" if best.probability >= _LIKELY else "may fit"
        return (
            f"{told}{best.way.title} {verb} at {best.plan.spec.data.seq_len:,} tokens, "
            f"{gigabytes(best.plan.memory.device)} ({low} to {high}), {best.probability:.0%}{host}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `meshwright fit --json`."""
        return {
            "advice": self.advice,
            "model": self.model.preset or self.model.hf or self.model.family,
            "parameters": self.model.parameters,
            "device": self.cluster.device.name,
            "count": self.cluster.count,
            "room": self.room,
            "seq_len": self.seq_len,
            "best": self.best and self.best.way.name,
            "training": [each.to_json() for each in self.training],
            "serving": [each.to_json() for each in self.serving],
        }


def fit(request: FitRequest) -> Fits:
    """How each way of training and serving a model fits some GPUs. Raises `UserError`, also where no way of
    training can be had at all."""
    cluster = request.cluster()
    asked = request.planned(cluster)
    training = tuple(training_fit(way, asked) for way in WAYS)
    problem = next((each.problem for each in training if each.problem is not None), None)
    if problem is None:
        raise UserError(training[0].reason or "no way of training can be had")
    base = problem.base
    folder = served_model(asked)
    serving = serving_fits(base.model, CostModel(cluster), request.batch, base.data.seq_len, folder)
    is_file = isinstance(request.model, RunSpec) or bool(asked.run_file) or base.model.preset is None
    name = "" if is_file else str(request.model)
    return Fits(base.model, cluster, base.data.seq_len, training, tuple(serving), name)
