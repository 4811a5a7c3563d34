"""The answer to `meshwright fit`: which ways of training and serving a model fit GPUs of one node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.hardware import find as hardware
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.uncertainty import room
from meshwright.planner.fit.command import served_model
from meshwright.planner.fit.serving import ServingFit, serving_fits
from meshwright.planner.fit.training import TrainingFit, training_fit
from meshwright.planner.fit.ways import WAYS
from meshwright.planner.memory.host import host_room
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.load import Overrides
from meshwright.units import gigabytes, short

SEQUENCES = 16
"""Sequences of an optimiser step for each GPU, where no batch is given."""
LONG = 4096
"""Tokens of a sequence where none are given, unless the model knows fewer."""
_KINDS = ("cuda", "rocm")


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
        try:
            kind = hardware.cluster(self.gpu) if isinstance(self.gpu, str) else self.gpu
        except UserError as error:
            raise UserError(str(error).replace("cluster:", "--gpu:", 1)) from None
        if kind.device.kind not in _KINDS:
            raise UserError(f"--gpu: {kind.name} has {kind.device.name}, and not GPUs; give such as rtx-4090")
        if not 1 <= self.count <= kind.node:
            raise UserError(
                f"--count: {self.count} is not a number of GPUs of one node of {kind.name}; give 1 to "
                f"{kind.node}, and for more `meshwright plan --cluster {kind.name} --gpus N`"
            )
        return kind.resized(self.count)

    def room_of_host(self, cluster: Cluster) -> float | None:
        """Bytes of the host's memory for these GPUs together; None where they are not known."""
        if self.host_memory is not None:
            return self.host_memory
        share = host_room(cluster)
        return None if share is None else self.count * share

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
            (problem,), _ = (asked if has_batch else replace(asked, batch_tokens=sequences * LONG)).problems()
            length = min(problem.base.data.seq_len, LONG)
            asked = replace(asked, seq_len=length)
        return asked if has_batch else replace(asked, batch_tokens=sequences * length)


@dataclass(frozen=True)
class Fits:
    """How each way of training and serving a model fits some GPUs."""

    model: ModelSpec
    cluster: Cluster
    seq_len: int
    training: tuple[TrainingFit, ...]
    serving: tuple[ServingFit, ...]

    @property
    def room(self) -> float:
        """Bytes of a GPU."""
        return room(self.cluster)

    @property
    def best(self) -> TrainingFit | None:
        """The first way of training, from all weights to adapters of a quantised base, that fits as plans do,
        or else more likely than not."""
        sure = (each for each in self.training if each.fits and each.probability >= 0.9)
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
            return f"{told}no way of training fits"
        assert best.plan is not None
        low, high = (f"{size / 1e9:.3g}" for size in best.interval)
        host = f", with {gigabytes(best.host_bytes)} of host memory" if best.host_bytes else ""
        return (
            f"{told}{best.way.title} fits at {best.plan.spec.data.seq_len:,} tokens, "
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
    # what a layout takes of the host is told beside it, also where that is too much
    boundless = replace(cluster, device=replace(cluster.device, host_memory=None))
    asked = request.planned(boundless)
    training = tuple(training_fit(way, asked, request.room_of_host(cluster)) for way in WAYS)
    problem = next((each.problem for each in training if each.problem is not None), None)
    if problem is None:
        raise UserError(training[0].reason or "no way of training can be had")
    base = problem.base
    folder = served_model(asked)
    serving = serving_fits(base.model, CostModel(cluster), request.batch, base.data.seq_len, folder)
    return Fits(base.model, cluster, base.data.seq_len, training, tuple(serving))
