"""Is a layout equal to one device? Loss, gradients, gradient norm, parameters after k steps, in float64.

The reference (`reference.py`) is written apart from what it checks. It shares with the layout the initial
weights and the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from meshwright.data.corpus import Corpus, open_corpus
from meshwright.data.loader import Loader
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.router_balance import LayerBalance
from meshwright.spec import RunSpec
from meshwright.train.gather_full import gather_full
from meshwright.train.step import Trainer
from meshwright.verify.narrow import narrow
from meshwright.verify.reference import ReferenceStep, reference_steps

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
    for number in range(1, steps + 1):
        totals = trainer.totals(trainer.gradients(loader.step(number - 1)))
        gradients = gather_full(trainer.states.gradients(), mesh)
        for gradient in gradients.values():
            gradient.mul_(trainer.gradient_factor)
        done = trainer.apply(totals, number)
        parameters = gather_full(trainer.states.parameters(), mesh)
        balance = trainer.layers_balance()
        biases = gather_full(trainer.balance.biases().items(), mesh)
        if reference is not None:
            ours = {
                "loss": {"loss": torch.tensor(done.loss, dtype=torch.float64)},
                "gradient": gradients,
                "grad norm": {"grad norm": torch.tensor(done.grad_norm, dtype=torch.float64)},
                "parameter": parameters,
                "balance": _tensors(balance),
                "router bias": biases,
            }
            theirs = next(reference)
            for kind, tensors in ours.items():
                if tensors:
                    comparison.add(f"step {number} {kind}", tensors, theirs[kind])
    loader.close()
    if not first:
        return None
    return {**comparison.result(), "narrowed": note, "layout": spec.layout.describe(), "steps": steps}


def _tensors(balance: dict[int, LayerBalance]) -> dict[str, Tensor]:
    """Router statistics by name, as in `ReferenceStep`, as float64 vectors."""
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


def _reference(spec: RunSpec, corpus: Corpus, device: torch.device) -> Iterator[ReferenceStep]:
    decoder = init_whole_(Decoder(spec.model).to(device=device, dtype=torch.float64), spec.train.seed)
    with closing(Loader(corpus, spec, 0, 1)) as loader:
        batches = map(loader.step, range(spec.train.total_steps))
        yield from reference_steps(spec, decoder.tensors(), batches)
