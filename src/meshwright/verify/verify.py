"""Is a layout equal to one device? Loss, gradients, gradient norm, parameters after k steps, in float64.

The reference (`reference/`) is written apart from what it checks, its initial weights and samples included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from meshwright.checkpoint.gather_full import gather_full
from meshwright.comm.mesh import Mesh
from meshwright.comm.waiting import while_others_wait
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.model.soft_targets import SoftTargetSource
from meshwright.parallel.router_balance import LayerBalance
from meshwright.spec import RunSpec
from meshwright.spec.batch_warmup import one_step_each
from meshwright.spec.precision import DELAYED
from meshwright.spec.tiling import tiled
from meshwright.train.guard.vote import Vote
from meshwright.train.parts import Sources
from meshwright.train.step import Trainer
from meshwright.verify.clip_factors import clip_factors
from meshwright.verify.compare import Comparison, Difference, axes_of
from meshwright.verify.drawn_models import DrawnModels, weights_of
from meshwright.verify.gather_state import gather_state
from meshwright.verify.held_out import reference_losses, validation_losses
from meshwright.verify.kinds import kinds_of_a_step, minuends
from meshwright.verify.learning_rates import learning_rates
from meshwright.verify.module_sums import ModuleSums, Row, differences
from meshwright.verify.narrow import narrow
from meshwright.verify.own_gradients import OwnGradients
from meshwright.verify.reference import run_steps
from meshwright.verify.reference.data import batches
from meshwright.verify.reference.groups import is_frozen
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.steps import ReferenceStep
from meshwright.verify.reference.sums import PHASES
from meshwright.verify.samples import compare_samples, gather_samples
from meshwright.verify.tiles import small_tiles
from meshwright.verify.uneven import thin

Reference = Callable[[RunSpec, torch.device], Iterator[ReferenceStep]]
"""Computes the steps of a run on one device."""


def verify(
    spec: RunSpec, mesh: Mesh, steps: int, reference: Reference | None = None
) -> dict[str, object] | None:
    """Run `steps` steps of the layout and of one device side by side; the first rank gets the result.

    The samples are synthetic documents of the run's own length and packing. The precision is float64 whatever
    the spec says: what is checked is the layout, not rounding. Tiles are so small that there are several.
    """
    small, note = narrow(exact(spec, steps))
    drawn = DrawnModels(spec, small)
    with tiled(small_tiles(small)):
        compute = reference or partial(one_device, drawn=drawn)
        return _side_by_side(small, mesh, steps, note, compute, drawn.soft_targets(mesh))


def _side_by_side(
    spec: RunSpec,
    mesh: Mesh,
    steps: int,
    note: str | None,
    compute: Reference,
    soft_targets: SoftTargetSource | None,
) -> dict[str, object] | None:
    corpus = open_corpus(spec)
    trainer = Trainer(spec, mesh, sources=Sources(soft_targets))
    trainer.initialise()
    initial = gather_full(trainer.states.parameters(), mesh)  # of equal names, those of the first replica
    vote, comparison = Vote(trainer), Comparison()
    reference = None
    if mesh.control.rank == 0:
        reference = compute(spec, mesh.device)
        weights = weights_of(spec, mesh.device)
        comparison.add(0, "initial weight", initial, weights)
        own_gradients = OwnGradients(spec, weights)
        comparison.add(0, "learning rate", *learning_rates(spec.train))
        comparison.add(0, "clipping", *clip_factors(trainer.clipping, spec.train))
    loader = Loader(corpus, spec, mesh.data_rank, spec.layout.data_ranks)
    computed: list[ReferenceStep] = []
    for number in range(1, steps + 1):
        mesh.heartbeat.phase("data", number - 1)
        batch = thin(loader.step(number - 1), number, spec)
        samples = gather_samples(batch, mesh)
        found, sums = _layout_step(trainer, batch, number)
        divergence = vote()
        mesh.heartbeat.phase("start")  # the hang watch sets no limit to this phase
        while_others_wait(
            mesh.control, reference is not None, lambda: computed.extend(islice(reference or (), 1))
        )
        if reference is None:
            continue
        wanted = computed.pop()
        due = own_gradients.step(number, found, wanted)
        comparison.note(
            number, "samples", compare_samples(number, samples, wanted["samples"], spec.at_step(number))
        )
        _compare_step(comparison, spec, number, found, sums, wanted, due)
        comparison.note(number, "frozen", _moved(spec, number, initial, found["parameter"]))
        drift = math.inf if divergence is not None else 0.0
        copies = Difference(number, "replicas", str(divergence or "all copies"), drift)
        comparison.note(number, "replicas", [copies])
    held_out: dict[str, Tensor] = {}
    if mesh.control.broadcast(comparison.first is None):  # text that was misread may not be computable
        held_out = validation_losses(trainer, loader.validation, mesh)
    loader.close()
    if reference is None:
        return None
    if held_out and spec.precision.compute not in DELAYED:
        losses = reference_losses(spec, wanted, ReferenceLinears(spec), mesh.device)
        comparison.add(steps, "validation loss", held_out, losses)
    verdict = comparison.result(axes_of(spec.layout, spec.microbatches))
    return {**verdict, "narrowed": note, "layout": spec.layout.describe(), "steps": steps}


def _compare_step(
    comparison: Comparison,
    spec: RunSpec,
    number: int,
    found: ReferenceStep,
    sums: list[tuple[list[int], list[Row]]],
    wanted: ReferenceStep,
    due: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Add the values of a step, kind by kind: `sums` of modules, and others that were `found` to what is
    `due`."""
    for kind in kinds_of_a_step(spec.train.moments):
        if kind in PHASES:
            first = spec.of_step_group().at_step(number)
            comparison.note(number, kind, differences(number, kind, sums, wanted, first))
        elif kind in wanted:  # optimisers have moments of their own
            comparison.add(number, kind, found[kind], due[kind], minuends(kind, wanted))


def _moved(
    spec: RunSpec, number: int, initial: dict[str, Tensor], found: dict[str, Tensor]
) -> Iterator[Difference]:
    """Compare parameters that are not trained with their initial values, to the bit."""
    for name, value in found.items():
        own = name.split("/")[-1]
        if is_frozen(spec, own):
            same = torch.equal(value, initial[own])
            yield Difference(number, "frozen", name, 0.0 if same else math.inf)


def _layout_step(
    trainer: Trainer, batch: Batch, number: int
) -> tuple[ReferenceStep, list[tuple[list[int], list[Row]]]]:
    """Take a step; the first rank gets its whole tensors and numbers by kind, and all ranks' sums."""
    mesh, states, own = trainer.run_mesh, trainer.states, trainer.prefix
    within = replace(batch, slots=batch.slots % trainer.spec.at_step(number).batch_sequences)
    with ModuleSums(trainer, within) as sums:
        loss = trainer.gradients(within)
    summed = trainer.sums(loss)
    factor = trainer.applied_factor
    gradients = gather_full(((f"{own}{name}", each) for name, each in states.gradients()), mesh)
    rows = sums.gathered()
    done = trainer.apply(summed, number)
    told = [own, factor, done.loss, done.grad_norm, done.further_loss]
    numbers = {own: rest for own, *rest in mesh.control.gather(told)}
    for name, gradient in gradients.items():
        own = next(own for own in numbers if name.startswith(own))
        gradient.mul_(numbers[own][0])
    found = {
        "loss": {f"{own}loss": _scalar(loss) for own, (_, loss, *_) in numbers.items()},
        "further loss": {
            f"{own}loss": _scalar(loss) for own, (*_, loss) in numbers.items() if loss is not None
        },
        "balance": _tensors(trainer.layers_balance()),
        "gradient": gradients,
        "grad norm": {f"{own}grad norm": _scalar(norm) for own, (_, _, norm, _) in numbers.items()},
        **gather_state(trainer),
    }
    return found, rows


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _tensors(balance: dict[int, LayerBalance]) -> dict[str, Tensor]:
    """Router statistics by name, as in `ReferenceStep`, as float64 vectors."""
    return {
        f"blocks.{layer} {name}": torch.tensor(value, dtype=torch.float64).reshape(-1)
        for layer, found in balance.items()
        for name, value in found._asdict().items()
    }


def exact(spec: RunSpec, steps: int) -> RunSpec:
    """Return the run in float64 and uncompiled, on synthetic documents, with at least `steps` steps.

    Stages of a warm-up of the batch have a step each: the first ones, so that `steps` steps reach the last.
    Products in low precision stay, of operands that are computed in float64.
    """
    tree = spec.to_json()
    if spec.precision.low:
        tree["precision"]["high"] = "fp64"
    else:
        kept = ("master", "qat", "qat_group")
        tree["precision"] = {"compute": "fp64"} | {key: tree["precision"][key] for key in kept}
    if spec.layout.bounds_dispatch:
        tree["layout"]["expert_buffer_factor"] = float(spec.layout.ep)  # few tokens are uneven: room for all
    data = {key: tree["data"][key] for key in ("seq_len", "pack", "document_mask", "format")}
    tree["data"] = {"corpus": "synthetic", **data}
    total = max(spec.train.total_steps, steps)
    tree["train"] |= {
        "compile": False,
        "cuda_graphs": False,
        "steps": total,
        "tokens": None,
        "epochs": None,
        "stop_at": None,
    }
    sizes = [size for size, _ in spec.train.batch_warmup]
    tree["train"]["batch_warmup"] = one_step_each(sizes[: max(1, steps - 1)])
    return RunSpec.model_validate(tree | spec.in_time(steps))


def one_device(
    spec: RunSpec, device: torch.device, drawn: DrawnModels | None = None
) -> Iterator[ReferenceStep]:
    """Compute the steps of the reference, on the device of the first rank, with `drawn` models' help."""
    thinned = (thin(batch, number, spec) for number, batch in enumerate(batches(spec), 1))
    loss = None if drawn is None else drawn.loss(device)
    return run_steps(spec, weights_of(spec, device), thinned, loss)
