"""Is a layout equal to one device? Loss, gradients, gradient norm, parameters after k steps, in float64.

The reference is written apart from what it checks: the whole batch at once, plain tensors, all logits,
PyTorch's cross entropy, and AdamW as its paper states it. It shares with the layout the decoder's modules,
the initial weights and the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.router_balance import LayerBalance
from meshwright.spec import RunSpec
from meshwright.spec.sections import TrainSpec
from meshwright.train.gather_full import gather_full
from meshwright.train.lr_schedule import learning_rate
from meshwright.train.step import Trainer
from meshwright.train.vote import Vote
from meshwright.verify.compare import Comparison, Difference, axes_of
from meshwright.verify.module_sums import PHASES, ModuleSums, ReferenceSums, Row, differences
from meshwright.verify.narrow import narrow
from meshwright.verify.reference_router import RouterReference


def verify(spec: RunSpec, mesh: Mesh, steps: int) -> dict[str, object] | None:
    """Run `steps` steps of the layout and of one device side by side; the first rank gets the result.

    The samples are synthetic documents of the run's own length and packing. The precision is float64 whatever
    the spec says: what is checked is the layout, not rounding.
    """
    spec, note = narrow(_exact(spec, steps))
    corpus = open_corpus(spec)
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    reference = _reference(spec, corpus, mesh.device) if mesh.control.rank == 0 else None
    loader = Loader(corpus, spec, mesh.data_rank, spec.layout.data_ranks)
    vote, comparison = Vote(trainer), Comparison()
    for number in range(1, steps + 1):
        found, sums = _layout_step(trainer, loader.step(number - 1), number)
        divergence = vote()
        if reference is None:
            continue
        wanted = next(reference)
        for kind in KINDS:
            if kind in PHASES:
                comparison.note(number, kind, differences(number, kind, sums, wanted, spec))
            elif found[kind]:
                comparison.add(number, kind, found[kind], wanted[kind])
        drift = math.inf if divergence is not None else 0.0
        comparison.note(number, "replicas", [Difference(number, "replicas", str(divergence), drift)])
    loader.close()
    if reference is None:
        return None
    verdict = comparison.result(axes_of(spec.layout, spec.microbatches))
    return {**verdict, "narrowed": note, "layout": spec.layout.describe(), "steps": steps}


KINDS = (
    "forward", "loss", "backward", "balance", "gradient", "grad norm",
    "router bias", "parameter", "exp_avg", "exp_avg_sq",
)  # fmt: skip
"""The kinds of values that are compared in each step, in the order in which a step computes them."""


def _layout_step(
    trainer: Trainer, batch: Batch, number: int
) -> tuple[ReferenceStep, list[tuple[list[int], list[Row]]]]:
    """Take a step; the first rank gets its whole tensors and numbers by kind, and all ranks' sums."""
    mesh, states = trainer.mesh, trainer.states
    with ModuleSums(trainer, batch) as sums:
        loss = trainer.gradients(batch)
    totals = trainer.totals(loss)
    gradients = gather_full(states.gradients(), mesh)
    for gradient in gradients.values():
        gradient.mul_(trainer.gradient_factor)
    rows = sums.gathered()
    done = trainer.apply(totals, number)
    moments = gather_full(trainer.optimiser.tensors(), mesh)
    found = {
        "loss": {"loss": torch.tensor(done.loss, dtype=torch.float64)},
        "balance": _tensors(trainer.layers_balance()),
        "gradient": gradients,
        "grad norm": {"grad norm": torch.tensor(done.grad_norm, dtype=torch.float64)},
        "router bias": gather_full(trainer.balance.biases().items(), mesh),
        "parameter": gather_full(states.parameters(), mesh),
    }
    for key, moment in moments.items():
        kind, _, name = key.partition("/")
        found.setdefault(kind, {})[name] = moment
    return found, rows


def _tensors(balance: dict[int, LayerBalance]) -> dict[str, Tensor]:
    """Router statistics by name, as in `RouterReference.found`, as float64 vectors."""
    return {
        f"blocks.{layer} {name}": torch.tensor(value, dtype=torch.float64).reshape(-1)
        for layer, found in balance.items()
        for name, value in found._asdict().items()
    }


def _exact(spec: RunSpec, steps: int) -> RunSpec:
    tree = spec.to_json()
    tree["precision"] = {"compute": "fp64"}
    kept = {key: tree["data"][key] for key in ("seq_len", "pack", "document_mask")}
    tree["data"] = {"corpus": "synthetic", **kept}
    total = max(spec.train.total_steps, steps)
    tree["train"] |= {"compile": False, "steps": total, "tokens": None, "stop_at": None}
    return RunSpec.model_validate(tree)


ReferenceStep = dict[str, dict[str, Tensor]]
"""Results of one device: scalars and whole tensors in float64, by kind and name."""


def _reference(spec: RunSpec, corpus: Corpus, device: torch.device) -> Iterator[ReferenceStep]:
    decoder = Decoder(spec.model).to(device=device, dtype=torch.float64)
    init_whole_(decoder, spec.train.seed)
    parameters = dict(decoder.named_parameters())
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    loader = Loader(corpus, spec, 0, 1)
    for number in range(1, spec.train.total_steps + 1):
        decoder.zero_grad()
        batch = loader.step(number - 1).to(device)
        routers = [RouterReference(layer, mixture) for layer, mixture in decoder.each_mixture()]
        sums = ReferenceSums()
        handles = [
            module.register_forward_hook(partial(_tap, sums, name))
            for name, module in decoder.named_modules()
        ]
        logits = decoder(batch.tokens, batch.positions, batch.documents)
        for handle in handles:
            handle.remove()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        (loss + sum(router.loss(len(batch.tokens)) for router in routers)).backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        norm = torch.sqrt(torch.stack([grad.square().sum() for grad in gradients.values()]).sum())
        clip_factor = 1.0 if spec.train.clip is None else min(1.0, spec.train.clip / (float(norm) + 1e-6))
        for name, parameter in parameters.items():
            _adamw(parameter, gradients[name] * clip_factor, moments[name], spec.train, number)
        for router in routers:
            router.move_bias()
        yield {
            "loss": {"loss": loss.detach().cpu()},
            "gradient": gradients,
            "grad norm": {"grad norm": norm.cpu()},
            "parameter": {name: parameter.detach().clone() for name, parameter in parameters.items()},
            **sums.tables,
            "exp_avg": {name: first.clone() for name, (first, _) in moments.items()},
            "exp_avg_sq": {name: second.clone() for name, (_, second) in moments.items()},
            "balance": {name: value for router in routers for name, value in router.found.items()},
            "router bias": {name: bias.clone() for name, bias in decoder.balance_biases().items()},
        }


def _tap(sums: ReferenceSums, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        sums.tap(name, output)


@torch.no_grad()
def _adamw(
    parameter: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], train: TrainSpec, number: int
) -> None:
    """Algorithm 2 of Loshchilov & Hutter (2019), in place; vectors are not decayed."""
    first, second = moments
    rate = learning_rate(train, number)
    first.mul_(train.beta1).add_(grad, alpha=1 - train.beta1)
    second.mul_(train.beta2).addcmul_(grad, grad, value=1 - train.beta2)
    corrected = first / (1 - train.beta1**number)
    root = (second / (1 - train.beta2**number)).sqrt()
    decay = train.weight_decay if parameter.ndim >= 2 else 0.0
    parameter.sub_(rate * (corrected / (root + train.eps) + decay * parameter))
