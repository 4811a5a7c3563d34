"""Layouts of a sweep: a covering array of the choices that a run allows on some ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from meshwright.planner.layout_levels import POLICIES
from meshwright.planner.layout_space import LayoutSpace
from meshwright.spec import RunSpec, UserError
from meshwright.verify.covering import Case, Pairs
from meshwright.verify.narrow import narrow_for_all

SIZES = ("replicate", "dp", "tp", "cp", "pp", "ep", "etp")
"""Axes of a layout."""


class SweepLayouts:
    """The layouts of `ranks` ranks that a run allows, and the order in which a sweep checks some of them.

    The first `needed` of the order are a greedy covering array of layouts that take little time: every two
    choices that some layout makes together are made by one of these. Each combination of sizes that is not
    among them has a layout after them. Layouts are those of the narrowed copy `small`. Raises `UserError` if
    there are none.
    """

    def __init__(self, spec: RunSpec, ranks: int) -> None:
        self.small, self.note = narrow_for_all(spec, ranks)
        self.cases = list(_cases(self.small, ranks))
        if self.note is not None:
            allowed = {_without_batch(case) for case in _cases(spec, ranks)}
            self.cases = [case for case in self.cases if _without_batch(case) in allowed]
        if not self.cases:
            raise UserError(
                f"--sweep: no layout of {ranks} ranks fits the run; give another number, such as "
                f"{next(fewer for fewer in range(ranks - 1, 0, -1) if any(_cases(self.small, fewer)))}"
            )
        self.pairs = Pairs(self.cases)
        self.order = self.pairs.covering(costs=[_cost(self.small, case) for case in self.cases])
        self.needed = len(self.order)
        seen = {_sizes(self.cases[number]) for number in self.order}
        others: dict[tuple[object, ...], list[int]] = {}
        for number, case in enumerate(self.cases):
            if (sizes := _sizes(case)) not in seen:
                others.setdefault(sizes, []).append(number)
        self.order += [random.Random(str(sizes)).choice(each) for sizes, each in others.items()]

    def run(self, place: int) -> RunSpec:
        """Return the narrowed run with the layout at a place of the order."""
        case = dict(self.cases[self.order[place]])
        policy = str(case.pop("policy"))
        del case["microbatches"]  # follows from the others
        tree = self.small.to_json()
        tree["layout"] |= case
        if policy != self.small.recompute.policy:
            tree["recompute"] = POLICIES[policy].model_dump(mode="json")
        return RunSpec.model_validate(tree)


def describe(spec: RunSpec) -> str:
    """Return a run's layout in one line, with the choices that `Layout.describe` leaves out."""
    layout, policy = spec.layout, spec.recompute.policy
    words = [layout.describe()]
    words += [layout.context_mode] if layout.cp > 1 else []
    words += ["sequence_parallel=false"] if layout.tp > 1 and not layout.sequence_parallel else []
    words += [f"micro_batch={spec.micro_batch}"]
    words += [f"recompute={policy}"] if policy != "none" else []
    return ", ".join(words)


def _sizes(case: Case) -> tuple[object, ...]:
    return tuple(case[name] for name in SIZES)


def _without_batch(case: Case) -> tuple[object, ...]:
    """Return the choices but for those that depend on the batch, which is narrowed."""
    return tuple(value for name, value in case.items() if name not in ("micro_batch", "microbatches"))


def _cost(spec: RunSpec, case: dict[str, Any]) -> float:
    """About how long a layout takes, in units of a block and a microbatch on one rank.

    What does not depend on these numbers, and the shares of recomputation and of attention to the keys in
    parts, were measured with narrowed copies on 8 ranks of two cores.
    """
    computing = case["tp"] * case["cp"] * spec.batch_sequences // case["micro_batch"]
    parts = 1 if case["context_mode"] == "ulysses" else case["cp"]
    again = 1.0 if case["policy"] == "none" else 1.3
    return 40 + spec.model.layers * computing * again * (1 + 0.15 * (parts - 1))


def _cases(spec: RunSpec, ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the choices of each legal layout; the order of axes and how blocks are cut stay as they are."""
    cut = spec.layout.stages if isinstance(spec.layout.stages, str) else "even"
    layout = spec.layout
    parts, factor = layout.expert_parts, layout.expert_buffer_factor
    fixed = {"order": layout.order, "stages": cut, "expert_parts": parts, "expert_buffer_factor": factor}
    space = LayoutSpace(spec, ranks, fixed)
    folds = space.experts(ranks)
    for inner in space.inner():
        for ep, etp in folds:
            for mesh in space.meshes(inner, ep, etp):
                microbatches = spec.batch_sequences // (inner.micro_batch * mesh.data)
                if microbatches > 2 * mesh.pp:
                    continue  # more take long, and a pipeline has a steady state with these
                for sharding in space.shardings(inner, mesh):
                    for split in space.cuts(mesh.pp):
                        yield {
                            "replicate": sharding.replicate,
                            "dp": mesh.data // sharding.replicate,
                            "tp": inner.tp,
                            "cp": inner.cp,
                            "pp": mesh.pp,
                            "ep": ep,
                            "etp": etp,
                            "zero": sharding.zero,
                            "sequence_parallel": inner.sequence_parallel,
                            "context_mode": inner.context_mode,
                            "schedule": split.schedule,
                            "virtual": split.chunks if mesh.pp > 1 else None,
                            "micro_batch": inner.micro_batch,
                            "microbatches": "several" if microbatches > 1 else "one",
                            "policy": inner.recompute.policy,
                        }
