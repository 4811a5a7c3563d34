"""Training steps on one device, written apart from what `meshwright verify` checks.

The whole batch at once, the plain decoder of `reference_decoder.py`, all logits, PyTorch's cross entropy,
autograd, and the optimiser and its learning rates as their papers state them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.spec.train import TrainSpec
from meshwright.verify.reference_adamw8bit import round_moments
from meshwright.verify.reference_batches import batch_sizes
from meshwright.verify.reference_clipping import ReferenceClipping, norm_of
from meshwright.verify.reference_decoder import ReferenceDecoder, Routing
from meshwright.verify.reference_distillation import Heads, ReferenceTeacher, distillation_loss
from meshwright.verify.reference_groups import factor_and_decay
from meshwright.verify.reference_low_precision import ReferenceLinears
from meshwright.verify.reference_rounding import stochastic
from meshwright.verify.reference_router import move_bias, router_losses, router_statistics
from meshwright.verify.reference_staleness import GradientQueue
from meshwright.verify.reference_sums import ReferenceSums

ReferenceStep = dict[str, dict[str, Tensor]]
"""Results of one step: scalars and whole tensors in float64, by kind and name."""

SAMPLES = ("tokens", "targets", "positions", "documents")
"""Fields of a batch, each (n, T)."""

IGNORE = -100
"""The target of a token that is not predicted."""


def reference_steps(
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    batches: Iterable[Batch],
    live: dict[str, Tensor] | None = None,
    teacher: ReferenceTeacher | None = None,
) -> Iterator[ReferenceStep]:
    """Take an optimiser step on each batch; yields the samples, loss, gradients, gradient norm,
    parameters, moments and averages, routers' statistics and biases after it, and the sums of each module.

    `weights` are the initial parameters and routers' biases (by default 0), with the names of
    `Decoder.tensors`; they are copied. Steps are computed on their device. `live` gets the parameters and
    biases themselves, which may be changed in place between two steps.
    """
    moe = spec.model.moe
    held = {name: weight.detach().clone() for name, weight in weights.items()}
    if moe is not None and moe.bias:
        for layer in filter(moe.has_experts, range(spec.model.layers)):
            bias = torch.zeros(moe.experts, device=held["embed.weight"].device)  # kept in fp32 by all
            held.setdefault(f"blocks.{layer}.mlp.router.bias", bias)
    biases = {name: weight for name, weight in held.items() if name.endswith(".router.bias")}
    parameters = {name: weight.requires_grad_() for name, weight in held.items() if name not in biases}
    moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in spec.train.moments}
    for name, parameter in parameters.items():
        for kind in spec.train.moments_of(name, parameter.ndim):
            moments[kind][name] = torch.zeros_like(parameter)
    if live is not None:
        live.update(held)
    averages = {name: weight.detach().clone() for name, weight in parameters.items() if spec.train.ema}
    linears, clipping = ReferenceLinears(spec), ReferenceClipping(spec.train)
    queue, updates = GradientQueue(spec), 0
    decoder = ReferenceDecoder(spec.model, held, linears=linears)
    device = held["embed.weight"].device
    for number, batch in enumerate(batches, 1):
        moved, sums = batch.to(device), ReferenceSums()
        linears.begin_step(int((batch.targets != IGNORE).sum()))
        decoder.tap = sums.tap
        loss, objective, routings = loss_and_objective(decoder, moved, teacher)
        statistics: dict[str, Tensor] = {}
        for layer, routing in routings.items():
            assert moe is not None
            for name, value in router_statistics(moe, routing).items():
                statistics[f"blocks.{layer} {name}"] = value
        found = torch.autograd.grad(objective, list(parameters.values()))
        due = queue.due(dict(zip(parameters, found, strict=True)))
        gradients = due or {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        clipped = clipping.clip(due) if due else {}
        updates += due is not None
        for name, parameter in parameters.items() if due else ():
            own = [kept[name] for kept in moments.values() if name in kept]
            factor, decay = factor_and_decay(spec, name, parameter.ndim)
            factor *= queue.rate_factor
            update(parameter, clipped[name], own, spec.train, number, factor, decay, updates)
            round_moments(moments, spec, name)
            if spec.precision.master == "bf16":
                parameter.data = stochastic(parameter, spec.train.seed, updates, name)
            if spec.train.ema is not None:
                averages[name] = averaged(averages[name], parameter.detach(), spec.train.ema)
        for layer, routing in routings.items():
            if moe is not None and moe.bias:
                move_bias(moe, routing.experts, biases[f"blocks.{layer}.mlp.router.bias"])
        linears.end_step()
        yield {
            "samples": {name: getattr(batch, name) for name in SAMPLES},
            **sums.tables,
            "loss": {"loss": loss.detach().cpu()},
            "gradient": gradients,
            "grad norm": {"grad norm": norm_of(gradients)},
            "parameter": {name: parameter.detach().clone() for name, parameter in parameters.items()},
            **{kind: {name: each.clone() for name, each in kept.items()} for kind, kept in moments.items()},
            **({"ema": dict(averages)} if averages else {}),
            "balance": statistics,
            "router bias": {name: bias.clone() for name, bias in biases.items()},
        }


def loss_and_objective(
    decoder: ReferenceDecoder, batch: Batch, teacher: ReferenceTeacher | None = None
) -> tuple[Tensor, Tensor, dict[int, Routing]]:
    """The mean loss of a batch, that with the routers' losses, which is differentiated, and the routings."""
    seen: dict[str, Tensor] = {}
    tap = decoder.tap

    def kept(path: str, x: Tensor) -> Tensor:
        seen[path] = tap(path, x)
        return seen[path]

    decoder.tap = kept if teacher is not None else tap
    logits, routings = decoder(batch.tokens, batch.positions, batch.documents)
    decoder.tap = tap
    loss = mean_loss(logits, batch.targets)
    if teacher is not None:
        student = Heads(logits, seen["head.norm"])
        taught = distillation_loss(teacher.how, student, teacher(batch), batch.targets)
        loss = (1 - teacher.how.weight) * loss + taught
    objective = loss
    for routing in routings.values():
        assert decoder.spec.moe is not None
        balance, z = router_losses(decoder.spec.moe, routing)
        objective = objective + decoder.spec.moe.aux_loss * balance + decoder.spec.moe.z_loss * z
    return loss, objective, routings


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) over the targets (n, T) that are predicted, a scalar; 0 without any."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / max(1, int((targets != IGNORE).sum()))


def averaged(average: Tensor, weights: Tensor, decay: float) -> Tensor:
    """The exponential moving average of the weights after a step (Polyak & Juditsky 1992)."""
    return decay * average + (1 - decay) * weights


@torch.no_grad()
def update(
    parameter: Tensor,
    grad: Tensor,
    moments: Sequence[Tensor],
    train: TrainSpec,
    number: int,
    factor: float = 1.0,
    decay: float | None = None,
    updates: int | None = None,
) -> None:
    """The step of the run's optimiser on one parameter, in place, at `factor` times the learning rate.

    By default each of the `number` steps was an update, matrices are decayed by `train.weight_decay`, and
    vectors are not.
    """
    if decay is None:
        decay = train.weight_decay if parameter.ndim >= 2 else 0.0
    rate = factor * rate_of_step(train, number)
    kind = "adamw" if len(moments) == 2 else train.optimiser
    direction = {"adamw": _adamw, "lion": _lion, "muon": _muon, "sgd": _sgd}[kind](
        grad, moments, train, number if updates is None else updates
    )
    parameter.sub_(rate * (direction + decay * parameter))


def _adamw(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """Algorithm 2 of Loshchilov & Hutter (2019): the direction of the step, without decay."""
    first, second = moments
    first.mul_(train.beta1).add_(grad, alpha=1 - train.beta1)
    second.mul_(train.beta2).addcmul_(grad, grad, value=1 - train.beta2)
    corrected = first / (1 - train.beta1**updates)
    return corrected / ((second / (1 - train.beta2**updates)).sqrt() + train.eps)


def _lion(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """Algorithm 2 of Chen et al. (2023): the direction of the step, without decay."""
    (momentum,) = moments
    direction = torch.sign(train.beta1 * momentum + (1 - train.beta1) * grad)
    momentum.mul_(train.beta2).add_(grad, alpha=1 - train.beta2)
    return direction


def _sgd(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """Heavy-ball momentum (Polyak 1964) in the form of Sutskever et al. (2013)."""
    (momentum,) = moments
    return momentum.mul_(train.beta1).add_(grad)


def _muon(grad: Tensor, moments: Sequence[Tensor], train: TrainSpec, updates: int) -> Tensor:
    """The step of matrices (..., r, c) by Jordan et al. (2024), in the scale of Liu et al. (2025), by an SVD.

    A Newton-Schulz step applies an odd polynomial to the singular values.
    """
    (momentum,) = moments
    momentum.mul_(train.beta1).add_(grad, alpha=1 - train.beta1)
    left, values, right = torch.linalg.svd(
        train.beta1 * momentum + (1 - train.beta1) * grad, full_matrices=False
    )
    values = values / (values.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return 0.2 * max(grad.shape[-2:]) ** 0.5 * (left * values.unsqueeze(-2)) @ right


def rate_of_step(train: TrainSpec, step: int) -> float:
    """Learning rate of optimiser step `step`, from 1, as the keys of `[train]` describe it.

    Linear warm-up to the peak; then half a cosine (Loshchilov & Hutter 2017) or a line down to `min_lr_ratio`
    of the peak, or in the last steps one of these or 1 - sqrt (Hu et al. 2024; Haegele et al. 2024), or the
    peak for ever. The peak is scaled with the step's own batch.
    """
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[train.lr_scaling]
    peak = train.lr
    if exponent:
        peak *= (next(islice(batch_sizes(train), step - 1, None)) / train.lr_base_batch_tokens) ** exponent
    total, warmup = train.total_steps, train.warmup_steps
    if warmup is None:
        warmup = max(1, round(0.02 * total))
    if step <= warmup:
        return peak * step / warmup
    lowest = peak * train.min_lr_ratio
    left = (total - step) / (total - warmup) if step < total else 0.0  # share of the fall that is to come
    form = str(train.schedule)
    if train.schedule == "wsd":
        form = train.decay
        left = min(1.0, (total - step) / max(1, round(train.decay_fraction * total)))
    if form == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    elif form == "1-sqrt":
        left = 1 - math.sqrt(1 - left)
    elif form == "constant":
        left = 1.0
    return lowest + (peak - lowest) * left
