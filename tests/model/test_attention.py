"""Attention: the CPU operator, torch's kernels and the definition agree; masks hide what they say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from attention_cases import by_definition
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.model.attention import attend, attention_mask, sdpa


def draw(
    batch: int, queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype, v_dim: int = 16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = [(batch, queries, heads, 16), (batch, keys, kv_heads, 16), (batch, keys, kv_heads, v_dim)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes
    ]


def visible(queries: int, keys: int, window: int | None, documents: Tensor | None, batch: int) -> Tensor:
    """Position by position, as the mask's docstring says it."""
    seen = torch.zeros(batch, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for t in range(queries):
            at = keys - queries + t
            for s in range(keys):
                near = window is None or at - s < window
                same = documents is None or bool(documents[b, at] == documents[b, s])
                seen[b, t, s] = s <= at and near and same
    return seen


DOCUMENTS = torch.tensor([[7] * 20 + [8] * 1 + [9] * 49, [1] * 70])
CASES = {
    "causal": (70, 70, None, None),
    "window": (70, 70, 9, None),
    "window of one": (70, 70, 1, None),
    "documents": (70, 70, None, DOCUMENTS),
    "documents and window": (70, 70, 5, DOCUMENTS),
    "cached": (7, 70, None, None),
    "cached window": (7, 70, 9, None),
    "one query": (1, 70, None, None),
    "one position": (1, 1, None, None),
}


@pytest.mark.parametrize("kernel", [blocked_attention, sdpa], ids=["blocked", "sdpa"])
@pytest.mark.parametrize(("kv_heads", "v_dim"), [(1, 16), (2, 16), (4, 16), (1, 12), (4, 8)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_definition(kernel, kv_heads: int, v_dim: int, case: str) -> None:
    queries, keys, window, documents = CASES[case]
    inputs = draw(2, queries, keys, 4, kv_heads, torch.float64, v_dim)
    mask = attention_mask(queries, keys, window, documents, like=inputs[0])
    expected = by_definition(*inputs, visible(queries, keys, window, documents, 2))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    found = kernel(*inputs, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for grad, wanted in zip(
        torch.autograd.grad((found * weights).sum(), inputs), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 257, 300])
def test_blocks_of_any_length_join(length: int) -> None:
    """Lengths around the block sizes (32 to 256 queries)."""
    inputs = draw(1, length, length, 2, 1, torch.float64)
    expected = sdpa(*inputs, None)
    torch.testing.assert_close(blocked_attention(*inputs, None), expected, rtol=1e-12, atol=1e-12)


def test_bf16_is_as_exact_as_torchs_kernel() -> None:
    """Against float64 on the same bf16 inputs: within twice the error of torch's flash kernel."""
    inputs = draw(2, 128, 128, 4, 2, torch.bfloat16)
    exact = sdpa(*(x.detach().double() for x in inputs), None)

    def error(out: Tensor) -> float:
        return float((out.detach().double() - exact).norm() / exact.norm())

    assert error(attend(*inputs, None)) < 2.5 * error(sdpa(*inputs, None))


def test_plain_causal_needs_no_mask() -> None:
    like = torch.empty(())
    one_document_each = torch.tensor([[3, 3, 3, 3], [5, 5, 5, 5]])
    assert attention_mask(4, 4, None, None, like) is None
    assert attention_mask(4, 4, 4, None, like) is None
    assert attention_mask(4, 4, None, one_document_each, like) is None
    assert attention_mask(4, 4, 3, one_document_each, like) is not None


@pytest.mark.parametrize(
    ("dtype", "v_dim"),
    [
        pytest.param(torch.float32, 16, marks=pytest.mark.full),
        (torch.bfloat16, 16),
        (torch.float32, 8),
    ],
)
def test_operators_are_as_their_fakes_say(dtype: torch.dtype, v_dim: int) -> None:
    """Shapes, strides and dtypes of both operators, which the dry run and torch.compile rely on."""
    inputs = draw(2, 8, 8, 4, 2, dtype, v_dim)
    mask = attention_mask(8, 8, 3, None, like=inputs[0])
    forward = torch.ops.meshwright.blocked_attention.default
    backward = torch.ops.meshwright.blocked_attention_backward.default
    sinks = torch.ones(4, dtype=dtype, requires_grad=True)
    for added, changes in ((None, (None, None)), (mask, (None, None)), (mask, (sinks, 2.0))):
        torch.library.opcheck(forward, (*inputs, added, *changes))
        plain, (its_sinks, softcap) = [x.detach() for x in inputs], changes
        given = plain, added, None if its_sinks is None else its_sinks.detach(), softcap
        grad = torch.ones(2, 8, 4, v_dim, dtype=dtype)
        found = forward(*given[0], *given[1:])
        torch.library.opcheck(backward, (*given[0], *given[1:], *found, grad))


def test_operator_counts_its_flops() -> None:
    inputs = draw(1, 8, 8, 2, 1, torch.float32)
    with FlopCounterMode(display=False) as counter:
        blocked_attention(*inputs, None).sum().backward()
    square = 8 * 8 * 2 * 16
    assert counter.get_total_flops() == 4 * square + 10 * square
