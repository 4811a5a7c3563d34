"""Triton kernels compiled for GPUs that are not there, and what they take of a GPU's registers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, compile

from meshwright.kernels.triton.specialisation import Specialisation

CAPABILITIES = (80, 90, 100)


class Resources(NamedTuple):
    """Registers of a thread, and bytes that a kernel spills to memory."""

    registers: int
    spilled: int


def resources(case: Specialisation, capability: int, folder: Path) -> Resources:
    """Resources that `ptxas` reports of a kernel, which Triton compiled to a cubin for a capability."""
    places = {name: at for at, name in enumerate(case.kernel.arg_names)}
    types = {
        name: "constexpr" if name in case.constants else case.types[name] for name in case.kernel.arg_names
    }
    source = ASTSource(
        case.kernel,
        signature=types,
        constexprs={(places[name],): value for name, value in case.constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in case.aligned},
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    built = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(built.asm["cubin"]) > 1000
    ptx = folder / f"{capability}.ptx"
    ptx.write_text(built.asm["ptx"])
    name = re.search(r"^\.target (sm_\w+)", built.asm["ptx"], re.M)
    assert name is not None
    said = subprocess.run(
        [get_ptxas(capability).path, "-v", f"--gpu-name={name[1]}", str(ptx), "-o", str(folder / "cubin")],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    assert registers is not None, said
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return Resources(int(registers[1]), spilled)
