"""`fit` of models that are published in MXFP4 or blockwise fp8: bytes of their weights, who serves them, and
the commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.planner.cost.model import CostModel
from meshwright.planner.fit.fit import FitRequest
from meshwright.planner.fit.serving import ServingFit, has_kernels, layouts, serving_fits
from meshwright.spec.load import Overrides

GIB = 2**30


def served(model: str | Path, gpu: str, count: int = 1, overrides: Overrides = ()) -> dict[str, ServingFit]:
    """The answer's rows of serving, without those of training."""
    request = FitRequest(str(model), gpu, count, overrides=overrides)
    cluster = request.cluster()
    (problem,), _ = request.planned(cluster).problems()
    fits = serving_fits(problem.base.model, CostModel(cluster), 1, problem.base.data.seq_len, "RUN")
    return {each.format: each for each in fits}


@pytest.mark.parametrize(("model", "size"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_weights_in_mxfp4_take_what_the_checkpoint_does(model: str, size: float) -> None:
    """Sizes of the checkpoints by their model card (OpenAI 2025, table 1), in GiB."""
    found = served(model, "h100-sxm")["mxfp4"]
    assert found.needs.parameters == pytest.approx(size * GIB, rel=0.01)
    assert found.fits and found.probability > 0.8


def test_kernels_of_other_gpus_pad_experts() -> None:
    """3,072 by 2,944 for 2,880 by 2,880, in 24 blocks of 32 experts of three matrices."""
    plain, padded = (served("gpt-oss-20b", gpu)["mxfp4"].needs.parameters for gpu in ("h100-sxm", "rtx-4090"))
    assert padded - plain == pytest.approx(24 * 32 * 3 * (3072 * 2944 - 2880**2) * 17 / 32, rel=1e-6)


def test_the_published_weights_are_served_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "gpt-oss-20b", "--gpu", "rtx-4090"])
    told = " ".join(capsys.readouterr().out.split())
    assert "serve mxfp4: vllm serve openai/gpt-oss-20b --max-model-len 4096" in told
    assert "Training is not in mxfp4: --from openai/gpt-oss-20b makes bf16 of the weights, exact ones" in told
    (command,) = served("gpt-oss-20b", "rtx-4090")["mxfp4"].commands
    assert "--quantization" not in shlex.split(command)


def test_a_gpu_without_kernels_is_told() -> None:
    found = served("gpt-oss-20b", "v100")["mxfp4"]
    assert found.spec is None and "compute capability 8.0" in (found.reason or "")


def test_other_models_and_shapes_are_not_in_mxfp4(tmp_path: Path) -> None:
    assert "mxfp4" not in served("moe-small", "rtx-4090")
    assert "mxfp4" not in served("gpt-oss-20b", "rtx-4090", overrides=[("model.layers", "2")])
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 128,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2,
        "max_position_embeddings": 4096, "sliding_window": 128,
    }  # fmt: skip
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert "mxfp4" not in served(folder, "rtx-4090")
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    assert served(folder, "rtx-4090")["mxfp4"].commands[0].startswith(f"vllm serve {folder} ")


def test_weights_in_tiles_take_what_the_checkpoint_does() -> None:
    """688,586,727,753 bytes by its model.safetensors.index.json, of which the 61st layer, for multi-token
    prediction, has 11.5e9 weights in 8 bits, and 1.95e9 in 16 (its own embedding, head and `eh_proj`)."""
    found = served("deepseek-v3", "h200")["fp8-blockwise"]
    assert found.needs.parameters == pytest.approx(688_586_727_753 - 11.5e9 - 2 * 1.95e9, rel=0.002)
    assert not found.fits


def test_tiles_are_served_on_a_node_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    main(["fit", "deepseek-ai/DeepSeek-R1", "--gpu", "h200"])
    told = " ".join(capsys.readouterr().out.split())
    assert "matrices of blocks in 8 bits with a scale for 128 by 128 and the rest in bf16. quantise" in told
    for model, gpu, source in (
        ("deepseek-v3", "h200", "deepseek-ai/DeepSeek-V3-Base"),
        ("kimi-k2", "b200", "moonshotai/Kimi-K2-Base"),
    ):
        (command,) = served(model, gpu, 8)["fp8-blockwise"].commands
        assert f"vllm serve {source} " in command and "--quantization" not in shlex.split(command)


def test_ranks_share_whole_tiles(tmp_path: Path) -> None:
    """2 heads of 128 rows on two ranks, and not 4 of 64 on four; 192 channels are not shared at all."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
        "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip

    def cuts(**changed: object) -> set[int]:
        folder = tmp_path / f"model{len(changed)}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | changed))
        fit = served(folder, "h100-sxm", 8)["fp8-blockwise"]
        assert fit.spec is not None
        return {spec.layout.tp for spec in layouts(fit.spec.model, 8) if has_kernels(spec, fit.format)}

    assert cuts() == {1, 2}
    assert cuts(intermediate_size=192) == {1}
    others = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": others}))
    assert "fp8-blockwise" not in served(tmp_path, "h100-sxm")


def test_experts_are_served_by_all_tensor_and_data_ranks() -> None:
    """As vLLM deals them (`--enable-expert-parallel`): each of 8 GPUs has an eighth of them."""
    one, eight = (served("gpt-oss-120b", "h100-sxm", count)["mxfp4"] for count in (1, 8))
    layout = eight.spec.layout
    assert layout.dp > 1 and layout.ep == layout.tp * layout.dp == 8
    assert eight.needs.parameters < one.needs.parameters / 4
