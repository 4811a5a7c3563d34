"""Moments in 8 bits: equal to torchao's bit for bit, and to one device's under every layout."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.optim.adam import AdamW8bit as AdamW8bitOfTorchao
from torchao.optim.adam import single_param_adam
from torchao.optim.quant_utils import (
    create_dynamic_map,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)
from torchao.optim.subclass_8bit import OptimState8bit

from covering import marked
from meshwright.checkpoint.gather_full import gather_full
from meshwright.checkpoint.store import CheckpointStore
from meshwright.comm.mesh import Mesh
from meshwright.optim.eight_bit import SIGNED, UNSIGNED, DynamicMap, dequantised
from meshwright.spec import Layout, ModelSpec, RunSpec
from meshwright.spec.eight_bit import block_of
from meshwright.spec.low_precision_rules import breaks
from meshwright.spec.parameters import expert_piece, parameters, piece_of
from meshwright.spec.rules import tensor_axis_divides
from meshwright.train import state
from meshwright.train.step import Trainer
from ranks import Ranks
from small import spec_of

MAPS = {True: SIGNED, False: UNSIGNED}


@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_are_torchaos(signed: bool) -> None:
    assert MAPS[signed] == tuple(create_dynamic_map(signed))
    values = torch.tensor(MAPS[signed])
    draw = torch.Generator().manual_seed(1)
    numbers = torch.randn(300, 256, generator=draw) * 10 ** (3 * torch.randn(300, 256, generator=draw))
    numbers = numbers if signed else numbers.square()
    numbers[3] = 0
    numbers[4, :128] = numbers[4, 128:]
    middles = (values[1:] + values[:-1]) / 2
    numbers[5], numbers[5, 0] = F.pad(middles, (1, 0), value=1.0), 1.0  # ties
    near = torch.cat([middles * (1 + k * 2**-24) for k in range(-5, 6)]).clip(max=1)
    numbers[6:17, 1:] = near.view(11, 255)
    numbers[6:17, 0] = 1
    codes, scale = DynamicMap.make(MAPS[signed], torch.float32, values.device).quantised(numbers)
    theirs, their_scale = scale_tensor(numbers, 256)
    assert torch.equal(scale, their_scale.view(-1))
    assert torch.equal(codes, quantize_8bit_with_qmap(theirs, values))
    assert torch.equal(dequantised(codes, scale, values), dequant_with_qmap(codes, values, scale))


def gradients(shapes: dict[str, tuple[int, ...]], step: int) -> dict[str, Tensor]:
    """A gradient of each parameter, which is a function of its name and the step alone."""
    made = {}
    for key, shape in shapes.items():
        draw = torch.Generator().manual_seed(zlib.crc32(f"{key} {step}".encode()))
        made[key] = torch.randn(shape, generator=draw) * 10 ** torch.randn(shape, generator=draw)
    return made


def take_steps(trainer: Trainer, first: int, count: int) -> None:
    """Optimiser steps from gradients that do not depend on the layout."""
    for step in range(first, first + count):
        for unit in trainer.states.units:
            flat = torch.zeros_like(unit.stored)
            whole = gradients({slot.key: slot.global_shape for slot in unit.slots}, step)
            for slot in unit.slots:
                own = whole[slot.key]
                for dim, (start, size) in enumerate(zip(*slot.rectangle, strict=True)):
                    own = own.narrow(
                        dim, min(start, own.shape[dim]), max(0, min(size, own.shape[dim] - start))
                    )
                view = unit.local(flat, slot)
                view[tuple(slice(0, size) for size in own.shape)].copy_(own)
            unit.set_gradient(flat)
        trainer.optimiser.step(1e-2)
        trainer.states.end_step()


def states_of(mesh: Mesh, spec: RunSpec, folders: list[Path] | None = None) -> dict[str, Tensor]:
    """Every state after 3 steps; or with folders after one more than the first holds, saved to the last."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    if folders is None:
        take_steps(trainer, 1, 3)
    else:
        *load, save = folders
        for folder in load:
            store = CheckpointStore(folder, 1, mesh.background, wire=mesh.wire)
            kept = store.load(None, state.tensors(trainer))
            trainer.optimiser.resume(int(kept["updates"]))
        take_steps(trainer, trainer.optimiser.updates + 1, 1)
        store = CheckpointStore(save, 1, mesh.background, wire=mesh.wire)
        store.claim()
        store.save(trainer.optimiser.updates, state.tensors(trainer), {"updates": trainer.optimiser.updates})
        store.close()
    return gather_full(state.tensors(trainer).items(), mesh)


BASE = {
    "model.heads": 8, "model.head_dim": 4, "model.vocab_size": 61, "data.seq_len": 32,
    "train.batch_tokens": 8 * 32, "layout.micro_batch": 1, "train.optimiser": "adamw8bit",
    "model.ffn": 96, "model.hidden": 48,
}  # fmt: skip
EXPERTS = {"model__moe__experts": 8, "model__moe__top_k": 2, "model__moe__ffn": 24}
LAYOUTS: list[dict[str, object]] = [
    *({"layout__dp": 4, "layout__zero": zero} for zero in range(4)),
    {"layout__dp": 2, "layout__tp": 4, "layout__zero": 3},
    {"layout__tp": 8},
    {"layout__cp": 2, "layout__dp": 2, "layout__replicate": 2, "layout__zero": 2},
    {"layout__pp": 2, "layout__tp": 2, "layout__dp": 2, "layout__zero": 1, "model__tied": "true"},
    {"layout__dp": 4, "layout__ep": 2, "layout__zero": 3, **EXPERTS},
    {"layout__dp": 2, "layout__tp": 2, "layout__ep": 2, "layout__etp": 2, "layout__zero": 2, **EXPERTS},
]


@pytest.mark.parametrize("flags", marked(LAYOUTS, [LAYOUTS[number] for number in (1, 3, 6, 8)]))
def test_codes_and_scales_are_those_of_one_device_to_the_bit(ranks: Ranks, flags: dict[str, object]) -> None:
    spec = spec_of(BASE, **flags)
    alone = spec_of(BASE, **{key: value for key, value in flags.items() if "layout" not in key})
    wanted = ranks.run(alone.layout, states_of, alone)[0]
    found = ranks.run(spec.layout, states_of, spec)[0]
    assert found.keys() == wanted.keys()
    assert found["optim/exp_avg/blocks.0.attn.o.weight"].dtype is torch.uint8
    for key, tensor in wanted.items():
        if tensor.ndim >= 2:
            assert torch.equal(found[key], tensor), key
        else:  # fused kernels round the last numbers of a buffer another way than those before
            torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_moves_between_layouts_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    there = [spec_of(BASE, **layout) for layout in ({"layout__dp": 2, "layout__zero": 3}, {"layout__tp": 2})]
    wanted = ranks.run(Layout(), states_of, spec_of(BASE))[0]
    folders: list[Path] = []
    for number, spec in enumerate((there[0], there[1], there[0])):
        saved = tmp_path / str(number)
        found = ranks.run(spec.layout, states_of, spec, [*folders[-1:], saved])[0]
        folders.append(saved)
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())


def test_a_step_is_torchaos(ranks: Ranks) -> None:
    """Codes and scales to the bit, parameters but for the order of roundings."""
    spec = spec_of(BASE, train__eps=1e-6)
    key, train = "blocks.0.mlp.up.weight", spec.train
    found = ranks.run(spec.layout, states_of, spec)[0]
    shape = tuple(found[f"model/{key}"].shape)
    trainer_start = ranks.run(spec.layout, initial, spec, key)[0]
    block = shape[1] * shape[0] // found[f"optim/exp_avg_scale/{key}"].numel()
    first, second = (OptimState8bit.zeros(shape, signed, block) for signed in (True, False))
    theirs = trainer_start.clone()
    for step in (1, 2, 3):
        gradient = gradients({key: shape}, step)[key]
        rate, count = torch.tensor(1e-2), torch.tensor(float(step))
        single_param_adam(
            theirs, gradient, count, first, second, None, rate, train.beta1, train.beta2,
            train.weight_decay, train.eps, True, False,
        )  # fmt: skip
    for kind, held in (("exp_avg", first), ("exp_avg_sq", second)):
        assert torch.equal(found[f"optim/{kind}/{key}"], held.codes)
        assert torch.equal(found[f"optim/{kind}_scale/{key}"].flatten(), held.scale)
    torch.testing.assert_close(found[f"model/{key}"], theirs, rtol=1e-5, atol=1e-7)


def initial(mesh: Mesh, spec: RunSpec, key: str) -> Tensor:
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    return gather_full(state.tensors(trainer).items(), mesh)[f"model/{key}"]


PRESETS = ("tiny", "small", "llama3-8b", "llama3-70b", "qwen3-235b-a22b", "deepseek-v3")


@pytest.mark.parametrize("preset", PRESETS)
def test_no_tensor_axis_cuts_a_block(preset: str) -> None:
    model = ModelSpec(preset=preset)
    for tp in range(1, model.heads + 1):
        spec = RunSpec.model_construct(model=model, layout=Layout(tp=tp))
        if breaks(tensor_axis_divides, spec):
            continue
        for unit in parameters(model).values():
            for each in (p for p in unit if len(p.shape) >= 2):
                piece = (
                    expert_piece(each, 1, 8, 3) if each.expert else piece_of(each, model, tp, tp - 1, True)
                )
                block = block_of(each, model.heads)
                assert piece.local_shape[-1] % block == piece.offset[-1] % block == 0, (tp, each.name)
                if preset not in ("tiny", "small") and ".shared." not in each.name:
                    assert block >= 64, each.name


def test_torchaos_blocks_are_as_large() -> None:
    theirs = AdamW8bitOfTorchao([torch.zeros(64, 128)])
    model = ModelSpec(preset="llama3-8b")
    gate = next(p for p in parameters(model)["blocks.0"] if p.name.endswith("gate.weight"))
    assert block_of(gate, model.heads) == theirs.block_size
