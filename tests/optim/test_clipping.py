"""Limits of the gradient's norm: the papers' rules, their state in checkpoints, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from meshwright.comm.mesh import Mesh
from meshwright.optim.clipping import ZClip
from meshwright.spec import RunSpec, UserError
from meshwright.train.callbacks import Observers
from meshwright.train.open_run import open_run
from meshwright.train.step import Trainer
from ranks import Ranks
from small import sums_of_infinite_gradients
from training_runs import HALF, spec_of, start

ZCLIP: dict[str, object] = {"train__zclip": 0.5, "train__zclip_warmup": 3, "train__clip": "none"}


def test_a_spike_is_clipped_by_the_reciprocal_rule() -> None:
    """Worked by hand: warm-up of 1 and 3, mean 2 and deviation 1; z = 8 is clipped to 2 + 4 / 8."""
    clip = ZClip(threshold=2.0, alpha=0.75, warmup=2)
    assert clip.limit(1.0) == clip.limit(3.0) == math.inf
    assert clip.limit(10.0) == pytest.approx(2.5, rel=1e-5)
    mean = 0.75 * 2 + 0.25 * 2.5
    assert clip.state()["mean"] == pytest.approx(mean, rel=1e-5)
    assert clip.state()["variance"] == pytest.approx(0.75 + 0.25 * (2.5 - mean) ** 2, rel=1e-5)
    assert clip.limit(mean + 1.5) == math.inf
    again = ZClip(threshold=2.0, alpha=0.75, warmup=2)
    again.restore(json.loads(json.dumps(clip.state())))
    assert again.limit(20.0) == clip.limit(20.0) < 5


def third_factor(mesh: Mesh, spec: RunSpec) -> float:
    """The factor of a norm of 10 after norms of 1 and 3."""
    clipping = Trainer(spec, mesh).clipping
    return [clipping.factor(norm) for norm in (1.0, 3.0, 10.0)][-1]


def test_the_least_limit_holds(ranks: Ranks, corpus: Path) -> None:
    train = {"train__zclip": 2.0, "train__zclip_warmup": 2}
    for fixed, wanted in ((0.5, 0.5), (2.4, 2.4), (7.0, 2.5), ("none", 2.5)):
        spec = spec_of(corpus, **train, train__clip=fixed)
        assert ranks.run(spec.layout, third_factor, spec)[0] * 10.0 == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [pytest.param({"layout__dp": 2, "layout__zero": 2}, marks=pytest.mark.full), {"layout__pp": 2}],
)
def test_a_resume_goes_on_with_zclip_to_the_bit(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    def one(out: str, resume: str | None = None, **more: object) -> dict[str, Any]:
        flags = {"train__warmup_steps": 0, **ZCLIP, **layout, **more}
        return start(ranks, spec_of(corpus, **flags), tmp_path / out, resume)[0]

    whole, half = one("whole"), one("halves", train__stop_at=HALF)
    both, without = one("halves", "auto"), one("without", train__zclip="none", train__zclip_warmup=25)
    assert both["parameters_sha256"] == whole["parameters_sha256"] != half["parameters_sha256"]
    assert whole["parameters_sha256"] != without["parameters_sha256"]
    early = {"train__stop_at": 2}  # within the warm-up
    one("early", **early)
    assert one("early", "auto")["parameters_sha256"] == whole["parameters_sha256"]


def skipped(mesh: Mesh, spec: RunSpec) -> tuple[Any, Any]:
    """The state of ZClip before and after a step whose gradient is not finite."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    assert trainer.clipping.zclip is not None
    trainer.clipping.zclip.limit(1.0)
    before = trainer.clipping.zclip.state()
    assert not trainer.apply(sums_of_infinite_gradients(trainer), 1).applied
    return before, trainer.clipping.zclip.state()


def test_a_skipped_step_leaves_zclip_alone(ranks: Ranks, corpus: Path) -> None:
    spec = spec_of(corpus, **ZCLIP)
    before, after = ranks.run(spec.layout, skipped, spec)[0]
    assert before == after and before["norms"] == [1.0]


def resumed_with(mesh: Mesh, spec: RunSpec, out: Path) -> str:
    """The error of a run that resumes."""
    with pytest.raises(UserError) as raised:
        open_run(spec, mesh, out, Observers([])).execute("auto")
    return str(raised.value)


def test_another_limit_is_another_run(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    start(ranks, spec_of(corpus, **ZCLIP, train__stop_at=2), tmp_path)
    other = spec_of(corpus, **ZCLIP | {"train__zclip": 3})
    assert "train.zclip was 0.5 and is 3" in ranks.run(other.layout, resumed_with, other, tmp_path)[0]


def test_keys_of_zclip_need_it(corpus: Path) -> None:
    for key, value in (("zclip_warmup", 9), ("zclip_alpha", 0.5)):
        with pytest.raises(
            UserError, match=rf"train\.{key}: {value} has no effect with train.zclip = 'none'"
        ):
            spec_of(corpus, **{f"train__{key}": value})
