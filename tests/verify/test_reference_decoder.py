"""The reference of `verify`: equal to the product's decoder on one device, and apart from it in code."""

from __future__ import annotations

import math
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.score_changes import ScoreChanges
from meshwright.model import attention, rope
from meshwright.model import router as model_router
from meshwright.model.decoder import Decoder
from meshwright.model.mlp import Mlp
from meshwright.model.norm import RmsNorm
from meshwright.model.router import Router
from meshwright.optim import lr_schedule
from meshwright.spec import ModelSpec, MoeSpec, RunSpec
from meshwright.spec.train import TrainSpec
from meshwright.verify.reference.decoder import ReferenceDecoder, ReferenceRouting
from meshwright.verify.reference.optimisers import update
from meshwright.verify.reference.router import router_losses
from meshwright.verify.reference.schedule import rate_of_step
from meshwright.verify.reference.steps import mean_loss
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of
from small_decoders import BLOCKS

SMALL: dict[str, Any] = {
    "preset": None, "layers": 2, "hidden": 24, "ffn": 20, "heads": 4, "kv_heads": 2, "head_dim": 12,
    "vocab_size": 37, "max_seq_len": 40,
}  # fmt: skip
LONG = {"factor": 4.0, "original_max_seq_len": 12}
YARN = {"kind": "yarn", **LONG}
RAMP = {**YARN, "beta_fast": 2.0, "beta_slow": 0.1}
LATENTS = {"kv_heads": 4, "mla": {"q_rank": 10, "kv_rank": 8, "rope_dim": 6, "v_dim": 7}}
DIRECT = {"kv_heads": 4, "mla": {"q_rank": None, "kv_rank": 8, "rope_dim": 8, "v_dim": 12}}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GROUPS = {"router": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "bias": True, "shared_ffn": 8}


def experts(**moe: Any) -> dict[str, Any]:
    return {"moe": {"experts": 8, "top_k": 2, "ffn": 6, **moe}}


FEATURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one key head": {"kv_heads": 1},
    "tied": {"tied": True},
    "layernorm": {"norm": "layernorm"},
    "qwen3": {"qk_norm": True, "head_dim": 8, "norm_eps": 1e-2},
    **BLOCKS,
    "qkv bias": {"qkv_bias": True},
    "output bias": {"out_bias": True},
    "feed-forward bias": {"mlp_bias": True},
    "gelu": {"activation": "gelu", "mlp_bias": True},
    "gelu tanh": {"activation": "gelu_tanh"},
    "learned positions": {"position": "learned"},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "windows in some layers": WINDOWS,
    "windows with a rotary base": {**WINDOWS, "rope_local_base_freq": 100.0, "rope_scaling": RAMP},
    "latents with a rotary base": {
        **LATENTS, **WINDOWS, "rope_local_base_freq": 50.0,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "base frequency": {"rope_theta": 500.0},
    "linear rope": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "llama3 rope": {"rope_scaling": {"kind": "llama3", **LONG, "high_freq_factor": 1.5}},
    "llama3 rope of high turns": {"rope_scaling": {"kind": "llama3", "original_max_seq_len": 4096}},
    "yarn": {"rope_scaling": RAMP},
    "yarn with a fine ramp": {"rope_scaling": {**RAMP, "truncate": False}},
    "yarn without a ramp": {"rope_scaling": {**RAMP, "beta_slow": 2.0, "truncate": False}},
    "yarn's own factor": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    "yarn that shortens": {"rope_scaling": {**YARN, "factor": 0.5, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "latents": LATENTS,
    "latents of keys alone": DIRECT,
    "latents with yarn": {**LATENTS, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "latents with yarn's default": {**DIRECT, "rope_scaling": YARN},
    "softmax router": experts(),
    "router that does not renormalise": experts(renormalise=False, top_k=3, every=2),
    "sigmoid router": experts(router="sigmoid", scale=1.5),
    "groups": experts(**GROUPS, dense_first=1),
    "groups of one": experts(groups=8, top_groups=3, top_k=3),
    "capacity": experts(capacity_factor=0.6, shared_ffn=8),
    "capacity with groups": experts(**GROUPS, capacity_factor=0.9),
    "one expert": experts(top_k=1, renormalise=False),
    "deepseek": {**LATENTS, **experts(**GROUPS)},
}  # fmt: skip


def decoder_of(**model: Any) -> Decoder:
    """A decoder in float64 with no weight at its initial value, so that each of them matters."""
    decoder = Decoder(ModelSpec.model_validate({**SMALL, **model})).double()
    draw = torch.Generator().manual_seed(0)
    for name, tensor in decoder.tensors().items():
        mean = 1.0 if "norm.weight" in name else 0.0
        noise = torch.randn(tensor.shape, generator=draw, dtype=torch.float64)
        tensor.data.copy_(mean + 0.3 * noise)
    return decoder


def samples(lengths: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and document ids (n, T) of sequences of documents of these lengths."""
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in lengths])
    documents = torch.stack(
        [torch.cat([torch.full((size,), number) for number, size in enumerate(row)]) for row in lengths]
    )
    tokens = torch.randint(37, positions.shape, generator=torch.Generator().manual_seed(1))
    return tokens, positions, documents


SAMPLES = samples([[18], [7, 1, 10], [1, 1, 13, 3]])


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Equal to 1e-12 of a tensor's largest value, or of a hundredth of the largest of all."""
    assert ours.keys() == theirs.keys()
    most = {name: float(tensor.detach().abs().max()) for name, tensor in theirs.items()}
    for name, tensor in theirs.items():
        off = float((ours[name] - tensor).detach().abs().max())
        assert off <= 1e-12 * max(most[name], max(most.values()) / 100), name


@pytest.mark.parametrize("feature", FEATURES)
def test_logits_and_gradients_are_those_of_the_decoder(feature: str) -> None:
    decoder = decoder_of(**FEATURES[feature])
    decided: dict[int, model_router.Routing] = {}
    for layer, mixture in decoder.each_mixture():
        mixture.router.register_forward_hook(lambda _m, _x, out, layer=layer: decided.update({layer: out}))
    weights = {name: tensor.detach().clone() for name, tensor in decoder.tensors().items()}
    parameters = {name: weights[name].requires_grad_() for name, _ in decoder.named_parameters()}
    weigh = torch.randn(3, 18, 37, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    theirs = decoder(*SAMPLES)
    ours, routings, _ = ReferenceDecoder(decoder.spec, weights)(*SAMPLES)
    assert_close({"logits": ours}, {"logits": theirs})
    found = torch.autograd.grad((ours * weigh).sum(), list(parameters.values()))
    wanted = torch.autograd.grad((theirs * weigh).sum(), list(decoder.parameters()))
    assert_close(dict(zip(parameters, found, strict=True)), dict(zip(parameters, wanted, strict=True)))

    assert routings.keys() == decided.keys()
    for layer, routing in routings.items():
        other = decided[layer]
        assert_close({"logits": routing.logits.flatten(0, 1)}, {"logits": other.logits})
        assert_close({"scores": routing.scores.flatten(0, 1)}, {"scores": other.scores})
        assert torch.equal(routing.experts.flatten(0, 1), other.experts)
        assert bool(routing.admitted.all()) == ("capacity" not in feature)


@pytest.mark.parametrize("feature", ["qwen3", "latents", "latents of keys alone", "gelu", "groups"])
def test_a_tap_gets_every_module_and_its_gradient(feature: str) -> None:
    """Outputs and their gradients are those that hooks on the decoder's modules see."""
    decoder = decoder_of(**FEATURES[feature])
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Tensor] = {}

    def tap(path: str, x: Tensor) -> Tensor:
        assert path not in ours
        ours[path] = x.clone()  # the copy has a gradient only if it is used from here on
        ours[path].retain_grad()
        return ours[path]

    def watch(path: str, output: Tensor) -> None:
        theirs[path] = output
        output.retain_grad()

    modules = {path: module for path, module in decoder.named_modules() if path not in ("", "blocks")}
    for path, module in modules.items():
        module.register_forward_hook(
            lambda _m, _x, out, path=path: watch(path, out) if isinstance(out, Tensor) else None
        )
    decoder(*SAMPLES).sum().backward()
    predictions = ReferenceDecoder(decoder.spec, decoder.tensors(), tap)(*SAMPLES)
    predictions.logits.sum().backward()
    assert ours.keys() == modules.keys()
    # Rows at the experts are in an order of their own; shared experts are called by their parts.
    comparable = [path for path in theirs if not path.endswith(".experts")]
    called_by_parts = [path for path, module in modules.items() if isinstance(module, Mlp | Router)]
    assert set(modules) - set(theirs) <= set(called_by_parts)
    assert_close({path: ours[path] for path in comparable}, {path: theirs[path] for path in comparable})
    gradients = [{path: side[path].grad for path in comparable} for side in (ours, theirs)]
    assert_close(gradients[0], gradients[1])
    assert all(x.grad is not None for x in ours.values())


SCHEDULES = [
    TrainSpec.model_validate(
        {"steps": 20, "schedule": schedule, "lr_scaling": scaling, "warmup_steps": warmup, **rest}
    )
    for schedule, scaling, warmup, rest in product(
        ("cosine", "linear", "wsd", "constant"),
        ("none", "linear", "sqrt"),
        (None, 0, 7, 20),
        (
            {},
            {"min_lr_ratio": 0.0, "decay_fraction": 0.55, "batch_tokens": 3000, "decay": "1-sqrt"},
            {"min_lr_ratio": 0.0, "decay": "cosine"},
        ),
    )
]


def test_rates_are_those_of_training() -> None:
    for train in SCHEDULES:
        for step in range(1, 21):
            expected = lr_schedule.learning_rate(train, step)
            assert rate_of_step(train, step) == pytest.approx(expected, rel=1e-12, abs=0), (train, step)


def test_adamw_is_pytorchs() -> None:
    train = TrainSpec.model_validate({"lr": 0.1, "warmup_steps": 3, "weight_decay": 0.3})
    draw = torch.Generator().manual_seed(0)
    for shape, decay in (((4, 3), 0.3), ((2, 3, 2), 0.3), ((5,), 0.0)):
        start = torch.randn(shape, generator=draw, dtype=torch.float64)
        ours, theirs = start.clone(), start.clone()
        moments = torch.zeros_like(start), torch.zeros_like(start)
        torch_adam = torch.optim.AdamW([theirs], betas=(0.9, 0.95), weight_decay=decay)
        for number in range(1, 5):
            theirs.grad = torch.randn(shape, generator=draw, dtype=torch.float64)
            torch_adam.param_groups[0]["lr"] = lr_schedule.learning_rate(train, number)
            torch_adam.step()
            update(ours, theirs.grad, moments, train, number)
        state = torch_adam.state[theirs]
        pairs = zip((ours, *moments), (theirs, state["exp_avg"], state["exp_avg_sq"]), strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15)


def test_a_batch_without_targets_has_no_loss() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    loss = mean_loss(logits, torch.full((2, 3), -100))
    (gradient,) = torch.autograd.grad(loss, [logits])
    assert loss.item() == 0 and not gradient.any()
    one = torch.full((2, 3), -100)
    one[1, 2] = 4
    expected = -logits[1, 2].log_softmax(-1)[4].item()
    assert mean_loss(logits, one).item() == pytest.approx(expected, rel=1e-14)


def test_router_losses_are_those_of_python_floats() -> None:
    """7 tokens of 3 copies each: shares of copies that fp32 would round."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 5, generator=draw, dtype=torch.float64)
    scores = logits.sigmoid()
    experts = scores.topk(3).indices
    moe = MoeSpec.model_validate({"experts": 5, "top_k": 3, "ffn": 1, "router": "sigmoid"})
    balance = z = 0.0
    for sequence in range(2):
        for expert in range(5):
            copies = sum(row.count(expert) for row in experts[sequence].tolist())
            shares = [row[expert] / sum(row) for row in scores[sequence].tolist()]
            balance += 5 * copies / (3 * 7) * sum(shares) / 7 / 2
        for row in logits[sequence].tolist():
            z += math.log(sum(map(math.exp, row))) ** 2 / 7 / 2
    found = router_losses(moe, ReferenceRouting(logits, scores, experts, experts >= 0))
    assert [value.item() for value in found] == pytest.approx([balance, z], rel=1e-14)


# Planted mistakes ----------------------------------------------------------------------------------------

frequencies, exact_rms = rope.frequencies, RmsNorm.forward


def see_the_future(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, changes: ScoreChanges) -> Tensor:
    """Attention whose query 3 attends to key 4, too."""
    if mask is None:
        mask = torch.full((1, 1, q.shape[1], k.shape[1]), -torch.inf, dtype=q.dtype).triu_(1)
    seen = mask.clone()
    seen[..., 3, 4] = 0.0
    return blocked_attention(q, k, v, seen, changes)


def turn_as_the_next_channel(*args: Any) -> Tensor:
    return frequencies(*args).roll(1)


def take_the_worst(router: Router, scores: Tensor) -> Tensor:
    return (-scores).topk(router.moe.top_k).indices


def let_some_through(norm: nn.Module, x: Tensor) -> Tensor:
    return exact_rms(norm, x) + 1e-6 * x


def scale_by_the_root(train: TrainSpec, step: int) -> float:
    return train.lr * (train.batch_tokens / train.lr_base_batch_tokens) ** 0.5


MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "a mask that lets a token through": (
        attention,
        "blocked_attention",
        see_the_future,
        "blocks.0.attn",
    ),
    "rotary positions off by a channel": (
        rope,
        "frequencies",
        turn_as_the_next_channel,
        "blocks.0.attn",
    ),
    "the worst experts": (Router, "_choose", take_the_worst, "blocks.1.mlp"),
    "a norm that is off by a millionth": (RmsNorm, "forward", let_some_through, "blocks.0.attn_norm"),
    "a learning rate scaled unasked": (lr_schedule, "peak_rate", scale_by_the_root, "step 1"),
}
"""(where, name, replacement, the name of the first difference)"""


def verify_with(mesh: Mesh, spec: RunSpec, mistake: str) -> dict[str, object] | None:
    where, name, replacement, _ = MISTAKES[mistake]
    with patch.object(where, name, replacement):
        return verify(spec, mesh, 1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_module_is_found(ranks: Ranks, mistake: str) -> None:
    """These stood on both sides, and were equal, while the reference ran the same modules."""
    base = {
        "model.vocab_size": 61, "data.seq_len": 16, "train.batch_tokens": 4 * 16, "train.steps": 3,
        "train.warmup_steps": 1, "layout.dp": 2, "model.moe.experts": 4, "model.moe.top_k": 2,
        "model.moe.ffn": 8, "model.moe.dense_first": 1,
    }  # fmt: skip
    spec = spec_of(base)
    found = ranks.run(spec.layout, verify_with, spec, mistake)[0]
    assert not found["equal"]
    assert found["first"]["name"] == MISTAKES[mistake][3]
