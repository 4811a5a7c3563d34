"""Training steps on one device, written apart from what `meshwright verify` checks.

The whole batch at once, the plain decoder of `reference_decoder.py`, all logits, PyTorch's cross entropy,
autograd, and the optimiser and its learning rates as their papers state them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.spec.sections import TrainSpec
from meshwright.verify.reference_decoder import ReferenceDecoder, Routing
from meshwright.verify.reference_router import move_bias, router_losses, router_statistics
from meshwright.verify.reference_sums import ReferenceSums

ReferenceStep = dict[str, dict[str, Tensor]]
"""Results of one step: scalars and whole tensors in float64, by kind and name."""

SAMPLES = ("tokens", "targets", "positions", "documents")
"""Fields of a batch, each (n, T)."""

IGNORE = -100
"""The target of a token that is not predicted."""


def reference_steps(
    spec: RunSpec, weights: Mapping[str, Tensor], batches: Iterable[Batch]
) -> Iterator[ReferenceStep]:
    """Take an optimiser step on each batch; yields the samples, loss, gradients, gradient norm,
    parameters and moments, routers' statistics and biases after it, and the sums of each module.

    `weights` are the initial parameters and routers' biases (by default 0), with the names of
    `Decoder.tensors`; they are copied. Steps are computed on their device.
    """
    moe = spec.model.moe
    held = {name: weight.detach().clone() for name, weight in weights.items()}
    if moe is not None and moe.bias:
        for layer in filter(moe.has_experts, range(spec.model.layers)):
            bias = torch.zeros(moe.experts, device=held["embed.weight"].device)  # kept in fp32 by all
            held.setdefault(f"blocks.{layer}.mlp.router.bias", bias)
    biases = {name: weight for name, weight in held.items() if name.endswith(".router.bias")}
    parameters = {name: weight.requires_grad_() for name, weight in held.items() if name not in biases}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    decoder = ReferenceDecoder(spec.model, held)
    device = held["embed.weight"].device
    for number, batch in enumerate(batches, 1):
        moved, sums = batch.to(device), ReferenceSums()
        decoder.tap = sums.tap
        loss, objective, routings = loss_and_objective(decoder, moved)
        statistics: dict[str, Tensor] = {}
        for layer, routing in routings.items():
            assert moe is not None
            for name, value in router_statistics(moe, routing).items():
                statistics[f"blocks.{layer} {name}"] = value
        found = torch.autograd.grad(objective, list(parameters.values()))
        norm = torch.stack([grad.square().sum() for grad in found]).sum().sqrt()
        clip_factor = 1.0 if spec.train.clip is None else min(1.0, spec.train.clip / (float(norm) + 1e-6))
        for (name, parameter), grad in zip(parameters.items(), found, strict=True):
            adamw(parameter, grad * clip_factor, moments[name], spec.train, number)
        for layer, routing in routings.items():
            if moe is not None and moe.bias:
                move_bias(moe, routing, biases[f"blocks.{layer}.mlp.router.bias"])
        yield {
            "samples": {name: getattr(batch, name) for name in SAMPLES},
            **sums.tables,
            "loss": {"loss": loss.detach().cpu()},
            "gradient": dict(zip(parameters, found, strict=True)),
            "grad norm": {"grad norm": norm.cpu()},
            "parameter": {name: parameter.detach().clone() for name, parameter in parameters.items()},
            "exp_avg": {name: first.clone() for name, (first, _) in moments.items()},
            "exp_avg_sq": {name: second.clone() for name, (_, second) in moments.items()},
            "balance": statistics,
            "router bias": {name: bias.clone() for name, bias in biases.items()},
        }


def loss_and_objective(decoder: ReferenceDecoder, batch: Batch) -> tuple[Tensor, Tensor, dict[int, Routing]]:
    """The mean loss of a batch, that with the routers' losses, which is differentiated, and the routings."""
    logits, routings = decoder(batch.tokens, batch.positions, batch.documents)
    loss = objective = mean_loss(logits, batch.targets)
    for routing in routings.values():
        assert decoder.spec.moe is not None
        balance, z = router_losses(decoder.spec.moe, routing)
        objective = objective + decoder.spec.moe.aux_loss * balance + decoder.spec.moe.z_loss * z
    return loss, objective, routings


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) over the targets (n, T) that are predicted, a scalar; 0 without any."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / max(1, int((targets != IGNORE).sum()))


@torch.no_grad()
def adamw(
    parameter: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], train: TrainSpec, number: int
) -> None:
    """Algorithm 2 of Loshchilov & Hutter (2019), in place; vectors are not decayed."""
    first, second = moments
    first.mul_(train.beta1).add_(grad, alpha=1 - train.beta1)
    second.mul_(train.beta2).addcmul_(grad, grad, value=1 - train.beta2)
    corrected = first / (1 - train.beta1**number)
    root = (second / (1 - train.beta2**number)).sqrt()
    decay = train.weight_decay if parameter.ndim >= 2 else 0.0
    rate = rate_of_step(train, number)
    parameter.sub_(rate * (corrected / (root + train.eps) + decay * parameter))


def rate_of_step(train: TrainSpec, step: int) -> float:
    """Learning rate of optimiser step `step`, from 1, as the keys of `[train]` describe it.

    Linear warm-up to the peak; then half a cosine (Loshchilov & Hutter 2017) or, in the last steps, a line
    (Hu et al. 2024) down to `min_lr_ratio` of the peak, or the peak for ever.
    """
    exponent = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[train.lr_scaling]
    peak = train.lr * (train.batch_tokens / train.lr_base_batch_tokens) ** exponent
    total, warmup = train.total_steps, train.warmup_steps
    if warmup is None:
        warmup = max(1, round(0.02 * total))
    if step <= warmup:
        return peak * step / warmup
    lowest = peak * train.min_lr_ratio
    if train.schedule == "cosine":
        angle = math.pi * (step - warmup) / (total - warmup)
        return lowest + (peak - lowest) * (1 + math.cos(angle)) / 2
    if train.schedule == "wsd":
        falling = max(1, round(train.decay_fraction * total))
        return lowest + (peak - lowest) * min(1.0, (total - step) / falling)
    return peak
