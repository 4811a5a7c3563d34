"""Compare any parallel module with a plain one: outputs, gradients, their norm, parameters after some steps.

It runs inside a process group that the caller has, and on any modules of torch:

    verdict = compare(parallelize_module(deepcopy(plain), mesh, plan), plain, [x])
    verdict.raise_if_unequal()

Every rank runs both modules and compares its own copy of each tensor, so that a replica that differs on one
rank is found as well as a part that is missing on all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from hashlib import sha256
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from meshwright.rank.env import LOOPBACK
from meshwright.spec import UserError
from meshwright.verify.compare import TOLERANCE, Comparison, Difference

Gather = Callable[[str, Tensor], Tensor]
"""Called with the name and a rank's part of a tensor; returns the whole tensor."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """Result of `compare`, alike on all ranks.

    `first` is the first difference in the order of a step, `sentence` says it in words, and `rows` has for
    each kind of value how many were compared, the largest relative difference and its name.
    """

    equal: bool
    first: Difference | None
    sentence: str
    rows: list[dict[str, Any]]

    def raise_if_unequal(self) -> None:
        """Raise an `AssertionError` with the sentence, unless the modules are equal."""
        if not self.equal:
            raise AssertionError(self.sentence)


def compare(
    parallel: nn.Module,
    plain: nn.Module,
    inputs: Sequence[Any],
    *,
    steps: int = 1,
    loss: Callable[[Any], Tensor] | None = None,
    optimiser: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    after_backward: Callable[[nn.Module], object] | None = None,
    grad_norm: Callable[[nn.Module], Tensor] | None = None,
    gather: Gather | None = None,
    names: Callable[[str], str] | None = None,
    tolerance: float = TOLERANCE,
    group: dist.ProcessGroup | None = None,
) -> Verdict:
    """Take `steps` steps of both modules and compare them; every rank of `group` calls it alike.

    `inputs` are the arguments of both modules' forward, and those that require gradients have them compared.
    DTensors are compared whole; of other tensors each rank has its copy, or `gather(name, part)` makes it
    whole: it is called with names of parameters (for values and gradients), "output" and "input 0".
    `names` turns names of the parallel module into those of the plain one.

    `loss(output)` is by default the sum of the outputs times fixed weights. After the backward of `parallel`
    comes `after_backward(parallel)`, for the sums over ranks that a trainer makes; `grad_norm(parallel)` is
    the norm that it finds, and `optimiser(parameters)` makes the optimiser of either side.

    Modules in float64 agree to 1e-10; give a `tolerance` of 1e-4 for float32. Raises `UserError` if ranks
    have different plain modules or inputs.
    """
    if steps < 1:
        raise UserError(f"steps: {steps} steps compare nothing; give 1 or more")
    if steps > 1 and optimiser is None:
        raise UserError(
            f"optimiser: {steps} steps need one; give it, as partial(torch.optim.AdamW, lr=0.1), or 1 step"
        )
    _require_the_same(plain, inputs, group)
    ours = _Side(parallel, names, gather, optimiser)
    reference = _Side(plain, None, None, optimiser)
    found, modules = Comparison(tolerance), Comparison(tolerance)
    found.add(0, "initial weight", ours.parameters(), reference.parameters())
    for step in range(1, steps + 1):
        values, of_modules = ours.step(inputs, loss, after_backward, grad_norm)
        wanted, wanted_of_modules = reference.step(inputs, loss, None, _norm if grad_norm else None)
        for kind, tensors in wanted.items():
            found.add(step, kind, values[kind], tensors)
        for kind, tensors in wanted_of_modules.items():
            there = of_modules[kind]
            like = {
                name: each
                for name, each in tensors.items()
                if name in there and there[name].shape == each.shape
            }
            modules.add(step, kind, {name: there[name] for name in like}, like)
    found, modules = (_of_all_ranks(each, group) for each in (found, modules))
    result = found.result(_axes(parallel, group))
    first, sentence = found.first, "equal"
    if first is not None:
        sentence = result["first"]["sentence"] + _hint(first, modules)
    return Verdict(first is None, first, sentence, result["rows"])


class _Side:
    """One of the two modules, and what it computes, by names of the plain one."""

    def __init__(
        self,
        module: nn.Module,
        names: Callable[[str], str] | None,
        gather: Gather | None,
        optimiser: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None,
    ) -> None:
        self._module, self._gather = module, gather or (lambda _, tensor: tensor)
        self._names = names or (lambda name: name)
        self._optimiser = optimiser(module.parameters()) if optimiser else None

    def parameters(self) -> Tensors:
        """Return every parameter, whole."""
        return {self._names(name): self._whole(name, each) for name, each in self._module.named_parameters()}

    def step(
        self,
        inputs: Sequence[Any],
        loss: Callable[[Any], Tensor] | None,
        after_backward: Callable[[nn.Module], object] | None,
        grad_norm: Callable[[nn.Module], Tensor] | None,
    ) -> tuple[dict[str, Tensors], dict[str, Tensors]]:
        """Take a step; return the tensors of each kind, and those at the outputs of modules."""
        module = self._module
        module.zero_grad(set_to_none=True)
        own = [_own(each) for each in inputs]
        with _Outputs(module) as seen:
            output = module(*own)
            (loss or _weighted_sum)(output).backward()
        if after_backward is not None:
            after_backward(module)
        outputs = _numbered("output", _tensors(output))
        leaves = _numbered("input", [each for each in own if isinstance(each, Tensor)])
        values = {
            "output": {name: self._whole("output", each) for name, each in outputs.items()},
            "parameter gradient": {
                self._names(name): self._whole(name, each.grad)
                for name, each in module.named_parameters()
                if each.grad is not None
            },
            "input gradient": {
                name: self._whole(name, each.grad) for name, each in leaves.items() if each.grad is not None
            },
        }
        if grad_norm is not None:
            values["grad norm"] = {"grad norm": self._whole("grad norm", grad_norm(module))}
        if self._optimiser is not None:
            self._optimiser.step()
            values["parameter"] = self.parameters()
        of_modules = {
            kind: {self._names(name): _full(each) for name, each in tensors.items()}
            for kind, tensors in (("forward", seen.forward), ("backward", seen.backward()))
        }
        return values, of_modules

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        return _full(tensor if isinstance(tensor, DTensor) else self._gather(name, tensor.detach()))


class _Outputs:
    """The first tensor of each module's output, and its gradient, in order of the forward."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.forward = module, dict[str, Tensor]()
        self._gradients: Tensors = {}

    def __enter__(self) -> _Outputs:
        self._handles = [
            each.register_forward_hook(self._hook(name))
            for name, each in self._module.named_modules()
            if name
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            calls = sum(each.partition(" ")[0] == name for each in self.forward)
            call = f"{name} (call {calls + 1})" if calls else name

            def keep_gradient(gradient: Tensor) -> None:
                self._gradients[call] = gradient.detach().clone()

            for tensor in _tensors(output)[:1]:
                self.forward[call] = tensor.detach().clone()
                if tensor.requires_grad:
                    tensor.register_hook(keep_gradient)

        return keep

    def backward(self) -> Tensors:
        """Return the gradients in order of the forward."""
        return {name: self._gradients[name] for name in self.forward if name in self._gradients}


def gather_shards(tensor: Tensor, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the parts of all ranks of `group`, in the order of ranks, joined along `dim`."""
    parts = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def run_on_ranks(
    ranks: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `function(*arguments)` on so many new gloo ranks, and return their results in the order of ranks.

    The function stands at the top of a module, as it is pickled; within it `torch.distributed` has its
    default group. A rank's error is raised with its traceback (`ProcessRaisedException` of
    `torch.multiprocessing`), and ends the others.
    """
    queue = get_context("spawn").SimpleQueue()
    found: dict[int, Any] = {}
    with TemporaryDirectory() as folder:
        place = (ranks, f"{folder}/store", timeout_s, queue)
        processes = spawn(_rank, (*place, function, arguments), nprocs=ranks, join=False)
        ended = False
        while not ended:
            ended = processes.join(0.05)
            while not queue.empty():
                rank, result = queue.get()
                found[rank] = result
    return [found[rank] for rank in range(ranks)]


def _rank(
    rank: int,
    ranks: int,
    store: str,
    timeout_s: float,
    queue: SimpleQueue[tuple[int, Any]],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK  # nothing that another machine could reach
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks, timeout=limit)
    try:
        queue.put((rank, function(*arguments)))
        dist.barrier()  # whose memory is gone is not there for a slower rank's last message
    finally:
        dist.destroy_process_group()


def _full(tensor: Tensor) -> Tensor:
    """Return a tensor whole, in float64, on the host."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu", torch.float64, copy=True)


def _own(value: Any) -> Any:
    """Return a copy that is a leaf of the graph, of a tensor."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in an output, which may be nested."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


def _numbered(name: str, tensors: list[Tensor]) -> Tensors:
    return {f"{name} {number}": tensor for number, tensor in enumerate(tensors)}


def _weighted_sum(output: Any) -> Tensor:
    total = torch.zeros(())
    for tensor in _tensors(output):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        weights = torch.arange(whole.numel(), dtype=torch.float64, device=whole.device).cos()
        total = total + (whole * weights.to(whole.dtype).view(whole.shape)).sum()
    return total


def _norm(module: nn.Module) -> Tensor:
    return torch.nn.utils.get_total_norm([each.grad for each in module.parameters() if each.grad is not None])


def _require_the_same(plain: nn.Module, inputs: Sequence[Any], group: dist.ProcessGroup | None) -> None:
    """Refuse ranks whose plain modules or inputs differ: each rank would be compared with another one."""
    tensors = {**dict(plain.named_parameters()), **{f"input {n}": each for n, each in enumerate(inputs)}}
    own = {
        name: sha256(_full(each).contiguous().numpy().tobytes()).hexdigest()
        for name, each in tensors.items()
        if isinstance(each, Tensor)
    }
    for rank, theirs in enumerate(_gathered(own, group)):
        for name, digest in own.items():
            if theirs.get(name) != digest:
                raise UserError(
                    f"plain: {name} differs between ranks {dist.get_rank(group)} and {rank}, and all must "
                    f"compare with the same; seed them alike, as by torch.manual_seed(0)"
                )


def _gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def _of_all_ranks(own: Comparison, group: dist.ProcessGroup | None) -> Comparison:
    """Return what all ranks have compared: of each tensor the largest difference, and where it is."""
    found, merged = _gathered(own.kinds, group), Comparison(own.tolerance)
    for step, kind in own.kinds:
        by_name: dict[str, list[tuple[int, Difference]]] = {}
        for rank, kinds in enumerate(found):
            for each in kinds.get((step, kind), []):
                by_name.setdefault(each.name, []).append((rank, each))
        merged.note(step, kind, [_worst(each, own.tolerance) for each in by_name.values()])
    return merged


def _worst(of_ranks: list[tuple[int, Difference]], tolerance: float) -> Difference:
    """Return the largest of the ranks' differences of one tensor, with the ranks, if these are not all."""
    worst = max((each for _, each in of_ranks), key=lambda each: each.relative)
    failing = {rank: each.factor for rank, each in of_ranks if each.relative > tolerance}
    detail = worst.detail
    if 0 < len(failing) < len(of_ranks):
        where = f"on rank{'s' if len(failing) > 1 else ''} {', '.join(map(str, failing))}"
        detail = f"{detail} {where}".strip()
    alike = all(
        each is not None and worst.factor is not None and math.isclose(each, worst.factor, rel_tol=1e-8)
        for each in failing.values()
    )
    return replace(worst, detail=detail, factor=worst.factor if alike else None)


def _axes(parallel: nn.Module, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Return sizes that a wrong factor may be: those of the DTensors' meshes, and the number of ranks."""
    meshes = [each.device_mesh for each in parallel.parameters() if isinstance(each, DTensor)]
    axes = {name: mesh.size(n) for mesh in meshes for n, name in enumerate(mesh.mesh_dim_names or ())}
    return (
        axes
        if dist.get_world_size(group) in axes.values()
        else {**axes, "the ranks": dist.get_world_size(group)}
    )


def _hint(first: Difference, modules: Comparison) -> str:
    """Name the module at which numbers first differ.

    A module's output may rightly be a part of the plain one's, so this is a hint, and not the verdict.
    """
    if first.kind == "output" and (failing := modules.failing(first.step, "forward")):
        return f"; the first module with another output of the same shape is {failing[0].name}"
    if first.kind.endswith(" gradient") and (failing := modules.failing(first.step, "backward")):
        return f"; the first gradient of the same shape that differs is at the output of {failing[-1].name}"
    return ""
