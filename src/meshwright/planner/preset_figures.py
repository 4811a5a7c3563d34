"""Memory and tokens a second of training each named model on one device, by the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.hardware.cluster import Cluster
from meshwright.planner.memory.states import states
from meshwright.planner.plan import Plan
from meshwright.planner.search.request import PlanRequest
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.presets import PRESETS

SEQ_LEN, SEQUENCES = 1024, 16
"""Tokens of a sequence, which no preset's positions are fewer than, and sequences of a step."""
SIZES = "layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab_size", "max_seq_len"
"""Fields of a model that are listed beside its figures."""


@dataclass(frozen=True)
class PresetFigures:
    """Figures of a preset on one device."""

    preset: str
    model: ModelSpec
    state_bytes: int
    """Bytes of weights, gradients and AdamW's moments, computed in bf16 with fp32 sums, on any device."""
    plan: Plan | None
    """The fastest step on the device; None where no step fits it, or the device is not known."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; tokens a second are predicted, and within their interval in 9 of 10 cases."""
        model, plan = self.model, self.plan
        figures: dict[str, Any] = {"preset": self.preset, "parameters": model.parameters}
        figures |= {"active": model.active_parameters, **{size: getattr(model, size) for size in SIZES}}
        figures |= {"state_bytes": self.state_bytes, "step_bytes": None, "tokens_per_second": None}
        if plan is not None:
            tokens = plan.spec.train.batch_tokens
            figures |= {
                "step_bytes": plan.memory.device,
                "tokens_per_second": plan.tokens_per_second,
                "tokens_per_second_interval": [tokens / seconds for seconds in reversed(plan.interval)],
                "micro_batch": plan.spec.micro_batch,
                "recompute": plan.spec.recompute.policy,
            }
        return figures


def preset_figures(cluster: Cluster | None) -> list[PresetFigures]:
    """The figures of each preset on one device of a cluster, in a step of `SEQUENCES` sequences of `SEQ_LEN`.

    Without a cluster there are no plans. The device computes in bf16, a processor in fp32.
    """
    return [_figures(name, cluster) for name in PRESETS]


def _figures(name: str, cluster: Cluster | None) -> PresetFigures:
    batch = SEQUENCES * SEQ_LEN
    tables = {
        "model": {"preset": name},
        "data": {"seq_len": SEQ_LEN},
        "train": {"batch_tokens": batch},
        "layout": {"micro_batch": 1},
        "precision": {"compute": "bf16"},
    }
    spec = RunSpec.model_validate(tables)
    plan = None
    if cluster is not None:
        request = PlanRequest(name, cluster, gpus=1, seq_len=SEQ_LEN, batch_tokens=batch)
        (problem,), _ = request.problems()
        found = problem.search(1).preferred  # `plan` would look for what is least, too, where nothing fits
        plan = Plan(found.spec, problem.costs) if found else None
    return PresetFigures(name, spec.model, states(spec).total, plan)
