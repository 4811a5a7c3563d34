"""Differences between a layout and its reference, in the order in which a step makes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor

from meshwright.spec import Layout
from meshwright.spec.files import strict_json
from meshwright.verify.kinds import phrase

TOLERANCE = 1e-10
FLOOR = 1e-4
"""A tensor whose largest reference value is below this share of its kind's largest is measured against that
share: some gradients are zero in mathematics and rounding noise in practice (a key bias, for one)."""
BACKWARD_ORDER = ("backward", "gradient", "parameter gradient")
"""Kinds whose tensors a step makes from the head to the embedding."""


@dataclass(frozen=True)
class Difference:
    """How far one tensor of a step is from its reference.

    `relative` is max |a - b| / max |b|, and `factor` the f of a = f b, where that holds and f is not 1.
    `detail` says more, such as on which rank.
    """

    step: int
    kind: str
    name: str
    relative: float
    factor: float | None = None
    detail: str = ""


class Comparison:
    """All that was compared; kinds are added in the order in which a step computes them."""

    def __init__(self, tolerance: float = TOLERANCE) -> None:
        self.tolerance = tolerance
        self.kinds: dict[tuple[int, str], list[Difference]] = {}

    def add(
        self,
        step: int,
        kind: str,
        ours: Mapping[str, Tensor],
        reference: Mapping[str, Tensor],
        minuends: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Compare equally named tensors; a name on one side only counts as infinitely different.

        `minuends` are given where tensors are small differences of these and others: they are measured by
        them, whose rounding they have.
        """
        sizes = sizes_of({**reference, **(minuends or {})})
        names = [*reference, *sorted(ours.keys() - reference.keys())]  # in order of the forward
        self.note(
            step,
            kind,
            (_difference(step, kind, name, ours, reference, sizes.get(name, 1.0)) for name in names),
        )

    def note(self, step: int, kind: str, differences: Iterable[Difference]) -> None:
        """Add differences that were found elsewhere, in order of the forward."""
        if found := list(differences):
            self.kinds.setdefault((step, kind), []).extend(found)

    @property
    def first(self) -> Difference | None:
        """The first difference beyond the tolerance that a step makes; None if there is none."""
        return next((failing[0] for place in self.kinds if (failing := self.failing(*place))), None)

    def failing(self, step: int, kind: str) -> list[Difference]:
        """Return the differences of a step and kind beyond the tolerance, in the order of the step."""
        failing = [each for each in self.kinds.get((step, kind), []) if each.relative > self.tolerance]
        return failing[::-1] if kind in BACKWARD_ORDER else failing

    def result(self, axes: Mapping[str, int]) -> dict[str, Any]:
        """Return the JSON object of `meshwright verify`, with one row for each step and kind.

        `axes` are the sizes that a factor may be, by name. A difference that is not finite is None.
        """
        rows: list[dict[str, Any]] = []
        for (step, kind), differences in self.kinds.items():
            worst = max(differences, key=lambda each: each.relative)
            rows.append(
                {
                    "kind": f"step {step} {kind}",
                    "compared": len(differences),
                    "worst": worst.relative,
                    "name": worst.name,
                }
            )
        overall = max(rows, key=lambda row: row["worst"])
        first = self.first
        step_of_first = [place for place in self.kinds if first is not None and place[0] == first.step]
        result: dict[str, Any] = strict_json(
            {
                "equal": first is None,
                "worst_relative": overall["worst"],
                "worst_name": f"{overall['kind']}: {overall['name']}",
                "first": first and self._described(first, axes),
                "differences": [asdict(each) for place in step_of_first for each in self.failing(*place)],
                "compared": sum(row["compared"] for row in rows),
                "tolerance": self.tolerance,
                "rows": rows,
            }
        )
        return result

    def _described(self, first: Difference, axes: Mapping[str, int]) -> dict[str, Any]:
        within, sentence = self.parameters_within(first), self.sentence(first, axes)
        return {**asdict(first), "parameters": within, "sentence": sentence}

    def parameters_within(self, first: Difference) -> list[str]:
        """Return the parameters of a module with a wrong backward whose gradients differ, if not all do."""
        if first.kind != "backward":
            return []
        own = [
            [each.name for each in some if each.name.startswith(f"{first.name}.")]
            for some in (self.failing(first.step, "gradient"), self.kinds.get((first.step, "gradient"), []))
        ]
        return own[0] if len(own[0]) < len(own[1]) else []

    def sentence(self, first: Difference, axes: Mapping[str, int]) -> str:
        """Say what differs first, how much of its kind does, and by which factor."""
        if first.kind == "replicas":
            return f"step {first.step}: {first.name}"
        follow = first.kind in ("forward", "backward")  # what comes after a wrong module is wrong, too
        failing = [first] if follow else self.failing(first.step, first.kind)
        of = 1 if follow else len(self.kinds[first.step, first.kind])
        words = f"step {first.step}: " if first.step else ""
        words += f"the first difference is in {phrase(first.kind).format(first.name)}"
        if first.kind == "forward" and first.name.endswith("norm"):
            words += " or the residual stream that it takes"
        before, reason = _THOUGH.get(first.kind, ((), ""))
        if any((first.step, kind) in self.kinds for kind in before):
            words += f", though {reason}"
        words += f" ({first.relative:.1e}"
        words += f", of {of} compared {len(failing)} differ)" if of > 1 else ")"
        if first.detail:
            words += f", {first.detail}"
        factors = [each.factor for each in failing]
        if None not in factors and len({round(factor, 9) for factor in factors if factor is not None}) == 1:
            words += f"; {'each' if len(failing) > 1 else 'it'} is {_factor(factors[0] or 0.0, axes)}"
        if within := [name.removeprefix(f"{first.name}.") for name in self.parameters_within(first)]:
            words += f"; of its own parameters' gradients only {', '.join(within)}"
            words += " differs" if len(within) == 1 else " differ"
        return words


_THOUGH = {
    "loss": (("forward",), "each module's output is right: in the head's loss, or in its sum over ranks"),
    "gradient": (
        ("backward",),
        "the gradients at modules' outputs are right: in the weight's own gradient, or in its sum over ranks",
    ),
    "grad norm": (("gradient", "parameter gradient"), "every gradient is right"),
    "parameter": (("gradient", "parameter gradient"), "its gradient is right"),
}
"""Kind -> kinds before it, and the words that are true where one of these was compared."""


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Sizes of one kind's tensors by name, which their differences are measured by."""
    sizes = {name: float(tensor.abs().max()) for name, tensor in tensors.items()}
    least = FLOOR * max(sizes.values(), default=0.0)
    return {name: max(size, least) for name, size in sizes.items()}


def _difference(
    step: int,
    kind: str,
    name: str,
    ours: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    size: float,
) -> Difference:
    if name not in ours or name not in reference or ours[name].shape != reference[name].shape:
        return Difference(step, kind, name, math.inf, detail="which one side does not have")
    found, wanted = ours[name], reference[name]
    relative = float((found - wanted).abs().max()) / (size or 1.0)
    if math.isnan(relative):
        return Difference(step, kind, name, math.inf, detail="which is not a number")
    return Difference(step, kind, name, relative, factor_of(found, wanted) if relative > TOLERANCE else None)


def factor_of(found: Tensor, wanted: Tensor) -> float | None:
    """Return f if `found` is f times `wanted`, by least squares and to 8 digits; else None."""
    squares = float((wanted * wanted).sum())
    if squares == 0.0:
        return None
    factor = float((found * wanted).sum()) / squares
    rest = float((found - factor * wanted).abs().max())
    return factor if rest <= 1e-8 * float(wanted.abs().max()) else None


def _factor(factor: float, axes: Mapping[str, int]) -> str:
    """Spell a factor, with the axes that it may come from: "1/2 of what it should be (1/dp)"."""
    if factor == 0.0:
        return "zero"
    near = Fraction(factor).limit_denominator(4096)
    exact = math.isclose(near, factor, rel_tol=1e-8) and near.numerator <= 4096
    text = str(near) if exact else f"{factor:.6g}"
    causes = [
        spelt
        for name, size in axes.items()
        if size > 1
        for spelt, value in ((name, size), (f"1/{name}", 1 / size), (f"the root of {name}", math.sqrt(size)))
        if math.isclose(factor, value, rel_tol=1e-8)
    ]
    return f"{text} times what it should be" + (f" ({' or '.join(causes)})" if causes else "")


def axes_of(layout: Layout, microbatches: int) -> dict[str, int]:
    """Return sizes by name that a wrong factor may be: those of the axes, and the number of microbatches."""
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "ep": layout.ep,
        "etp": layout.etp,
        "dp": layout.dp,
        "replicate": layout.replicate,
        "the data ranks": layout.data_ranks,
        "the microbatches": microbatches,
        "tp x cp": layout.tp * layout.cp,
        "the world": layout.world_size,
    }
