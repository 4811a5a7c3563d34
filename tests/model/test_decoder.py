"""The decoder: what it computes does not depend on packing, dtype or device of construction."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshwright.kernels import elementwise_cpu
from meshwright.model.decoder import Decoder
from meshwright.model.init import init_whole_
from meshwright.model.norm import LayerNorm, RmsNorm
from meshwright.model.router import Router
from meshwright.spec import ModelSpec
from meshwright.spec.presets import PRESETS
from small_decoders import BLOCKS

SMALL = {
    "preset": None, "layers": 2, "hidden": 48, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
    "vocab_size": 97, "max_seq_len": 64, "init_std": 0.2,
}  # fmt: skip
GPT = {
    "norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "qkv_bias": True, "out_bias": True,
    "mlp_bias": True, "tied": True,
}  # fmt: skip
SHAPES = {
    "llama": {},
    "tied": {"tied": True},
    "qwen": {"qk_norm": True},
    "window": {"sliding_window": 5},
    "windows": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_local_base_freq": 100.0,
    },
    "linear rope": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "llama3 rope": {"rope_scaling": {"kind": "llama3", "original_max_seq_len": 16}},
    **BLOCKS,
    "gpt": GPT,
    "latents": {"kv_heads": 4, "mla": {"q_rank": 12, "kv_rank": 8, "rope_dim": 6, "v_dim": 10}},
}


def make(shape: str = "llama", dtype: torch.dtype = torch.float64) -> Decoder:
    return init_whole_(Decoder(ModelSpec.model_validate(SMALL | SHAPES[shape])).to(dtype), seed=0)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_is_the_cross_entropy_of_the_logits(shape: str) -> None:
    decoder, x, targets = make(shape), tokens(2, 20), tokens(2, 20, seed=1)
    targets[:, ::4] = -100
    expected = F.cross_entropy(decoder(x).flatten(0, 1), targets.flatten(), reduction="sum")
    names, parameters = zip(*decoder.named_parameters(), strict=True)
    wanted = torch.autograd.grad(expected, parameters)
    loss = decoder.loss(x, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, found, grad in zip(names, torch.autograd.grad(loss, parameters), wanted, strict=True):
        torch.testing.assert_close(found, grad, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_loss(shape: str) -> None:
    """Every hand-written backward at once, against central differences along random directions."""
    decoder, x, targets = make(shape), tokens(2, 12), tokens(2, 12, seed=1)
    for parameter in decoder.parameters():  # norms of one and biases of zero would hide mistakes
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    decoder.loss(x, targets).backward()
    for seed, (name, parameter) in enumerate(decoder.named_parameters()):
        direction = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        losses = []
        with torch.no_grad():
            for step in (1e-5, -2e-5):
                parameter.add_(direction, alpha=step)
                losses.append(float(decoder.loss(x, targets)))
            parameter.add_(direction, alpha=1e-5)
        slope = (losses[0] - losses[1]) / 2e-5
        assert float((parameter.grad * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_documents_equal_each_alone(shape: str) -> None:
    decoder = make(shape)
    lengths = (1, 9, 14)
    x = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    packed = decoder(x, positions, documents)
    alone = torch.cat([decoder(part) for part in x.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-11, atol=1e-11)
    both = decoder(x.repeat(2, 1), positions.repeat(2, 1), torch.cat([documents, documents * 0]))
    torch.testing.assert_close(both[:1], alone, rtol=1e-11, atol=1e-11)
    assert not torch.allclose(both[1:], alone), "without boundaries, documents see each other"


@pytest.mark.parametrize("shape", SHAPES)
def test_no_position_sees_a_later_one(shape: str) -> None:
    decoder, x = make(shape), tokens(1, 16)
    changed = x.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 97
    before, after = decoder(x), decoder(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_that_the_spec_counts(preset: str) -> None:
    spec = ModelSpec(preset=preset)
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == spec.parameters


@pytest.mark.parametrize("shape", ["llama", "gpt", "latents"])
def test_flops_are_those_that_torch_counts(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's operators: those of kernels in C++ are not seen, but for attention's."""
    monkeypatch.setattr(elementwise_cpu, "takes", lambda *_: False)
    decoder, x = make(shape, torch.float32), tokens(2, 32)
    with FlopCounterMode(display=False) as counter:
        decoder.loss(x, x).backward()
    # What the model does not count: our attention's backward computes the scores again, which is one matmul,
    # and RMSNorm's takes a scalar product for each token and one for each channel.
    spec = decoder.spec
    again = 2 * spec.layers * spec.heads * spec.head_dim * 32
    norms = 4 * spec.hidden * (2 * spec.layers + 1) if spec.norm == "rmsnorm" else 0
    norms += 4 * spec.layers * (12 + 8) if spec.mla is not None else 0
    assert counter.get_total_flops() == (spec.flops_per_token(32) + again + norms) * x.numel()


def test_flops_of_experts_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs count only the experts that a token takes; routed evenly, so that no rows are padded."""

    monkeypatch.setattr(elementwise_cpu, "takes", lambda *_: False)

    def choose(router: Router, scores_NE: Tensor) -> Tensor:
        return torch.arange(2 * len(scores_NE)).view(-1, 2) % router.moe.experts

    monkeypatch.setattr(Router, "_choose", choose)
    moe = {"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 40, "dense_first": 1}
    spec = ModelSpec.model_validate(SMALL | {"moe": moe})
    decoder, x = init_whole_(Decoder(spec), seed=0), tokens(2, 32)
    with FlopCounterMode(display=False) as counter:
        decoder.loss(x, x).backward()
    again = 2 * spec.layers * spec.heads * spec.head_dim * 32  # as above
    norms = 4 * spec.hidden * (2 * spec.layers + 1)
    assert counter.get_total_flops() == (spec.flops_per_token(32) + again + norms) * x.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_the_parameters(dtype: torch.dtype) -> None:
    exact, low = make(), make(dtype=dtype)
    x = tokens(2, 24)
    with torch.no_grad():
        logits, wanted = low(x), exact(x)
    assert logits.dtype == dtype
    assert float((logits.double() - wanted).norm() / wanted.norm()) < 0.03
    loss = low.loss(x, x)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(parameter.grad.dtype == dtype for parameter in low.parameters())


def test_a_tied_weight_is_one_parameter() -> None:
    decoder = make("tied")
    assert decoder.head.weight is decoder.embed.weight
    assert "head.weight" not in dict(decoder.named_parameters())


def test_recomputed_blocks_give_the_same_gradients_bitwise() -> None:
    x, grads = tokens(2, 16), []
    for recompute in (False, True):
        decoder = make()
        if recompute:
            for block in decoder.blocks:
                block.forward = lambda *a, run=block.forward: checkpoint(run, *a, use_reentrant=False)
        decoder.loss(x, x).backward()
        grads.append([parameter.grad for parameter in decoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_units_touch_their_parameters_only_when_called() -> None:
    """Parameters that exist only inside their unit's call (as gathered ones do) suffice for a forward."""
    decoder, x = make(), tokens(1, 8)
    with torch.no_grad():  # torch's RMSNorm rounds otherwise with gradients, on processors with AVX2 at most
        expected = decoder.loss(x, x)
    units = [decoder.embed, *decoder.blocks, decoder.head]
    values = {parameter: parameter.data.clone() for parameter in decoder.parameters()}

    def fill(unit, _args) -> None:
        for parameter in unit.parameters():
            parameter.data.copy_(values[parameter])

    def spoil(unit, *_args) -> None:
        for parameter in unit.parameters():
            parameter.data.fill_(float("nan"))

    for unit in units:
        spoil(unit)
        unit.register_forward_pre_hook(fill)
        unit.register_forward_hook(spoil)
    with torch.no_grad():
        assert torch.equal(decoder.loss(x, x), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_equal_torchs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(16, generator=generator, dtype=torch.float64).to(dtype)
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    norm = RmsNorm(16, 1e-5).to(dtype)
    norm.weight.data.copy_(weight)
    exact = F.rms_norm(x.detach().double().requires_grad_(), (16,), weight.double().requires_grad_(), 1e-5)
    torch.testing.assert_close(norm(x).double(), exact, rtol=bound, atol=bound)
    x64, weight64 = x.detach().double().requires_grad_(), weight.double().requires_grad_()
    F.rms_norm(x64, (16,), weight64, 1e-5).square().sum().backward()
    norm(x).square().sum().backward()
    scale = float(weight64.grad.abs().max())
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=bound, atol=bound * 10)
    torch.testing.assert_close(norm.weight.grad.double(), weight64.grad, rtol=bound, atol=bound * scale)
    assert LayerNorm(16, 1e-5).to(dtype)(x).dtype == dtype
