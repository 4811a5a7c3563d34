"""Operators that are one Triton kernel on CUDA: `triton_operator` declares them where Triton isn't needed.

What an operator takes and returns is declared in Python, so that a step on faked tensors can be traced, and
its operators counted, on a machine without Triton. The kernels lie in `kernels/triton/`, which is imported
when one is first called on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

KERNELS = "meshwright.kernels.triton"


@cache
def has_triton() -> bool:
    """True if Triton can be imported. CUDA builds of torch for Linux bring it."""
    return find_spec("triton") is not None


def takes_triton(device: torch.device) -> bool:
    """True where operators of Triton are used in place of torch's: on CUDA, faked or not, if Triton is there.

    On a machine without a GPU the device is faked, for one that has both.
    """
    return device.type == "cuda" and (has_triton() or torch.version.cuda is None)


def triton_operator(
    file: str, mutates: Sequence[str] = (), name: str = ""
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: makes a function the operator `torch.ops.meshwright.NAME`, and returns that.

    The function's annotations are the operator's schema, `mutates` names the tensors that it writes to, and
    its body makes the empty results from its arguments. NAME is `name`, by default the function's. On CUDA
    the operator is the function NAME in `kernels/triton/FILE.py`, which launches the kernel. Autograd does
    not see through it: a backward is attached by `torch.library.register_autograd` or
    `kernels/with_backward.py`.
    """

    def declare(like: Callable[..., Any]) -> Any:
        own = name or like.__name__

        def launch(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(f"{KERNELS}.{file}"), own)(*args, **kwargs)

        full = f"meshwright::{own}"
        torch.library.define(full, torch.library.infer_schema(like, mutates_args=mutates))
        torch.library.impl(full, "CUDA", launch)
        torch.library.register_fake(full, like)
        return getattr(torch.ops.meshwright, own).default

    return declare
