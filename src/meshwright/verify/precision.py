"""Is a layout in its own precision, compiled as it runs, one device but for rounding?

Each step of the reference begins at the layout's own parameters, as gathered and rounded to the format that
it computes in: so rounding does not pile up. Gradients are compared with the float64 ones there, within what
rounding was measured to do (`rounding.py`); the update with AdamW of the layout's own gradients; compute
copies with the masters, to the bit; and a step of fp16 that overflows must change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.checkpoint.gather_full import gather_full
from meshwright.comm.mesh import Mesh
from meshwright.comm.waiting import while_others_wait
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader, SplitReader
from meshwright.host import cores
from meshwright.parallel.precision import formats
from meshwright.spec import RunSpec
from meshwright.spec.eight_bit import blocks_of
from meshwright.spec.precision import DELAYED
from meshwright.spec.tiling import tiled
from meshwright.train.guard.vote import Vote
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult
from meshwright.verify.gather_state import State, gather_state
from meshwright.verify.held_out import reference_losses, validation_losses
from meshwright.verify.kinds import phrase
from meshwright.verify.measured import MARGIN, Measurements, compare_gradients
from meshwright.verify.narrow import narrow
from meshwright.verify.reference.adamw8bit import settled
from meshwright.verify.reference.clipping import ReferenceClipping
from meshwright.verify.reference.data import batches
from meshwright.verify.reference.groups import factor_and_decay, is_frozen, multiplies
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.optimisers import update
from meshwright.verify.reference.rounding import stochastic
from meshwright.verify.reference.router import move_bias
from meshwright.verify.reference.steps import SAMPLES
from meshwright.verify.reference.updates import averaged
from meshwright.verify.reference.weights import initial_weights
from meshwright.verify.rounding import exact_gradients, rounded_gradients
from meshwright.verify.routing import ChosenExperts, Found, compare_routing
from meshwright.verify.routing import whole as whole_routing
from meshwright.verify.samples import compare_samples, gather_samples
from meshwright.verify.skipped import Unchanged, infinite_gradient, loss_scales
from meshwright.verify.tiles import small_tiles
from meshwright.verify.uneven import thin
from meshwright.verify.verify import exact

DRAWS = 4
"""Times that a step is computed with other roundings; twice as many with fewer than `FEW_TOKENS` tokens."""

FEW_TOKENS = 1024
"""With fewer tokens rounding moves all gradients by about as much as the least tolerance of their common
slope, so that a spread which so few draws happen to show too small would be a false alarm."""

MOST_WORK = 1e10
"""Parameters x tokens of a step that are checked as they are: less than in float64, since each step is
computed so many times."""

SLOWER = 10
"""How many times as long a product takes whose operands are rounded to few bits, in small models."""

LEAST_TOKENS = 2048
"""Tokens of a step of a narrowed copy at least: with fewer, chance moves the slope of all gradients more."""

MOST_WORK_OF_ONE, LEAST_TOKENS_OF_ONE = 1e9, 1024
"""Both of them for the step behind those in float64, which takes about as long as one of these."""

MASTER_TOLERANCE = 1e-5
"""For what is computed in the format of the masters, element by element."""

ROUTED_LOSS = 1e-3
"""Relative tolerance of the validation loss of a model with experts, since it is not known which its tokens
chose."""

OVERFLOWING = 2.0**60
"""A loss scale at which a gradient in fp16 is beyond its range."""


class _Taken(NamedTuple):
    """A step of the layout, with its whole gradients on rank 0, each rank's stale compute copies, and the
    experts that its tokens chose."""

    done: StepResult
    gradients: dict[str, Tensor]
    stale: list[list[str]]
    chosen: Found


def verify_in_own_precision(
    spec: RunSpec, mesh: Mesh, steps: int, last_only: bool = False
) -> dict[str, object] | None:
    """Run `steps` steps of the layout in the run's precision; the first rank gets the result.

    With `last_only` loss and gradients are compared in the last step alone, which is the run's last, of a
    copy that is narrower: most of the time goes into their reference.
    """
    tree = exact(spec, steps).to_json()
    tree["precision"] = spec.to_json()["precision"]
    tree["train"]["compile"] = spec.train.compile
    if tree["lora"] is not None:  # what is dropped is compared in float64
        tree["lora"]["dropout"] = 0.0
    if last_only:  # the last step is the run's last, too
        warmup = spec.train.warmup_steps
        tree["train"] |= {"steps": steps, "warmup_steps": warmup and min(warmup, steps - 1)}
        if spec.model.moe is not None:  # they are exact in all formats, and drown the loss's own gradient
            tree["model"]["moe"] |= {"aux_loss": 0.0, "z_loss": 0.0}
    most, least = (MOST_WORK_OF_ONE, LEAST_TOKENS_OF_ONE) if last_only else (MOST_WORK, LEAST_TOKENS)
    most /= SLOWER if spec.precision.low else 1
    own, note = narrow(RunSpec.model_validate(tree), most, least)
    with tiled(small_tiles(own)):
        found = _Comparison(own, mesh).steps(steps, last_only and own.precision.compute not in DELAYED)
    if mesh.rank:
        return None
    about = {"precision": own.precision.compute, "layout": own.layout.describe(), "steps": steps}
    return {**found.result(), "narrowed": note, **about}


class _Comparison:
    """One rank's part of the comparison."""

    def __init__(self, spec: RunSpec, mesh: Mesh) -> None:
        self.spec, self.mesh, self.found = spec, mesh, Measurements()
        self.linears = ReferenceLinears(spec)
        self.trainer = Trainer(spec, mesh)
        self.trainer.initialise()
        self.trainer.compile_stages(evaluate=False)
        self.forced = spec.model.moe is not None and not spec.train.compile
        """True if it is known which experts tokens choose, since nothing is seen inside compiled blocks."""
        self.rounding_of_loss = 0.0
        """The largest difference that rounding was measured to make of the loss, relative to it."""
        self.vote, self.clipping = Vote(self.trainer), ReferenceClipping(spec.train)
        self.state = gather_state(self.trainer)
        if mesh.rank == 0:
            master, compute = spec.precision.master, formats(spec.precision).compute
            drawn = initial_weights(spec.model, spec.train.seed, master, spec.lora, compute)
            drawn |= {name: each.to(compute) for name, each in drawn.items() if is_frozen(spec, name)}
            words = "step 0: the initial value of {} differs"
            self.found.close(0, "initial weight", self.state["parameter"], drawn, MASTER_TOLERANCE, words)
            if self.trainer.loss_scale.dynamic:
                scales, words = loss_scales(spec.precision), "the loss scale after {} differs"
                self.found.close(0, "loss scale", *scales, 0.0, words)

    def steps(self, steps: int, last_only: bool = False) -> Measurements:
        """Compare `steps` steps, the validation loss after them, and a step that must be skipped."""
        spec, mesh = self.spec, self.mesh
        loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
        whole: Iterator[Batch] = batches(spec) if mesh.rank == 0 else iter(())
        for number in range(1, steps + 1):
            mesh.heartbeat.phase("data", number - 1)
            batch = thin(loader.step(number - 1), number, spec)
            samples = gather_samples(batch, mesh)
            taken = self._take(batch, number)
            before, self.state = self.state, gather_state(self.trainer)
            divergence = self.vote()
            mesh.heartbeat.phase("start")  # the hang watch sets no limit to this phase
            of_gradients = not last_only or number == steps
            compare = partial(self._compare, number, whole, samples, taken, before, of_gradients)
            while_others_wait(mesh.control, mesh.rank == 0, compare)
            drift = 0.0 if divergence is None else math.inf
            name = str(divergence or "all copies")
            self.found.add(number, "replicas", name, drift, 0.0, f"step {number}: {name}")
        if mesh.control.broadcast(not any(each.fails for each in self.found.found)):
            self._end(steps, batch, loader.validation)
        loader.close()
        return self.found

    def _end(self, steps: int, batch: Batch, reader: SplitReader) -> None:
        """Compare the validation loss after so many steps, and a step that must be skipped."""
        mesh = self.mesh
        held_out = validation_losses(self.trainer, reader, mesh)
        mesh.heartbeat.phase("start")
        while_others_wait(mesh.control, mesh.rank == 0, partial(self._compare_validation, steps, held_out))
        if self.trainer.loss_scale.dynamic:
            self.trainer.loss_scale.value = OVERFLOWING
        self._attempt(batch, steps + 1, infinite=True)

    def _take(self, batch: Batch, number: int) -> _Taken:
        """Take a step; with a loss scale that is too high, the one after it is halved often enough."""
        while True:
            taken = self._attempt(batch, number)
            if taken.done.applied or self.trainer.loss_scale.value >= taken.done.loss_scale:
                return taken

    def _attempt(self, batch: Batch, number: int, infinite: bool = False) -> _Taken:
        """Take a step, or with an `infinite` gradient none; a step that is skipped must change nothing."""
        trainer, mesh = self.trainer, self.mesh
        before = Unchanged(trainer) if infinite or trainer.loss_scale.dynamic else None
        experts = ChosenExperts(trainer)
        wrong = infinite_gradient(trainer) if infinite and not trainer.loss_scale.dynamic else nullcontext()
        with wrong, experts if self.forced else nullcontext():
            loss = trainer.gradients(batch)
        chosen = experts.gathered() if self.forced else []
        stale = mesh.control.gather(sorted(stale_copies(trainer)))
        gradients = gather_full(trainer.states.gradients(), mesh)
        gradients = {name: grad.double() * trainer.gradient_factor for name, grad in gradients.items()}
        done = trainer.apply(trainer.sums(loss), number)
        if before is not None and not done.applied:
            own = before.changes()
            if trainer.loss_scale.value >= done.loss_scale > 1:
                own.append("did not lower the loss scale")
            self._note_skip(number, own)
        elif infinite:
            self._note_skip(number, ["was taken"])
        return _Taken(done, gradients, stale, chosen)

    def _note_skip(self, number: int, wrong: list[str]) -> None:
        every = self.mesh.control.gather(wrong) or []
        rank = next((rank for rank, each in enumerate(every) if each), None)
        if rank is None:
            self.found.add(number, "skipped step", "all states", 0.0, 0.0, "")
            return
        words = f"step {number}: a step with a gradient that is not finite must be skipped"
        words += ", and the loss scale halved" if self.trainer.loss_scale.dynamic else ""
        words += f"; on rank {rank} it {every[rank][0]}"
        self.found.add(number, "skipped step", every[rank][0], math.inf, 0.0, words)

    def _compare(
        self,
        number: int,
        whole: Iterator[Batch],
        samples: list[tuple[int, list[str]]],
        taken: _Taken,
        before: State,
        of_gradients: bool,
    ) -> None:
        """Compare a step on the first rank, with the next of the `whole` batches."""
        spec, found = self.spec, self.found
        batch = thin(next(whole), number, spec)
        fields = {name: getattr(batch, name) for name in SAMPLES}
        for each in compare_samples(number, samples, fields, spec.at_step(number)):
            words = f"step {number}: the {each.name} of the samples differ {each.detail}".rstrip()
            found.add(number, "samples", each.name, each.relative, 0.0, words)
        if not any(taken.stale):
            found.add(number, "compute copy", "all copies", 0.0, 0.0, "")
        for rank, names in enumerate(taken.stale):
            for name in names:
                words = f"step {number}: the compute copy of {name} on rank {rank} is not its rounded master"
                found.add(number, "compute copy", name, math.inf, 0.0, words)
        chosen = whole_routing(taken.chosen, spec.at_step(number))
        if of_gradients:
            self._compare_gradients(number, batch, taken, before, chosen)
        self._compare_update(number, taken, before)
        self._compare_biases(number, chosen, before)

    def _compare_gradients(
        self, number: int, batch: Batch, taken: _Taken, before: State, chosen: dict[int, Tensor]
    ) -> None:
        """Compare the loss, the choice of experts and the gradients of the whole `batch`."""
        spec, found, compute = self.spec, self.found, formats(self.spec.precision).compute
        for layer in [layer for layer, experts in chosen.items() if bool((experts < 0).any())]:
            words = f"step {number}: ranks chose different experts for a token in layer {layer}"
            found.add(number, "routing", f"blocks.{layer}.mlp.router", math.inf, 0.0, words)
            del chosen[layer]
        weights = {**_rounded(before["parameter"], compute), **before["router bias"]}
        moved = batch.to(self.mesh.device)
        chosen = {layer: experts.to(self.mesh.device) for layer, experts in chosen.items()}
        true = exact_gradients(spec, weights, moved, self.linears, chosen)
        scale = taken.done.loss_scale
        count = DRAWS if spec.train.batch_tokens >= FEW_TOKENS else 2 * DRAWS
        seeds = range(2 * DRAWS * number, 2 * DRAWS * number + count)
        draw = partial(rounded_gradients, spec, weights, moved, self.linears, scale, chosen)
        with ThreadPoolExecutor(min(count, cores())) as threads:  # the other ranks wait
            draws = list(threads.map(draw, seeds))
        self.linears.end_step()
        eps = torch.finfo(compute).eps
        size = abs(true.loss) or 1.0
        self.rounding_of_loss = max(abs(draw.loss - true.loss) for draw in draws) / size
        off, tolerance = abs(taken.done.loss - true.loss) / size, self._tolerance_of_loss
        words = f"step {number}: the loss is off by {off:.1e}; rounding explains {tolerance:.1e}"
        found.add(number, "loss", "loss", off, tolerance, words)
        if spec.model.moe is not None and chosen:
            compare_routing(found, number, spec.model.moe, before["router bias"], true, draws)
        coarsest = max(eps, torch.finfo(formats(spec.precision).reduce).eps)
        compare_gradients(found, number, taken.gradients, true, draws, coarsest)

    @property
    def _tolerance_of_loss(self) -> float:
        compute = formats(self.spec.precision).compute
        eps = torch.finfo(compute).eps
        return max(MARGIN * self.rounding_of_loss, eps / 4 if compute.itemsize == 2 else 4 * eps)

    def _compare_biases(self, number: int, chosen: dict[int, Tensor], before: State) -> None:
        """Compare the routers' biases with those that the choice of experts moves them to."""
        moe = self.spec.model.moe
        if moe is None or not moe.bias or not chosen:
            return
        wanted = {name: bias.clone() for name, bias in before["router bias"].items()}
        for layer, experts in chosen.items():
            if not is_frozen(self.spec, f"blocks.{layer}.mlp.router.weight"):
                move_bias(moe, experts, wanted[f"blocks.{layer}.mlp.router.bias"])
        words = f"step {number}: {{}} is not that of the experts' loads"
        self.found.close(number, "router bias", self.state["router bias"], wanted, MASTER_TOLERANCE, words)

    def _compare_validation(self, number: int, held_out: dict[str, Tensor]) -> None:
        """Compare the validation loss; where tokens may have chosen other experts, within `ROUTED_LOSS`."""
        spec, compute = self.spec, formats(self.spec.precision).compute
        if not held_out or spec.precision.compute in DELAYED:
            return
        kinds = ("parameter", "ema", "router bias")
        weights = {kind: _rounded(self.state[kind], compute) for kind in kinds if kind in self.state}
        weights["router bias"] = self.state["router bias"]
        wanted = reference_losses(spec, weights, self.linears, self.mesh.device)
        tolerance = max(self._tolerance_of_loss, ROUTED_LOSS if spec.model.moe is not None else 0.0)
        words = f"step {number}: the validation {{}} differs; rounding explains {tolerance:.1e}"
        self.found.close(number, "validation loss", held_out, wanted, tolerance, words)

    def _compare_update(self, number: int, taken: _Taken, before: State) -> None:
        """Compare the norm, the moments and the parameters with those of the layout's own gradients."""
        spec, found = self.spec, self.found
        grads = taken.gradients
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        off = abs(taken.done.grad_norm / norm - 1) if norm else taken.done.grad_norm
        words = f"step {number}: the norm is {taken.done.grad_norm:.6g}, that of the gradients {norm:.6g}"
        found.add(number, "grad norm", "grad norm", off, MASTER_TOLERANCE, words)
        clipped = self.clipping.clip(grads)
        wanted: State = {kind: {} for kind in (*spec.train.moments, "parameter")}
        for name, grad in clipped.items():
            target = before["parameter"][name].double().clone()
            kinds = spec.train.moments_of(name, grad.ndim)
            moments = {kind: before[kind][name].double() for kind in kinds}
            groups = factor_and_decay(spec, name, grad.ndim)
            update(target, grad, [*moments.values()], spec.train, number, *groups)
            if spec.train.optimiser_kind.eight_bit and multiplies(name, grad.ndim):
                moments = {kind: self._as_held(kind, name, moment) for kind, moment in moments.items()}
            for kind, tensor in {**moments, "parameter": target}.items():
                wanted[kind][name] = tensor
        for kind in spec.train.moments:
            words = f"step {number}: {phrase(kind)} is not that of its gradients"
            found.close(number, kind, self.state[kind], wanted[kind], MASTER_TOLERANCE, words)
        if spec.train.ema is not None:
            pairs = (
                (name, each.double(), self.state["parameter"][name]) for name, each in before["ema"].items()
            )
            averages = {name: averaged(each, end.double(), spec.train.ema) for name, each, end in pairs}
            words = f"step {number}: the moving average of {{}} is not that of its weights"
            found.close(number, "ema", self.state["ema"], averages, MASTER_TOLERANCE, words)
        for name in self.state["parameter"].keys() - clipped.keys():
            words = f"step {number}: {name}, which is not trained, has changed"
            same = torch.equal(before["parameter"][name], self.state["parameter"][name])
            found.add(number, "frozen", name, 0.0 if same else math.inf, 0.0, words)
        for name, target in wanted["parameter"].items():
            start, end = before["parameter"][name].double(), self.state["parameter"][name].double()
            moved = float((target - start).abs().max()) or 1.0
            eps = torch.finfo(formats(spec.precision).exact).eps
            tolerance = 1e-3 + 2 * eps * float(start.abs().max()) / moved
            low = high = target
            if spec.precision.master == "bf16":  # some draws round what is so near to different neighbours
                slack = tolerance * moved
                low, high = (stochastic(target + by, spec.train.seed, number, name) for by in (-slack, slack))
            off = float(torch.maximum(low - end, end - high).clamp(min=0).max()) / moved
            words = f"step {number}: the update of {name} is not that of its gradient ({off:.1e} off)"
            found.add(number, "parameter", name, off, tolerance, words)

    def _as_held(self, kind: str, name: str, moment: Tensor) -> Tensor:
        """A moment rounded to 8 bits; where two values are as near, the one that the layout holds."""
        held, block = self.state[kind][name].double(), blocks_of(self.spec)[name]
        return settled(held, moment, kind == "exp_avg", block, MASTER_TOLERANCE)


def _rounded(tensors: Mapping[str, Tensor], compute: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(compute) for name, tensor in tensors.items()}


def stale_copies(trainer: Trainer) -> Iterator[str]:
    """Names of parameters whose compute copy, as the last step used it, is not the rounding of this rank's
    part of the master; copies that the step has freed again, or that were gathered in 8 bits, are not looked
    at."""
    in_8_bits = trainer.spec.precision.fp8_gather
    for unit in trainer.states.units:
        if unit.aliased or not unit.ready:
            continue
        rank = unit.shards.rank if unit.shards else 0
        for slot in unit.slots:
            if slot.rows and not (in_8_bits and slot.rounded):
                own = unit.parameters[slot.key].narrow(slot.dim, rank * slot.part[slot.dim], slot.rows)
                if not torch.equal(own, unit.values(slot).to(own.dtype)):
                    yield slot.key
