"""The parts of the day in the order of their worth, each with its limit in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODELS = {"1b": "llama3.2-1b", "8b": "llama3-8b"}
"""Models of the steps and of the kernels' shapes."""


@dataclass(frozen=True)
class Part:
    """A part: the module that does it, with its options, and its limits in a day of 10 and of 30 minutes."""

    name: str
    kind: str
    limits: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1

    def seconds(self, minutes: int) -> int:
        """Its limit in a day of so many minutes."""
        return self.limits[0] if minutes <= 10 else self.limits[1]


def parts_of(gpus: int) -> list[Part]:
    """All parts for so many GPUs; `machine` is the first."""
    return [
        Part("machine", "machine", (30, 60)),
        Part("tests", "gpu_tests", (120, 420)),
        Part("verify", "verify_layouts", (75, 300)),
        *_steps("bf16", gpus),
        Part("attention", "attention", (45, 120)),
        Part("products", "products", (45, 120)),
        *_steps("fp8", gpus),
    ]


def _steps(compute: str, gpus: int) -> list[Part]:
    return [_step(model, compute, compiled, gpus) for compiled in (False, True) for model in ("8b", "1b")]


COMPILED = {"fp8": "fp8-rowwise"}
"""Format -> that of compiled steps, where it is another: blocks that note their largest numbers are not
compiled."""


def _step(model: str, compute: str, compiled: bool, gpus: int) -> Part:
    name = f"step-{model}-{compute}-{'compiled' if compiled else 'eager'}"
    limits = (75, 180) if compiled else (60, 150)
    own = COMPILED.get(compute, compute) if compiled else compute
    options = {"model": model, "compute": own, "compiled": compiled}
    return Part(name, "steps", limits, options, ranks=gpus)
