"""Every kernel of the model on a CUDA device against float64 on the CPU, from equal (rounded) inputs.

Bounds come from the format. With unit roundoff u (half of its epsilon) a result that is rounded `times` times
on its way is off by at most times * u, relative to its norm; sums of n terms in fp32 add sqrt(n) * u(fp32)
(Higham and Mary 2019: roundings are independent). Each test says which roundings it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels import cross_entropy
from meshwright.kernels.attention_flash import Packed
from meshwright.kernels.gradient_accumulation_fusion import RunningSum
from meshwright.model.attention import attend, attention_mask
from meshwright.model.attention_mla import LatentAttention
from meshwright.model.chunked_cross_entropy import IGNORE, VocabularyPart, linear_cross_entropy
from meshwright.model.grouped_mm import grouped_mm, grouped_outer
from meshwright.model.hooks import AttentionHooks
from meshwright.model.log_probs import linear_log_probs
from meshwright.model.mlp import _SiluProduct
from meshwright.model.norm import LayerNorm, RmsNorm
from meshwright.model.rope import rope_table, rotate
from meshwright.model.token_dispatcher import RowGroups
from meshwright.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

DEVICE = "cuda"
FORMATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def exact_fp32_products() -> Iterator[None]:
    """No TF32 in what is taken for fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def roundoff(dtype: torch.dtype) -> float:
    """The most that a number is off, relative to itself, when it is rounded to the format."""
    return torch.finfo(dtype).eps / 2


def bound(dtype: torch.dtype, times: float, terms: int = 1) -> float:
    """Bound on a relative error: `times` roundings to the format, and sums of `terms` terms in fp32."""
    return times * roundoff(dtype) + math.sqrt(terms) * roundoff(torch.float32)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differentiated(compute: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """The result and the gradients of all inputs, in float64 on the CPU."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = compute(*leaves)
    found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
    return [x.double().cpu() for x in found]


def both(compute: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> list[float]:
    """Relative errors in norm of the result on the device, and of the gradient of each input."""
    found = differentiated(compute, [x.to(DEVICE) for x in inputs], grad.to(DEVICE))
    exact = differentiated(compute, [x.double() for x in inputs], grad.double())
    return errors(found, exact)


def errors(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [64, 96, 4096])
@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_norms(kind: type[RmsNorm | LayerNorm], size: int, dtype: torch.dtype) -> None:
    """Rounded are the normed input and its product with the weight, or what stands for them backwards."""
    rows = 257
    x, weight = draw(3, rows, size, dtype=dtype, seed=0), draw(size, dtype=dtype, seed=1) + 2
    bias, grad = draw(size, dtype=dtype, seed=2), draw(3, rows, size, dtype=dtype, seed=3)
    names = ("weight", "bias")[: 1 if kind is RmsNorm else 2]
    layer = kind(size, 1e-5)

    def compute(x: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))

    inputs = [x, weight, bias][: 1 + len(names)]
    assert max(both(compute, inputs, grad)) <= bound(dtype, 2, max(size, 3 * rows))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("scaling", [None, {"kind": "llama3", "factor": 8.0, "original_max_seq_len": 2048}])
def test_rope_tables(scaling: dict[str, object] | None, dtype: torch.dtype) -> None:
    """An angle in fp32 is off by some roundoffs of itself: 13 from the exponent times log(theta), a few more
    from the power, the ramp and the product; cosine and sine move no more than their angle."""
    spec = ModelSpec.model_validate(
        {"preset": "llama3-8b", "max_seq_len": 8192 * 8 if scaling else 8192, "rope_scaling": scaling}
    )
    positions, rope = torch.arange(8192), spec.kinds[0].rope
    assert rope is not None
    found = rope_table(rope, positions.to(DEVICE), dtype)
    exact = rope_table(rope, positions, torch.float64)
    most = 32 * roundoff(torch.float32) * positions.double() + 2 * roundoff(dtype)
    for ours, wanted in zip(found, exact, strict=True):
        assert bool(((ours.double().cpu() - wanted).abs() <= most[:, None, None]).all())


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("still", [0, 64])
def test_rope(still: int, dtype: torch.dtype) -> None:
    """Rounded are the product with the cosine, and the sum; a turn keeps the norm. Equal tables are taken."""
    rope = ModelSpec.model_validate({"preset": "llama3-8b"}).kinds[0].rope
    assert rope is not None
    tables = rope_table(rope, torch.arange(333), dtype)
    x, grad = (draw(2, 333, 4, 128 + still, dtype=dtype, seed=seed) for seed in (0, 1))

    def compute(x: Tensor) -> Tensor:
        return rotate(x, (tables[0].to(x), tables[1].to(x)))

    assert max(both(compute, [x], grad)) <= bound(dtype, 2)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_silu_product(dtype: torch.dtype) -> None:
    """Rounded are silu(gate) and the product; backwards grad * up and its product with silu's slope. In fp32
    the exponential is off by some roundoffs more."""
    gate, up, grad = (draw(333, 1001, dtype=dtype, seed=seed) for seed in range(3))
    assert max(both(_SiluProduct.apply, [gate, up], grad)) <= bound(dtype, 2, 16)


@pytest.mark.parametrize("sizes", [(32, 0, 16, 208, 0, 48), (16,), (0, 0, 512)], ids=str)
def test_grouped_products(sizes: tuple[int, ...]) -> None:
    """One rounding, of the result: products of bf16 are exact in fp32, and are added there."""
    rows, outputs, inputs, dtype = sum(sizes), 192, 320, torch.bfloat16
    x, grad = draw(rows, inputs, dtype=dtype, seed=0), draw(rows, outputs, dtype=dtype, seed=1)
    maps = draw(len(sizes), outputs, inputs, dtype=dtype, seed=2)
    groups = RowGroups(torch.tensor(sizes).cumsum(0, dtype=torch.int32), sizes)
    there = groups._replace(ends=groups.ends.to(DEVICE), sizes=None)
    for compute, *given in (
        (grouped_mm, x, maps),
        (lambda x, maps, groups: grouped_mm(x, maps.mT, groups), grad, maps),
        (grouped_outer, grad, x),
    ):
        found = compute(*(tensor.to(DEVICE) for tensor in given), there).double().cpu()
        exact = compute(*(tensor.double() for tensor in given), groups)
        assert errors([found], [exact])[0] <= bound(dtype, 1, max(*sizes, inputs)), compute
    empty = [expert for expert, size in enumerate(sizes) if not size]
    assert bool((grouped_outer(grad.to(DEVICE), x.to(DEVICE), there)[empty] == 0).all())


# The loss -------------------------------------------------------------------------------------------------


def case_of_loss(
    tokens: int, dtype: torch.dtype, vocabulary: int = 1003, spread: float = 1.0
) -> tuple[list[Tensor], Tensor]:
    """([x, weight], targets): logits of about `spread`, some targets to ignore."""
    hidden = 96
    x = (draw(tokens, hidden, dtype=torch.float32, seed=0) * spread).to(dtype)
    weight = (draw(vocabulary, hidden, dtype=torch.float32, seed=1) / math.sqrt(hidden)).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))
    targets[::7] = IGNORE
    return [x, weight], targets


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("rows_apart", [False, True])
def test_sums_of_products(dtype: torch.dtype, rows_apart: bool) -> None:
    """Gradients of four microbatches, in fp32: no product is rounded to the format of its operands."""
    tokens, outputs, inputs = 512, 96, 160
    room = torch.full((outputs, inputs + 32 * rows_apart), float("nan"), device=DEVICE)
    total, exact = room[:, :inputs], torch.zeros(outputs, inputs, dtype=torch.float64)
    for number in range(4):
        grad = draw(tokens, outputs, dtype=dtype, seed=2 * number)
        x = draw(tokens, inputs, dtype=dtype, seed=2 * number + 1)
        RunningSum(total, number > 0).add_product(grad.to(DEVICE).T, x.to(DEVICE))
        exact += grad.double().T @ x.double()
    assert float((total.cpu() - exact).norm() / exact.norm()) < bound(dtype, 0, 4 * tokens)
    assert room[:, inputs:].isnan().all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("chunk", [64, 100, None])
def test_chunked_cross_entropy(chunk: int | None, dtype: torch.dtype) -> None:
    """A logit l is off by |l| u, which its probability is then relative to itself, once more for the sum of
    all exponentials; the slope by the logits, the product and its sum over chunks are rounded too."""
    tokens = 777
    inputs, targets = case_of_loss(tokens, dtype)
    scale = 1 / int((targets != IGNORE).sum())

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets.to(x.device), chunk=chunk, scale=scale)

    largest = float((inputs[0].double() @ inputs[1].double().T).abs().max())
    chunks = 1 if chunk is None else -(-tokens // chunk)
    most = bound(dtype, 2 * largest + 2 + math.sqrt(chunks), tokens)
    assert max(both(compute, inputs, torch.tensor(1.0))) <= most


@pytest.mark.parametrize("softcap", [None, 8.0])
@pytest.mark.parametrize("vocabulary", [31, 1003, 50257, 128256])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_kernel_of_the_loss(dtype: torch.dtype, vocabulary: int, softcap: float | None) -> None:
    """Losses and gradients of the same logits: those are off by some roundoffs of fp32 for each unit of the
    largest logit, and gradients are rounded once."""
    logits = draw(17, vocabulary, dtype=dtype, seed=0) * 3
    targets = torch.randint(0, vocabulary, (17,), generator=torch.Generator().manual_seed(2))
    targets[::7] = IGNORE
    assert cross_entropy.takes(logits.to(DEVICE))
    exact = logits.double().requires_grad_()
    capped = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    losses = F.cross_entropy(capped, targets, ignore_index=IGNORE, reduction="none")
    (wanted,) = torch.autograd.grad(losses.sum() / 8, exact)
    found = logits.to(DEVICE)
    ours = cross_entropy.cross_entropy_(found, targets.to(DEVICE), IGNORE, 1 / 8, softcap)
    roundings = 16 + 8 * float(capped.abs().max())
    assert float((ours.double().cpu() - losses).abs().max()) <= roundings * roundoff(torch.float32)
    relative = roundoff(dtype) + roundings * roundoff(torch.float32)
    assert errors([found.double().cpu()], [wanted])[0] <= relative


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("head", ["loss", "log-probabilities"])
def test_parts_of_a_vocabulary(head: str, dtype: torch.dtype) -> None:
    """The roundings of `test_chunked_cross_entropy`, and of both parts' shares of the gradient of x."""
    (x, weight), targets = case_of_loss(777, dtype)
    rows = [weight[:600], torch.cat([weight[600:], weight[:5]])]
    parts = [(0, 600), (600, 403)]

    def found(device: str, dtype: torch.dtype) -> list[Tensor]:
        sent: list[list[Tensor]] = [[], []]
        heads = [_PartOfHead(head, first, size, rank) for rank, (first, size) in enumerate(parts)]
        given = [(x.to(device, dtype), each.to(device, dtype), targets.to(device)) for each in rows]
        for each, inputs, numbers in zip(heads, given, sent, strict=True):
            each(inputs, lambda own, numbers=numbers: numbers.append(own.clone()) or torch.stack([own, own]))
        both = [torch.stack(numbers) for numbers in zip(*sent, strict=True)]
        got = [each(inputs, partial(_next, iter(both))) for each, inputs in zip(heads, given, strict=True)]
        (loss, of_x, first), (_, of_x_too, second) = ([y.double().cpu() for y in each] for each in got)
        return [loss, of_x + of_x_too, first, second]

    largest = float((x.double() @ weight.double().T).abs().max())
    most = bound(dtype, 2 * largest + 4, 777)
    assert max(errors(found(DEVICE, dtype), found("cpu", torch.float64))) <= most


class _PartOfHead:
    """One rank's loss, or weighted sum of log-probabilities and entropies, and its gradients."""

    def __init__(self, head: str, first: int, rows: int, rank: int) -> None:
        self._head, self._place, self._rank = head, (first, rows), rank

    def __call__(self, inputs: tuple[Tensor, ...], gather: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs[:2]]
        part = VocabularyPart(*self._place, gather, self._rank, 2)
        if self._head == "loss":
            out = linear_cross_entropy(*leaves, inputs[2], part=part, scale=1 / 512)
        else:
            both = torch.cat(linear_log_probs(*leaves, inputs[2], part=part, entropy=True))
            out = both @ (2 + torch.arange(len(both), device=both.device).cos()).to(both.dtype) / 512
        return [out.detach(), *torch.autograd.grad(out, leaves)]


def _next(received: Iterator[Tensor], _own: Tensor) -> Tensor:
    return next(received)


def test_a_gradient_is_multiplied_in_place() -> None:
    x, by = draw(5000, dtype=torch.bfloat16, seed=0), torch.tensor(0.37)
    for factor in (by, torch.tensor(1.0)):
        found = x.to(DEVICE, copy=True)
        cross_entropy.multiply_(found, factor.to(DEVICE))
        assert torch.equal(found.cpu(), (x.float() * factor).bfloat16())


@pytest.mark.parametrize("tokens", [691, 777, 1201])
def test_slope_of_gradients_of_a_mean(tokens: int) -> None:
    """The gradients' slope on the exact ones is 1, also where 1/N is far from any number of the format.

    What is rounded element by element cancels, where elements differ: targets' probabilities are anywhere
    between 0 and 1 here. A scale that is rounded itself shifts the slope by as much.
    """
    dtype = torch.bfloat16
    inputs, targets = case_of_loss(tokens, dtype, vocabulary=11, spread=2.0)
    scale = 1 / int((targets != IGNORE).sum())
    shifted = abs(float(torch.tensor(scale, dtype=dtype)) / scale - 1)
    assert shifted > roundoff(dtype) / 5  # which the bound below would not pass

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight, targets.to(x.device), scale=scale)

    grad = torch.tensor(1.0)
    found = differentiated(compute, [x.to(DEVICE) for x in inputs], grad.to(DEVICE))
    exact = differentiated(compute, [x.double() for x in inputs], grad.double())
    for ours, wanted in zip(found, exact, strict=True):
        slope = float((ours * wanted).sum() / wanted.square().sum())
        assert abs(slope - 1) <= roundoff(dtype) / 8


# Attention ------------------------------------------------------------------------------------------------

OUT, GRADIENTS = 2, 4
"""Roundings of attention: the probabilities and the result; backwards the probabilities or their slopes, the
output that the row products are made of, its gradient's product, and the result."""


def documents_of(length: int, chance: float | None) -> Tensor | None:
    make = torch.Generator().manual_seed(1)
    return None if chance is None else (torch.rand(2, length, generator=make) < chance).cumsum(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (192, 128), (96, 64)])
@pytest.mark.parametrize(("chance", "window"), [(None, None), (0.02, None), (None, 100), (0.02, 33)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_attention(
    kv_heads: int, chance: float | None, window: int | None, dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Causal, over packed documents, with windows, and with values narrower than keys."""
    length, heads = 512 + 77, 4
    shapes = [(heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)]
    *inputs, grad = (draw(2, length, *s, dtype=dtype, seed=seed) for seed, s in enumerate(shapes))
    documents = documents_of(length, chance)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = attention_mask(length, length, window, documents, q, dim)
        plain = chance is None and window is None
        assert plain or isinstance(mask, Packed) == (q.device.type == "cuda")
        return attend(q, k, v, mask)

    out, *gradients = both(compute, inputs, grad)
    assert out <= bound(dtype, OUT, length)
    assert max(gradients) <= bound(dtype, GRADIENTS, length), gradients


@pytest.mark.parametrize("chance", [None, 0.02])
@pytest.mark.parametrize("q_rank", [None, 96])
def test_latent_attention(q_rank: int | None, chance: float | None) -> None:
    """A whole layer: at most 8 maps, norms and turns before the attention, each rounded, and one after it,
    which the backward passes once more."""
    length, dtype = 300, torch.bfloat16
    mla = {"q_rank": q_rank, "kv_rank": 64, "rope_dim": 32, "v_dim": 64}
    spec = ModelSpec.model_validate({
        "preset": None, "layers": 1, "hidden": 256, "ffn": 8, "heads": 4, "head_dim": 96, "vocab_size": 9,
        "mla": mla,
    })  # fmt: skip
    exact, turning = LatentAttention(spec, spec.kinds[0], AttentionHooks()), spec.kinds[0].rope
    assert turning is not None
    for seed, parameter in enumerate(exact.parameters()):
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data = (
                draw(*parameter.shape, dtype=torch.float32, seed=seed) / parameter.shape[1] ** 0.5
            )
    exact = exact.to(dtype)
    names = [name for name, _ in exact.named_parameters()]
    documents = documents_of(length, chance)

    def compute(x: Tensor, *weights: Tensor) -> Tensor:
        rope = rope_table(turning, torch.arange(length, device=x.device), x.dtype)
        mask = attention_mask(length, length, None, documents, x, spec.head_dim)
        given = (x, rope, mask)
        return torch.func.functional_call(exact, dict(zip(names, weights, strict=True)), given)

    inputs = [draw(2, length, 256, dtype=dtype, seed=90), *(p.data for p in exact.parameters())]
    grad = draw(2, length, 256, dtype=dtype, seed=91)
    out, *gradients = both(compute, inputs, grad)
    assert out <= bound(dtype, 8 + OUT + 1, length)
    assert max(gradients) <= bound(dtype, 2 * (8 + GRADIENTS + 1), 2 * length), gradients


def test_plain_attention_takes_no_more_memory_than_its_tensors() -> None:
    """The scores of a long sequence are never there: flash attention, forward and backward."""
    length, heads = 8192, 8
    q, k, v, grad = (torch.randn(1, length, heads, 64, device=DEVICE).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(attend(*leaves, None), leaves, grad)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < heads * length * length  # half a byte for each score in bf16 would be more


def test_gelu() -> None:
    """GPT's activation is torch's own: one rounding each way, and some roundoffs of tanh in fp32."""
    x, grad = (draw(333, 1001, dtype=torch.bfloat16, seed=seed) for seed in range(2))
    assert max(both(lambda x: F.gelu(x, approximate="tanh"), [x], grad)) <= bound(torch.bfloat16, 1, 16)
