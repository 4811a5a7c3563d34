"""A layout for a run that sizes no axis: planned for the machine that it starts on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshwright.hardware import find as hardware
from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.explain.candidate import TIE
from meshwright.planner.explain.explanation import describe
from meshwright.planner.memory.exact import memory_model
from meshwright.planner.plan import Plan, Plans, plan
from meshwright.planner.search.request import PlanRequest
from meshwright.rank.env import count_devices, fit_layout, nproc_of, resolve, sets_layout
from meshwright.spec import RunSpec, UserError
from meshwright.spec.load import Overrides, from_tree
from meshwright.spec.other_models import other_models
from meshwright.units import gigabytes, short


def this_machine() -> tuple[str, Cluster | None]:
    """The name of this machine's first GPU, or else of its processor, and what is known of it unmeasured: the
    catalogue's cluster of such GPUs, None for others, or a host with so many cores."""
    from meshwright.hardware.catalogue import cluster_of_gpu, host
    from meshwright.host import cores
    from meshwright.profile import machine

    if not machine.gpus():
        name = machine.processor()
        return name, host(name, cores(), machine.host_memory())
    import torch

    name = torch.cuda.get_device_name(0)
    return name, cluster_of_gpu(name)


def present() -> Cluster:
    """This machine, by what its GPUs are called, or as a host with so many cores; not measured. Raises
    `UserError`."""
    name, cluster = this_machine()
    if cluster is None:
        raise UserError(
            f"layout: no axis is sized, and the GPU '{name}' is not in the catalogue to plan for it; give "
            f"layout.dp, or --cluster FILE as `meshwright profile` writes it"
        )
    return cluster


def check_room(spec: RunSpec) -> None:
    """Refuse a run whose ranks need more than this host's memory together. Raises `UserError`."""
    from meshwright.profile import machine

    if machine.gpus():  # each rank has a device's memory to itself, and finds out
        return
    layout, room = spec.layout, machine.host_memory()
    each = memory_model(CostModel(present().resized(layout.world_size))).ranks(spec)
    total = sum(rank.device for rank in each) * layout.world_size / layout.pp
    for other in other_models(spec).values():
        copies = 1 if other.layout.zero == 3 else other.layout.data_ranks * other.layout.cp
        total += 4.0 * other.model.parameters * copies
    if total > room:
        ranks = f"{layout.world_size} rank{'s' * (layout.world_size > 1)}"
        raise UserError(
            f"layout: {ranks} of a model of {short(spec.model.parameters)} parameters need "
            f"{gigabytes(total)} together, but this host or container has {gigabytes(room)}; "
            f"{leaner(spec, room / layout.world_size)}"
        )


def leaner(spec: RunSpec, most: float) -> str:
    """Return in words the fastest layout and recomputation that need at most `most` bytes on each of as many
    ranks, by the plan for this machine; where there is none, what else would help."""
    request = PlanRequest(spec, present(), gpus=spec.layout.world_size, top=1, max_memory=most)
    try:
        best = plan(request).best
    except UserError:  # it says which devices would do, and not what to change in the run
        return "a smaller model, shorter sequences or more hosts would work"
    return f"{describe(best.spec)} would need {gigabytes(best.memory.device)} a rank by the plan"


def planned(
    tree: dict[str, Any],
    overrides: Overrides = (),
    nproc: str | int | None = None,
    source: str = "",
    on: str | None = None,
    check: Callable[[RunSpec], None] = lambda spec: None,
) -> tuple[RunSpec, str | None]:
    """The spec of a run, and in one line why it has its layout; None where the run sizes an axis itself.

    `nproc` is a number of ranks, or None or 'auto' for all devices of this machine or any power of two of
    them. `on` is a hardware file, or a cluster's name, to plan for; by default this machine, by its GPUs or
    its cores. `check` may refuse the run before anything is planned. Raises `UserError`.
    """
    if sets_layout(tree, overrides):
        return resolve(tree, overrides, nproc, source), None
    alone = from_tree(tree, fit_layout(tree, overrides, 1), source)
    check(alone)
    cluster = hardware.cluster(on) if on else present()
    if nproc is None or nproc == "auto":
        devices = count_devices()
        sizes = sorted({devices, *(1 << power for power in range(devices.bit_length()))})
    else:
        sizes = [nproc_of(nproc)]
    if sizes == [1]:
        return alone, None
    for table, uncounted in alone.uncounted_tables.items():
        raise UserError(
            f"layout: no axis is sized, and a plan for this machine would not count {uncounted} ([{table}]); "
            f"give the run's own layout, such as layout.dp = 1"
        )
    wanted = [*_fixed(tree, alone), *overrides]
    found: list[Plans] = []
    problem: UserError | None = None
    for ranks in sizes:
        try:
            found.append(plan(PlanRequest(alone, cluster, gpus=ranks, top=2, overrides=wanted)))
        except UserError as error:  # other numbers of ranks may do
            problem = error
    if not found:
        raise problem or UserError("layout: nothing is planned for no ranks; give --nproc 1 or more")
    best = min((plans.best for plans in found), key=lambda each: each.step_seconds)
    others = [each for plans in found for each in plans.plans if each is not best]
    chosen = {"layout": best.spec.layout.model_dump(), "recompute": best.spec.recompute.model_dump()}
    return RunSpec.model_validate({**alone.to_json(), **chosen}), _why(best, others)


def _fixed(tree: dict[str, Any], alone: RunSpec) -> list[tuple[str, str]]:
    """Return layout and recomputation keys that the run file sets, as flags that are kept unchanged."""
    fixed = [(f"layout.{key}", str(getattr(alone.layout, key))) for key in tree.get("layout") or {}]
    return fixed + ([("recompute.policy", alone.recompute.policy)] if tree.get("recompute") else [])


def _why(best: Plan, others: list[Plan]) -> str:
    """Return in one line what is planned for which devices, and how much slower the next best plan is."""
    ranks, device = best.spec.layout.world_size, best.cluster.device
    where = f"{ranks} x" if device.kind != "cpu" else f"{ranks} process{'es' * (ranks > 1)} on"
    why = (
        f"layout: {describe(best.spec)}; planned for {where} {device.name}: {best.step_seconds:.3g} s a step"
    )
    if others:
        second = min(others, key=lambda each: each.step_seconds)
        more = second.step_seconds / best.step_seconds - 1
        slower = "as fast" if abs(more) < TIE else f"{more:.1%} slower"
        if more <= -TIE:
            slower = f"{-more:.1%} faster, but less simple"
        why += f"; next is {describe(second.spec)}, {slower}"
    return why
