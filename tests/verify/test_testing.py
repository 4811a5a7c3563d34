"""`meshwright.testing` on modules of torch's own: equal where they are, and a planted bug is named."""

from __future__ import annotations

import importlib
import re
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing import ProcessRaisedException

from meshwright.comm.mesh import Mesh
from meshwright.spec import Layout, UserError
from meshwright.testing import Verdict, compare, gather_shards, run_on_ranks
from ranks import Ranks

ADAM = partial(torch.optim.AdamW, lr=0.01)


class MLP(nn.Module):
    """Two linear layers with an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class RowLinear(nn.Module):
    """A row-parallel layer by hand, which may leave out its sum, or add its bias on each rank."""

    def __init__(self, whole: nn.Linear, bug: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, 1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self._bug, self._group = bug, group

    def forward(self, x: Tensor) -> Tensor:
        if self._bug == "bias on each rank":
            return _Sum.apply(x @ self.weight.T + self.bias, self._group)
        if self._bug == "no sum":
            return x @ self.weight.T + self.bias
        return _Sum.apply(x @ self.weight.T, self._group) + self.bias


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _pair(mesh: Mesh) -> tuple[nn.Module, nn.Module, Tensor]:
    """A tensor-parallel module, the plain one, and an input."""
    assert mesh.tensor.group is not None
    torch.manual_seed(0)
    plain = MLP().double()
    device_mesh = DeviceMesh.from_group(mesh.tensor.group, "cpu", mesh_dim_names=("tp",))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(deepcopy(plain), device_mesh, plan), plain, torch.randn(4, 8).double()


def torch_layers(mesh: Mesh, bug: str) -> Verdict:
    """Compare torch's tensor parallelism, with a bug in its gradients or parameters."""
    parallel, plain, x = _pair(mesh)
    x.requires_grad_()

    def after_backward(module: nn.Module) -> None:
        if bug == "scaled":
            module.up.weight.grad *= mesh.tensor.size
        if bug == "replica" and mesh.tensor.rank == 1:
            module.down.bias.grad.to_local().mul_(-1)

    def norm(module: nn.Module) -> Tensor:
        grads = [each.grad.to_local() if bug == "norm" else each.grad for each in module.parameters()]
        return torch.nn.utils.get_total_norm(grads)

    return compare(
        parallel,
        plain,
        [x],
        steps=2,
        optimiser=partial(torch.optim.SGD, lr=0.1) if bug == "" else ADAM,
        after_backward=after_backward,
        grad_norm=norm,
        group=mesh.tensor.group,
    )


def layers_by_hand(mesh: Mesh, bug: str) -> Verdict:
    """Compare a row-parallel layer without DTensors, whose parts `gather` joins."""
    parallel, plain, x = _pair(mesh)
    parallel.down = RowLinear(plain.down, bug, mesh.tensor.group)

    def gather(name: str, part: Tensor) -> Tensor:
        return gather_shards(part, 1, mesh.tensor.group) if name == "down.weight" else part

    return compare(parallel, plain, [x], gather=gather, group=mesh.tensor.group)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_layers_of_torch_are_equal(ranks: Ranks, tp: int) -> None:
    for verdict in ranks.run(Layout(tp=tp), torch_layers, "none"):
        assert verdict.equal and verdict.first is None, verdict.sentence
        compared = {row["kind"]: row["compared"] for row in verdict.rows}
        each_step = {
            "output": 1,
            "parameter gradient": 4,
            "input gradient": 1,
            "grad norm": 1,
            "parameter": 4,
        }
        steps = {f"step {step} {kind}": n for step in (1, 2) for kind, n in each_step.items()}
        assert compared == {"step 0 initial weight": 4, **steps}
        verdict.raise_if_unequal()


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (
            "scaled",
            "the gradient of up.weight {}, of 4 compared 1 differ); it is 2 times what it should be (tp)",
        ),
        ("replica", "the gradient of down.bias (2.0e+00, of 4 compared 1 differ), on rank 1; it is -1 times"),
        ("norm", "the gradient norm, though every gradient is right"),
    ],
)
def test_a_wrong_gradient_is_named(ranks: Ranks, bug: str, words: str) -> None:
    verdicts = ranks.run(Layout(tp=2), torch_layers, bug)
    for verdict in verdicts:
        assert not verdict.equal
        assert all(part in verdict.sentence for part in words.split("{}")), verdict.sentence
    assert verdicts[0] == verdicts[1]
    with pytest.raises(AssertionError, match="step 1: the first difference is in"):
        verdicts[0].raise_if_unequal()


@pytest.mark.parametrize("bug", ["no sum", "bias on each rank"])
def test_a_wrong_sum_in_the_forward_is_named_with_its_module(ranks: Ranks, bug: str) -> None:
    assert all(verdict.equal for verdict in ranks.run(Layout(tp=2), layers_by_hand, "none"))
    for verdict in ranks.run(Layout(tp=2), layers_by_hand, bug):
        assert not verdict.equal
        assert verdict.first is not None and verdict.first.kind == "output"
        assert verdict.sentence.endswith("the first module with another output of the same shape is down")


class DataParallel(nn.Module):
    """A module whose ranks each take a part of the batch, and sum their gradients afterwards."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.module, self._mesh = module, mesh

    def forward(self, x: Tensor) -> Tensor:
        part = x.chunk(self._mesh.size())[self._mesh.get_local_rank()]
        return DTensor.from_local(self.module(part), self._mesh, [Shard(0)])


def parts_of_a_batch(mesh: Mesh, mean: bool) -> Verdict:
    """Compare data parallelism, of which gradients may be a mean where they should be a sum."""
    group = mesh.shard.group
    assert group is not None
    torch.manual_seed(0)
    plain = MLP().double()
    parallel = DataParallel(deepcopy(plain), DeviceMesh.from_group(group, "cpu"))

    def after_backward(module: nn.Module) -> None:
        for each in module.parameters():
            dist.all_reduce(each.grad, group=group)
            each.grad /= group.size() if mean else 1

    return compare(
        parallel,
        plain,
        [torch.randn(4, 8).double()],
        after_backward=after_backward,
        names=lambda name: name.removeprefix("module."),
        group=group,
    )


def test_data_parallel_modules_are_compared_whole(ranks: Ranks) -> None:
    assert all(verdict.equal for verdict in ranks.run(Layout(dp=2), parts_of_a_batch, False))
    for verdict in ranks.run(Layout(dp=2), parts_of_a_batch, True):
        assert (
            "of 4 compared 4 differ); each is 1/2 times what it should be (1/the ranks)" in verdict.sentence
        )


def test_ranks_with_other_plain_modules_are_refused(ranks: Ranks) -> None:
    sentences = ranks.run(Layout(tp=2), unlike_plain_modules)
    assert all("plain: weight differs between ranks" in sentence for sentence in sentences)


def unlike_plain_modules(mesh: Mesh) -> str:
    """Compare with plain modules of a seed for each rank; return the error."""
    torch.manual_seed(mesh.tensor.rank)
    module = nn.Linear(4, 4)
    with pytest.raises(UserError) as error:
        compare(module, module, [torch.zeros(1, 4)], group=mesh.tensor.group)
    return str(error.value)


@pytest.mark.parametrize(("number", "name"), [(0, "test_mlp"), (1, "test_megatron")])
def test_the_examples_of_the_documentation_run(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "test_megatron":
        pytest.importorskip("megatron.core", reason="megatron-core is no dependency; install it to run this")
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    block = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)[number]
    module = f"example_{name}"
    (tmp_path / f"{module}.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)  # ranks import it, too
    getattr(importlib.import_module(module), name)()


@pytest.mark.full  # the examples of the documentation start ranks, too
def test_a_rank_that_fails_is_shown_with_its_traceback() -> None:
    with pytest.raises(ProcessRaisedException, match="ZeroDivisionError"):
        run_on_ranks(1, divide, 1, 0)
    assert run_on_ranks(1, divide, 6, 2) == [3.0]


def divide(a: int, b: int) -> float:
    """Quotient of two numbers, on a rank."""
    assert dist.get_world_size() == 1
    return a / b
