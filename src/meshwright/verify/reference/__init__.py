"""Training steps of one device, written apart from what `meshwright verify` checks.

`steps.py` takes them. The model is in `decoder.py`, `rope.py`, `router.py`, `low_precision.py`,
`rounding.py`, `lora.py`, `quantised_base.py`, `sums.py`, `soft_targets.py` and `preference.py`. `weights.py`
has what it starts from, `data.py` with `chats.py`, `pairs.py` and `hashes.py` what it reads, `batches.py` and
`schedule.py` the sizes and learning rates of steps. Updates are in `updates.py`, of `optimisers.py`,
`adamw8bit.py`, `groups.py` by `patterns.py`, and `clipping.py`; islands and late gradients in `outer.py`,
`compression.py` and `staleness.py`.

No module here imports one of model, parallel, train, checkpoint or planner; a contract of imports holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.spec import RunSpec
from meshwright.verify.reference.outer import island_steps
from meshwright.verify.reference.steps import Loss, ReferenceStep, reference_steps


def run_steps(
    spec: RunSpec,
    weights: Mapping[str, Tensor],
    batches: Iterable[Batch],
    other_loss: Loss | None = None,
) -> Iterator[ReferenceStep]:
    """Take an optimiser step of a run on each batch, as `reference_steps` of one device or each island do."""
    if spec.step_groups > 1:
        return island_steps(spec, weights, batches)
    return reference_steps(spec, weights, batches, other_loss=other_loss)
