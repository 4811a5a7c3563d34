"""Two sums of each module's output and of its gradient, which show where a step first goes wrong.

One is x . w with fixed weights w, which changes when numbers change or change places, the other is x . x.
Each rank adds up its own tokens of each microbatch. The weights are products of one weight for the sequence,
one for the position and one for the channel; so the reference, which keeps a sum over channels for each
token, knows what any rank's sums must be, and no tensor is sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.parallel.context_parallel import zigzag
from meshwright.spec import RunSpec
from meshwright.train.guard.trace import FORWARD, Place, StepTracer
from meshwright.train.step import Trainer
from meshwright.verify.compare import FLOOR, TOLERANCE, Difference
from meshwright.verify.reference.sums import CHANNEL, PHASES, POSITION, SEQUENCE, Tables, weights

Row = tuple[str, str, int, int, float, float]
"""Phase, module, microbatch, the rank's tokens of a sequence, and the two sums."""


class ModuleSums(StepTracer):
    """The sums of one rank, of one step within its `with` block."""

    def __init__(self, trainer: Trainer, batch: Batch) -> None:
        super().__init__(trainer)
        self._slots, self._rows = batch.slots, list[tuple[str, str, int, int, Tensor]]()
        self._weights = cache(self._weights_of)  # the same for all modules

    @torch.no_grad()  # not among the tensors that recomputation saves
    def seen(self, what: str, tensor: Tensor, place: Place) -> None:
        """Add up one tensor, if it has channels for each of the rank's tokens."""
        hidden = self._trainer.spec.model.hidden
        if tensor.ndim != 3 or tensor.shape[2] != hidden or what.startswith("the gradient of"):
            return
        phase, microbatch, module = PHASES[place[0] - FORWARD], place[1], what.rpartition(" ")[2]
        length, device = tensor.shape[1], tensor.device
        token = self._weights(microbatch, len(tensor), length, device)
        x_ND = tensor.double().flatten(0, 1)
        elements = x_ND.flatten()
        found = torch.stack([token @ (x_ND @ weights(hidden, CHANNEL).to(device)), elements @ elements])
        self._rows.append((phase, module, microbatch, length, found))

    def _weights_of(self, microbatch: int, sequences: int, length: int, device: torch.device) -> Tensor:
        """Weights of the rank's tokens (N,) of a microbatch."""
        spec, mesh = self._trainer.spec, self._trainer.mesh
        first = microbatch * spec.micro_batch
        slots = self._slots[first : first + sequences]
        whole = _weights_of_tokens(slots, self._trainer.sequences, spec.data.seq_len)
        return own_tokens(whole, spec, mesh.context.rank, mesh.tensor.rank, length).to(device)

    def gathered(self) -> list[tuple[list[int], list[Row]]]:
        """Return each rank's (data rank, context rank, tensor rank) and rows; collective over the mesh."""
        factor, mesh = self._trainer.gradient_factor, self._trainer.mesh
        rows = []
        for phase, module, microbatch, length, sums in self._rows:
            scale = 1.0 if phase == "forward" else factor
            dot, square = sums.tolist()
            rows.append((phase, module, microbatch, length, dot * scale, square * scale * scale))
        return mesh.control.gather([[mesh.data_rank, mesh.context.rank, mesh.tensor.rank], rows])


def own_tokens(values: Tensor, spec: RunSpec, context_rank: int, tensor_rank: int, length: int) -> Tensor:
    """Return the values (..., B, T) of a microbatch's tokens that a rank has between its modules, (..., N).

    They are those of its context rank, or with sequence parallelism a tensor rank's part of them, which is
    cut from all tokens of the microbatch. `length` is N / B.
    """
    own = values[..., zigzag(spec.data.seq_len, spec.layout.cp, context_rank)]
    parts = own.shape[-1] // length
    return own.flatten(-2).unflatten(-1, (parts, -1))[..., tensor_rank if parts > 1 else 0, :]


def _weights_of_tokens(slots: Tensor, sequences: int, length: int) -> Tensor:
    """Weights (n, T) of the tokens of n slots, in a batch of so many sequences."""
    by_sequence, by_position = weights(sequences, SEQUENCE), weights(length, POSITION)
    return by_sequence[slots, None] * by_position


def differences(
    step: int, phase: str, found: list[tuple[list[int], list[Row]]], tables: Tables, spec: RunSpec
) -> Iterator[Difference]:
    """Compare the ranks' sums of a phase with those that the reference's tables give, module by module."""
    modules = list(tables["forward"])
    if not tables[phase]:  # of a backward that passes no module's output
        return
    numbers = {module: number for number, module in enumerate(tables[phase])}
    expected = cache(partial(_expected, torch.stack([*tables[phase].values()]).cpu(), spec))
    rows: dict[str, list[_Compared]] = defaultdict(list)
    for rank, (place, of_rank) in enumerate(found):
        for of_phase, module, microbatch, length, *sums in of_rank:
            if of_phase == phase and module in numbers:
                wanted = expected(tuple(place), microbatch, length)[numbers[module]]
                rows[module].append(_Compared(rank, microbatch, sums, wanted))
    for number, module in enumerate(modules):
        if module in rows:
            # A wrong gradient at a module's output was made by the module that takes the output.
            name = module if phase == "forward" else [*modules, "head"][number + 1]
            yield _summary(step, phase, name, rows[module], spec)


class _Compared:
    """Sums of one rank and microbatch, and what they must be."""

    def __init__(self, rank: int, microbatch: int, found: list[float], wanted: list[float]) -> None:
        self.rank, self.microbatch, self.found, self.wanted = rank, microbatch, found, wanted

    def relative(self, floor: float) -> float:
        """Relative difference, of sums whose squares are at least `floor`."""
        squares = max(self.wanted[1], floor)
        if not all(map(math.isfinite, self.found)):
            return math.inf
        if squares == 0.0:
            return math.inf if any(self.found) else 0.0
        dot, square = (abs(a - b) for a, b in zip(self.found, self.wanted, strict=True))
        return max(dot / math.sqrt(squares), square / squares)


def _expected(
    sums: Tensor, spec: RunSpec, place: tuple[int, int, int], microbatch: int, length: int
) -> list[list[float]]:
    """Return the two sums that a rank must find in a microbatch, for each module of `sums` (m, 2, n, T)."""
    data_rank, context_rank, tensor_rank = place
    first = data_rank * (spec.batch_sequences // spec.layout.data_ranks) + microbatch * spec.micro_batch
    slots = torch.arange(first, first + spec.micro_batch)
    whole = _weights_of_tokens(slots, spec.batch_sequences, spec.data.seq_len)
    token = own_tokens(whole, spec, context_rank, tensor_rank, length)
    dots, squares = own_tokens(sums[:, :, slots], spec, context_rank, tensor_rank, length).unbind(1)
    return torch.stack([dots @ token, squares.sum(1)], 1).tolist()


def _summary(step: int, phase: str, name: str, rows: list[_Compared], spec: RunSpec) -> Difference:
    """Return the largest difference of a module's sums, and on which ranks and microbatches there is one."""
    floor = FLOOR**2 * max(row.wanted[1] for row in rows)
    failing = [row for row in rows if row.relative(floor) > TOLERANCE]
    relative = max(row.relative(floor) for row in rows)
    if not failing:
        return Difference(step, phase, name, relative)
    details = []
    for noun, of in (("rank", "rank"), ("microbatch", "microbatch")):
        numbers, all_numbers = ({getattr(row, of) for row in some} for some in (failing, rows))
        if numbers != all_numbers:
            plural = "s" if noun == "rank" else "es"
            named = ", ".join(map(str, sorted(numbers)[:8])) + (", ..." if len(numbers) > 8 else "")
            details.append(f"{'on' if noun == 'rank' else 'in'} {noun}{plural * (len(numbers) > 1)} {named}")
    if all(math.isclose(row.found[1], row.wanted[1], rel_tol=1e-9) for row in failing):
        details.append("with the right numbers in other places or with other signs")
    return Difference(step, phase, name, relative, _factor(failing), " ".join(details))


def _factor(rows: list[_Compared]) -> float | None:
    """Return the one factor by which all rows are off, if there is one."""
    factors = [row.found[0] / row.wanted[0] for row in rows if row.wanted[0] and math.isfinite(row.found[0])]
    if len(factors) < len(rows) or not all(math.isclose(each, factors[0], rel_tol=1e-8) for each in factors):
        return None
    squared = (math.isclose(row.found[1], factors[0] ** 2 * row.wanted[1], rel_tol=1e-8) for row in rows)
    return factors[0] if all(squared) else None
