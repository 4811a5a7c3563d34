"""Training steps on one device, written apart from what `meshwright verify` checks.

The whole batch at once, the plain decoder of `decoder.py`, all logits, PyTorch's cross entropy,
autograd, and the optimiser and its learning rates as their papers state them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import MoeSpec, RunSpec
from meshwright.verify.reference.clipping import norm_of
from meshwright.verify.reference.decoder import ReferenceDecoder, ReferenceRouting
from meshwright.verify.reference.groups import is_frozen
from meshwright.verify.reference.lora import ReferenceDropout
from meshwright.verify.reference.low_precision import ReferenceLinears
from meshwright.verify.reference.preference import ReferencePreference
from meshwright.verify.reference.router import move_bias, router_losses, router_statistics
from meshwright.verify.reference.sums import ReferenceSums
from meshwright.verify.reference.updates import ReferenceUpdates

ReferenceStep = dict[str, dict[str, Tensor]]
"""Results of one step: scalars and whole tensors in float64, by kind and name."""

SAMPLES = ("tokens", "targets", "positions", "documents")
"""Fields of a batch, each (n, T)."""

IGNORE = -100
"""The target of a token that is not predicted."""


class Heads(NamedTuple):
    """Logits (n, T, V) of a decoder, and the hidden states (n, T, D) that it makes them of."""

    logits: Tensor
    hidden: Tensor


Loss = Callable[[Batch, Heads, Tensor], Tensor]
"""(batch, heads, mean cross entropy) -> the loss of the model that is taken in its place."""


def reference_steps(
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    batches: Iterable[Batch],
    live: dict[str, Tensor] | None = None,
    other_loss: Loss | None = None,
) -> Iterator[ReferenceStep]:
    """Take an optimiser step on each batch; yields the samples, loss, gradients, gradient norm,
    parameters, moments and averages, routers' statistics and biases after it, and the sums of each module.

    `weights` are the initial parameters and routers' biases (by default 0), with the names of
    `Decoder.tensors`; they are copied. Steps are computed on their device. `live` gets the parameters and
    biases themselves, which may be changed in place between two steps. A run with [preference] has the loss
    of its pairs.
    """
    held = _held(spec, weights)
    if spec.preference is not None:
        other_loss = loss_of_pairs(spec, held)
    biases = {name: weight for name, weight in held.items() if name.endswith(".router.bias")}
    weights = {name: weight for name, weight in held.items() if name not in biases}
    parameters = {name: weights[name].requires_grad_() for name in weights if not is_frozen(spec, name)}
    if live is not None:
        live.update(held)
    linears, updates = ReferenceLinears(spec), ReferenceUpdates(spec, parameters)
    decoder = ReferenceDecoder(spec.model, held, linears=linears, lora=spec.lora)
    for number, batch in enumerate(batches, 1):
        moved, sums = batch.to(held["embed.weight"].device), ReferenceSums()
        linears.begin_step(int((batch.targets != IGNORE).sum()))
        decoder.tap = sums.tap
        if spec.lora is not None:
            decoder.drop = ReferenceDropout(spec.lora, spec.train.seed, updates.count, batch.slots)
        losses = losses_of(spec, decoder, moved, other_loss)
        found = torch.autograd.grad(losses.objective, list(parameters.values()))
        gradients = updates.take(number, dict(zip(parameters, found, strict=True)))
        _move_biases(spec.model.moe, losses.routings, parameters, biases)
        linears.end_step()
        yield {
            "samples": {name: getattr(batch, name) for name in SAMPLES},
            **sums.tables,
            "loss": {"loss": losses.mean.detach().cpu()},
            **({} if losses.further is None else {"further loss": {"loss": losses.further.detach().cpu()}}),
            "gradient": gradients,
            "grad norm": {"grad norm": norm_of(gradients)},
            "parameter": {name: weight.detach().clone() for name, weight in weights.items()},
            **{
                kind: {name: each.clone() for name, each in kept.items()}
                for kind, kept in updates.moments.items()
            },
            **({"ema": dict(updates.averages)} if updates.averages else {}),
            "balance": _statistics(spec, losses.routings),
            "router bias": {name: bias.clone() for name, bias in biases.items()},
        }


def loss_of_pairs(spec: RunSpec, weights: Mapping[str, Tensor]) -> Loss:
    """The loss of a run with [preference], whose initial weights, or the frozen ones of them, these are."""
    assert spec.preference is not None
    of_pairs = ReferencePreference(spec, spec.preference, weights)
    return lambda batch, heads, _cross_entropy: of_pairs(batch, heads.logits)


def _move_biases(
    moe: MoeSpec | None,
    routings: Mapping[int, ReferenceRouting],
    parameters: Mapping[str, Tensor],
    biases: Mapping[str, Tensor],
) -> None:
    """Move the biases of routers that are trained, by the load of their experts."""
    for layer, routing in routings.items():
        if moe is not None and moe.bias and f"blocks.{layer}.mlp.router.weight" in parameters:
            move_bias(moe, routing.experts, biases[f"blocks.{layer}.mlp.router.bias"])


def _held(spec: RunSpec, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the initial parameters and routers' biases."""
    moe, held = spec.model.moe, {name: weight.detach().clone() for name, weight in weights.items()}
    if moe is not None and moe.bias:
        for layer in filter(spec.model.has_experts, range(spec.model.layers + spec.model.mtp_num_layers)):
            bias = torch.zeros(moe.experts, device=held["embed.weight"].device)  # kept in fp32 by all
            held.setdefault(f"blocks.{layer}.mlp.router.bias", bias)
    return held


def _statistics(spec: RunSpec, routings: Mapping[int, ReferenceRouting]) -> dict[str, Tensor]:
    """Statistics of each layer's router, by name."""
    moe, found = spec.model.moe, dict[str, Tensor]()
    for layer, routing in routings.items():
        assert moe is not None
        for name, value in router_statistics(moe, routing).items():
            found[f"blocks.{layer} {name}"] = value
    return found


class Losses(NamedTuple):
    """The mean loss of a batch, the objective, which is differentiated, the routings, and the mean loss of
    the tokens after the next ones, where the model predicts them."""

    mean: Tensor
    objective: Tensor
    routings: dict[int, ReferenceRouting]
    further: Tensor | None


def losses_of(
    spec: RunSpec, decoder: ReferenceDecoder, batch: Batch, other_loss: Loss | None = None
) -> Losses:
    """The losses of a batch."""
    seen: dict[str, Tensor] = {}
    tap = decoder.tap

    def kept(path: str, x: Tensor) -> Tensor:
        seen[path] = tap(path, x)
        return seen[path]

    decoder.tap = kept if other_loss is not None else tap
    following = labels = None
    if spec.model.mtp_num_layers:
        following, labels = one_further(batch)
    logits, routings, beyond = decoder(batch.tokens, batch.positions, batch.documents, following)
    decoder.tap = tap
    loss = mean_loss(logits, batch.targets)
    if other_loss is not None:
        loss = other_loss(batch, Heads(logits, seen["head.norm"]), loss)
    objective = loss
    for routing in routings.values():
        assert decoder.spec.moe is not None
        balance, z = router_losses(decoder.spec.moe, routing)
        objective = objective + decoder.spec.moe.aux_loss * balance + decoder.spec.moe.z_loss * z
    if beyond is None or labels is None:
        return Losses(loss, objective, routings, None)
    further = mean_loss(beyond, labels)
    return Losses(loss, objective + spec.train.mtp_loss_scaling_factor * further, routings, further)


def one_further(batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens (n, T) after those of a batch, and the targets (n, T) after these: a target is that of the
    next place, if that is in the same document."""
    following, labels = batch.tokens.roll(-1, 1), batch.targets.roll(-1, 1)
    following[:, -1] = batch.targets[:, -1].clamp(min=0)
    labels[batch.documents.to(labels.device).diff(append=torch.full_like(labels[:, :1], -1)) != 0] = IGNORE
    return following, labels


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(target) over the targets (n, T) that are predicted, a scalar; 0 without any."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / max(1, int((targets != IGNORE).sum()))
