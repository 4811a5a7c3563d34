"""The layer of DeepSeek-V3's and GLM-4.5's folders that predicts further tokens: read, written, left out."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_models import DEEPSEEK, GLM4_MOE, TOKENS, read_all, read_whole, same_files, save_theirs, their_logits
from meshwright.exchange.foreign.source import open_source
from meshwright.exchange.gguf_file import gguf_tensors
from meshwright.exchange.hf import export_hf, import_hf, load_hf
from meshwright.exchange.parameter_source import HeldParameters
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import Hooks
from meshwright.model.multi_token_prediction import further_tokens
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.weights.initial_weights import open_weights

FAMILIES = {"DeepseekV3": DEEPSEEK, "Glm4Moe": GLM4_MOE | {"use_qk_norm": True, "n_shared_experts": 2}}
LAYER = "model.layers.3."
SCALE = 0.7


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def with_further(folder: Path, family: str) -> Any:
    """A published-like folder with one such layer, and the model of transformers, which does without it.

    The layer is the last one of another model, with the tensors that DeepSeek's files have besides.
    """
    fields = FAMILIES[family]
    model = save_theirs(folder, family, fields)
    hidden, draw = fields["hidden_size"], torch.Generator().manual_seed(1)
    last = {name: each for name, each in model.state_dict().items() if name.startswith("model.layers.2.")}
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    layer: dict[str, Tensor] = {}
    for name, each in last.items():
        own = LAYER + name.removeprefix("model.layers.2.")
        drawn = (0.1 * torch.randn(each.shape, generator=draw)).to(each.dtype)
        if not own.endswith(stacks):
            layer[own] = drawn + 1 if own.endswith("norm.weight") else drawn
            continue
        stem, _, which = own.rpartition(".")
        for number, expert in enumerate(drawn):
            parts = {"gate": expert[: len(expert) // 2], "up": expert[len(expert) // 2 :]}
            parts = parts if which == "gate_up_proj" else {"down": expert}
            layer |= {f"{stem}.{number}.{key}_proj.weight": part.clone() for key, part in parts.items()}
    norms = ("enorm", "hnorm", "shared_head.norm")
    layer |= {f"{LAYER}{n}.weight": 1 + 0.1 * torch.randn(hidden, generator=draw) for n in norms}
    layer[f"{LAYER}eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=draw)
    layer[f"{LAYER}embed_tokens.weight"] = model.model.embed_tokens.weight.detach().clone()
    layer[f"{LAYER}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
    edit(folder, lambda tensors: tensors.update(layer))
    set_config(folder, num_nextn_predict_layers=1)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, with_further(folder, request.param)


def test_a_folder_goes_round_bit_by_bit(published: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = published
    spec, tensors = read_whole(folder)
    assert spec.mtp_num_layers == 1
    export_hf(tmp_path / "ours", spec, tensors)
    same_files(tmp_path / "ours", folder)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    again, same = read_whole(tmp_path / "ours")
    assert again.mtp_num_layers == 1
    assert tensors.keys() == same.keys()
    assert all(torch.equal(tensors[name], same[name]) for name in tensors)
    with torch.no_grad():
        torch.testing.assert_close(their_logits(tmp_path / "ours"), model(TOKENS).logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(load_hf(folder)(TOKENS), model(TOKENS).logits, rtol=0, atol=1e-5)


def theirs_further_loss(model: Any, layers: dict[str, Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    """The summed loss of the tokens after the next ones, by the classes of transformers and plain torch."""
    config = model.config
    block = type(model.model.layers[2])(config, 2).double()
    own = {name.removeprefix(LAYER): each.double() for name, each in layers.items()}
    stacked = dict(own)
    for name in [name for name in own if ".experts." in name]:
        del stacked[name]
    parts = {
        x: [own[f"mlp.experts.{n}.{x}_proj.weight"] for n in range(config.n_routed_experts)]
        for x in ("gate", "up", "down")
    }
    pairs = zip(parts["gate"], parts["up"], strict=True)
    stacked["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    stacked["mlp.experts.down_proj"] = torch.stack(parts["down"])
    block.load_state_dict({name: stacked[name] for name in block.state_dict()})
    norm = type(model.model.norm)
    places = torch.arange(tokens.shape[1]).unsqueeze(0)
    causal = torch.full((1, 1, tokens.shape[1], tokens.shape[1]), -torch.inf, dtype=torch.float64).triu(1)

    def normed(name: str, x: Tensor) -> Tensor:
        made = norm(config.hidden_size, eps=config.rms_norm_eps).double()
        made.load_state_dict({"weight": own[f"{name}.weight"]})
        return made(x)

    hidden = model.model(tokens).last_hidden_state
    embedded = F.embedding(torch.cat([tokens[:, 1:], tokens[:, :1]], 1), model.model.embed_tokens.weight)
    both = torch.cat([normed("enorm", embedded), normed("hnorm", hidden)], -1)
    x = F.linear(both, own["eh_proj.weight"])
    turns = model.model.rotary_emb(x, places)
    x = block(x, attention_mask=causal, position_ids=places, position_embeddings=turns)
    logits = model.lm_head(normed("shared_head.norm", x if isinstance(x, Tensor) else x[0]))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="sum")


def test_the_loss_of_further_tokens_is_that_of_the_classes_of_transformers(
    published: tuple[Path, Any],
) -> None:
    folder, model = published
    model = deepcopy(model).double()
    model.config._experts_implementation = "eager"  # others are not of float64
    tokens, targets = TOKENS[:, :-1], TOKENS[:, 1:]
    layers = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith(LAYER)}
    model.zero_grad()
    theirs = theirs_further_loss(model, layers, tokens, targets)
    theirs.backward()

    spec, tensors = read_whole(folder)
    seen: list[Tensor] = []

    def alone(_loss: Tensor, compute: Any) -> Tensor:
        seen.append(compute(SCALE))
        return seen[0]

    decoder = Decoder(spec, Hooks(further=alone)).double()
    for name, tensor in decoder.tensors().items():
        tensor.data.copy_(tensors[name])
    documents, places = torch.zeros_like(tokens), torch.arange(tokens.shape[1])
    given = decoder.further(further_tokens(tokens, targets, documents), tokens.shape[1], places, documents)
    x = decoder.through(range(spec.layers), decoder.embed(tokens, places), tokens.shape[1], places, None)
    decoder.head(x, targets, 1.0, None, given).backward()
    assert seen[0].item() == pytest.approx(SCALE * theirs.item(), rel=1e-7)
    for ours, other in (
        (decoder.embed.weight, model.model.embed_tokens.weight),
        (decoder.head.weight, model.lm_head.weight),
        (decoder.head.norm.weight, model.model.norm.weight),
        (decoder.blocks[0].attn.o.weight, model.model.layers[0].self_attn.o_proj.weight),
    ):
        # Norms and softmax of transformers are fp32.
        torch.testing.assert_close(ours.grad, SCALE * other.grad, rtol=0, atol=2e-5)


def test_a_folder_of_transformers_lacks_the_layer(tmp_path: Path) -> None:
    save_theirs(tmp_path, "DeepseekV3", DEEPSEEK | {"num_nextn_predict_layers": 1})
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    with pytest.warns(UserWarning, match="num_nextn_predict_layers 1, and the weights have no such layer"):
        spec, _ = import_hf(tmp_path)
    assert spec.mtp_num_layers == 0


def test_without_weights_the_layer_is_asked_for(published: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = published
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert ModelSpec(hf=str(tmp_path)).mtp_num_layers == 0
    assert ModelSpec(hf=str(tmp_path), mtp_num_layers=1).mtp_num_layers == 1
    set_config(tmp_path, num_nextn_predict_layers=2)
    with pytest.raises(UserError, match="num_nextn_predict_layers 2; one such layer is computed; set it to"):
        ModelSpec(hf=str(tmp_path))


def test_a_run_may_leave_the_layer_out(published: tuple[Path, Any]) -> None:
    folder = str(published[0])
    without = ModelSpec(hf=folder, mtp_num_layers=0, vocab_size=128)
    weights = open_weights(RunSpec(model=without))
    assert weights is not None
    assert "blocks.3.eh_proj.weight" not in read_all(weights, without)
    with pytest.raises(UserError, match=r"model\.mtp_num_layers: 1 contradicts"):
        save_theirs(published[0].parent / "theirs", "DeepseekV3", DEEPSEEK)
        theirs = ModelSpec(hf=str(published[0].parent / "theirs"), mtp_num_layers=1)
        open_weights(RunSpec(model=theirs))


@pytest.mark.parametrize("name", ["embed_tokens", "shared_head.head"])
def test_a_copy_with_values_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    with_further(tmp_path, "Glm4Moe")
    edit(tmp_path, lambda tensors: tensors[f"{LAYER}{name}.weight"].mul_(2))
    with pytest.raises(UserError, match=rf"{LAYER}{name}\.weight has other values .* set num_nextn"):
        read_whole(tmp_path)


def test_files_without_copies_are_read_and_other_tensors_named(tmp_path: Path) -> None:
    with_further(tmp_path, "DeepseekV3")
    copies = [f"{LAYER}{name}.weight" for name in ("embed_tokens", "shared_head.head")]
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in copies])
    assert read_whole(tmp_path)[0].mtp_num_layers == 1
    edit(tmp_path, lambda tensors: tensors.update({f"{LAYER}other.weight": torch.zeros(2)}))
    with pytest.raises(UserError, match=rf"has a tensor {LAYER}other\.weight"):
        read_whole(tmp_path)


def test_a_checkpoint_of_torch_keeps_the_layer(published: tuple[Path, Any], tmp_path: Path) -> None:
    spec, tensors = read_whole(published[0])
    export_hf(tmp_path / "dcp", spec, tensors, dcp=True)
    source = open_source(tmp_path / "dcp")
    assert source.model.mtp_num_layers == 1
    assert "blocks.3.eh_proj.weight" in read_all(source.weights, source.model)


def test_gguf_files_leave_the_layer_out(published: tuple[Path, Any]) -> None:
    pytest.importorskip("gguf")
    spec, tensors = read_whole(published[0])
    names = [name for name, _ in gguf_tensors(spec, HeldParameters(tensors))]
    assert names
    assert not [name for name in names if name.startswith("blk.3") or "nextn" in name]
