"""Initial weights of a whole model on one device, written apart from `meshwright.model`.

The rule is that of the documentation: element i of a parameter is a function of (seed, name, i), drawn from a
counter-based stream (Salmon et al. 2011) by splitmix64 (Steele et al. 2014) and the normal's inverse.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from meshwright.spec import ModelSpec
from meshwright.spec.lora import LoraSpec
from meshwright.spec.parameters import parameters
from meshwright.verify.reference.lora import initial_adapters, magnitudes
from meshwright.verify.reference.quantised_base import quantised
from meshwright.verify.reference.rounding import nearest


def initial_weights(
    model: ModelSpec,
    seed: int,
    master: str = "fp32",
    lora: LoraSpec | None = None,
    compute: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Return every parameter by its name in `Decoder.named_parameters`, whole and in float64.

    With `master` "bf16" they are rounded to the nearest numbers of that format, and those of a
    quantised base to `compute` and then to its own. Those of adapters come last.
    """
    kept = nearest if master == "bf16" else Tensor.double
    drawn = {
        parameter.name: _initial(model, seed, parameter.name, parameter.shape)
        for unit in parameters(model).values()
        for parameter in unit
    }
    if lora is not None:
        drawn |= initial_adapters(lora, drawn, partial(_uniforms, seed))
    held = {name: kept(value) for name, value in drawn.items()}
    if lora is None:
        return held
    if lora.quantise != "none":
        held = quantised(held, lora.quantise, compute)
    frozen = {name: weight.to(compute).double() for name, weight in held.items()}
    return held | {name: kept(value) for name, value in magnitudes(lora, frozen).items()}


def _initial(model: ModelSpec, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Norms are one, biases zero, other weights N(0, init_std).

    Those that write to the residual stream are divided by sqrt(2 * layers) (Radford et al. 2019, §2.3).
    With muP, variances fall as 1 / fan-in, and those of the head and of routers as its square (Yang et al.
    2022, table 3).
    """
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if name.endswith("norm.weight"):
        return torch.full(shape, 0.0 if model.norm_unit_offset else 1.0, dtype=torch.float64)
    writes_residual = name.endswith((".attn.o.weight", ".down.weight", ".experts.down"))
    std = model.init_std / math.sqrt(2 * model.layers) if writes_residual else model.init_std
    if model.mup_base_hidden is not None and not name.startswith("embed."):
        widening = model.hidden / model.mup_base_hidden
        finite = name.startswith("head.") or "router" in name or "shared_gate" in name  # numbers of outputs
        std /= widening if finite else math.sqrt(widening)
    return _normals(seed, name, math.prod(shape)).mul_(std).reshape(shape)


def _normals(seed: int, name: str, count: int) -> Tensor:
    """The first `count` standard normals of a parameter's stream."""
    return torch.special.ndtri(_uniforms(seed, name, count))


def _uniforms(seed: int, name: str, count: int) -> Tensor:
    """The first `count` numbers between 0 and 1 of a parameter's stream."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")
    bits = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits = bits ^ (bits >> np.uint64(31))
    # The middles of 2^53 equal intervals of (0, 1); the last rounds to 1, whose normal is infinite.
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    return torch.from_numpy(np.minimum(uniform, 1 - 2.0**-53))
