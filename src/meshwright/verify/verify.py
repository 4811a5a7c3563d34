"""Is a layout equal to one device? Loss, gradients, gradient norm, parameters after k steps, in float64.

The reference is written apart from what it checks: the whole batch at once, plain tensors, all logits,
PyTorch's cross entropy, and AdamW as its paper states it. It shares with the layout the decoder's modules,
the initial weights and the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.loader import Loader
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.router_balance import LayerBalance
from meshwright.parallel.waiting import while_others_wait
from meshwright.spec import RunSpec
from meshwright.spec.sections import TrainSpec
from meshwright.train.gather_full import gather_full
from meshwright.train.lr_schedule import learning_rate
from meshwright.train.step import Trainer
from meshwright.verify.narrow import narrow
from meshwright.verify.reference_router import RouterReference

TOLERANCE = 1e-10
FLOOR = 1e-4
"""A tensor whose largest reference value is below this share of its kind's largest is measured against that
share: some gradients are zero in mathematics and rounding noise in practice (a key bias, for one)."""


@dataclass
class Comparison:
    """Relative differences: max |a - b| / max |b| for each tensor, by kind and name."""

    relative: dict[tuple[str, str], float] = field(default_factory=dict)

    def add(self, kind: str, ours: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
        """Compare equally named tensors; a name on one side only counts as infinitely different."""
        largest = max(float(tensor.abs().max()) for tensor in reference.values())
        for name in sorted(ours.keys() | reference.keys()):
            key = (kind, name)
            if name not in ours or name not in reference or ours[name].shape != reference[name].shape:
                self.relative[key] = math.inf
                continue
            wanted = reference[name]
            scale = max(float(wanted.abs().max()), FLOOR * largest) or 1.0
            difference = float((ours[name] - wanted).abs().max()) / scale
            self.relative[key] = math.inf if math.isnan(difference) else difference

    def result(self) -> dict[str, object]:
        """The JSON object of `meshwright verify`, with one row for each kind."""
        by_kind: dict[str, list[tuple[float, str]]] = {}
        for (kind, name), value in self.relative.items():
            by_kind.setdefault(kind, []).append((value, name))
        rows: list[dict[str, Any]] = []
        for kind, values in by_kind.items():
            worst, name = max(values, key=itemgetter(0))
            rows.append({"kind": kind, "compared": len(values), "worst": worst, "name": name})
        overall = max(rows, key=itemgetter("worst"))
        return {
            "equal": overall["worst"] <= TOLERANCE,
            "worst_relative": overall["worst"],
            "worst_name": f"{overall['kind']}: {overall['name']}",
            "compared": len(self.relative),
            "tolerance": TOLERANCE,
            "rows": rows,
        }


def verify(spec: RunSpec, mesh: Mesh, steps: int) -> dict[str, object] | None:
    """Run `steps` steps of the layout and of one device side by side; the first rank gets the result.

    The samples are synthetic documents of the run's own length and packing. The precision is float64 whatever
    the spec says: what is checked is the layout, not rounding.
    """
    spec, note = narrow(_exact(spec, steps))
    corpus = open_corpus(spec)
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    first = mesh.control.rank == 0
    comparison = Comparison()
    reference = _reference(spec, corpus, mesh.device) if first else None
    loader = Loader(corpus, spec, mesh.data_rank, spec.layout.data_ranks)
    computed: list[ReferenceStep] = []
    for number in range(1, steps + 1):
        mesh.heartbeat.phase("data", number - 1)
        totals = trainer.totals(trainer.gradients(loader.step(number - 1)))
        gradients = gather_full(trainer.states.gradients(), mesh)
        for gradient in gradients.values():
            gradient.mul_(trainer.gradient_factor)
        done = trainer.apply(totals, number)
        parameters = gather_full(trainer.states.parameters(), mesh)
        balance = trainer.layers_balance()
        biases = gather_full(trainer.balance.biases().items(), mesh)
        mesh.heartbeat.phase("start")  # the hang watch sets no limit to this phase
        while_others_wait(mesh.control, first, lambda: computed.extend(islice(reference or (), 1)))
        if first:
            ours = {
                "loss": {"loss": torch.tensor(done.loss, dtype=torch.float64)},
                "gradient": gradients,
                "grad norm": {"grad norm": torch.tensor(done.grad_norm, dtype=torch.float64)},
                "parameter": parameters,
                "balance": _tensors(balance),
                "router bias": biases,
            }
            theirs = computed.pop()
            for kind, tensors in ours.items():
                if tensors:
                    comparison.add(f"step {number} {kind}", tensors, theirs[kind])
    loader.close()
    if not first:
        return None
    return {**comparison.result(), "narrowed": note, "layout": spec.layout.describe(), "steps": steps}


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
        logits = decoder(batch.tokens, batch.positions, batch.documents)
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
            "balance": {name: value for router in routers for name, value in router.found.items()},
            "router bias": {name: bias.clone() for name, bias in decoder.balance_biases().items()},
        }


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
