"""The program of a published run, by its row: stated, of its paper and of its device, with its stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from changed_rows import case
from meshwright.planner.programs.stage_cuts import by_threshold
from meshwright.planner.validation.table import PUBLISHED, PredictionError
from meshwright.spec import ModelSpec


@pytest.mark.parametrize(
    ("program", "stack"),
    [
        ("Megatron-Bridge", "nemo"),
        ("NeMo 2.0", "nemo"),
        ("megatron-core 0.12", "megatron-core"),
        ("Megatron-LM", "megatron-lm"),
        ("Megatron-FSDP", "megatron-fsdp"),
        ("torchtitan", "fsdp-compiled"),
        ("DeepSpeed", "deepspeed-zero3"),
        ("PyTorch FSDP2", "fsdp"),
        ("HAI-LLM", "hai-llm"),
        ("deepseek", "hai-llm"),
        ("MaxText", "maxtext"),
    ],
)
def test_the_program_is_the_one_that_is_stated(tmp_path: Path, program: str, stack: str) -> None:
    found = case(tmp_path, program=program, source="a blog", where="")
    assert found.stack.name == stack
    assert not any(told.startswith("program") for told in found.inferred)


@pytest.mark.parametrize(
    ("changed", "stack", "noted"),
    [
        ({"gpu": "TPU v6e", "program": "", "source": "a blog"}, "maxtext", False),
        ({"gpu": "TPU v6e", "program": "DeepSpeed", "source": "a blog"}, "deepspeed-zero3", True),
        ({"gpu": "H800", "program": "", "source": "DeepSeek-V3 (arXiv:2412.19437)"}, "hai-llm", False),
    ],
)
def test_a_program_is_one_of_its_device_and_its_paper(
    tmp_path: Path, changed: dict[str, str], stack: str, noted: bool
) -> None:
    found = case(
        tmp_path, where="", precision="bf16", fp8_recipe="", mfu_pct="", tflops_per_gpu="", **changed
    )
    assert found.stack.name == stack
    assert any("does not run on tpu-v6e" in note for note in found.row.notes) is noted


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "ranks", "stages"),
    [
        (16, 2048, 8192, 2, (11, 5)),
        (16, 2048, 8192, 4, (6, 5, 5, 0)),
        (16, 2048, 8192, 8, (3, 3, 2, 3, 2, 3, 0, 0)),
        (16, 2048, 8192, 14, (2, 1, 2, 1, 2, 1, 2, 1, 1, 2, 1, 0, 0, 0)),
        (16, 2048, 8192, 16, None),
        (32, 4096, 14336, 4, (9, 9, 8, 6)),
        (32, 4096, 14336, 8, (5, 4, 4, 5, 4, 4, 4, 2)),
        (32, 4096, 14336, 37, None),
    ],
)
def test_nanotrons_stages_end_with_the_module_that_exceeds_their_share(
    layers: int, hidden: int, ffn: int, ranks: int, stages: tuple[int, ...] | None
) -> None:
    """Worked out by hand from its rule, for a head of 131,072 words.

    Shares are 10, 5, 2.5, 1.43, 1.25, 8.55, 4.28 and 0.92 blocks. After the blocks, at most four stages are
    filled: by norm, head, cast and loss. Of the Ultra-Scale Playbook's runs with 16 blocks on 16
    stages 65 of 66 ended.
    """
    heads = hidden // 128
    model = ModelSpec(layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=heads, vocab_size=131072)
    assert by_threshold(model, ranks) == stages


@pytest.mark.parametrize(("program", "stages"), [("nanotron", (9, 9, 8, 6)), ("torchtitan", "even")])
def test_only_rows_of_nanotron_have_its_stages(tmp_path: Path, program: str, stages: object) -> None:
    found = case(tmp_path, PUBLISHED, 89, program=program, where="")  # 32 blocks on 4 pipeline ranks
    assert {spec.layout.stages for spec in found.specs} == {stages}


def test_a_schedule_may_be_a_column(tmp_path: Path) -> None:
    layout = {"tp": "4", "pp": "4", "vp": "", "dp": "", "where": ""}
    (spec, *_) = case(tmp_path, schedule="gpipe", **layout).specs
    assert spec.layout.schedule == "gpipe"
    with pytest.raises(PredictionError, match="its schedule 'mine' is not one of"):
        case(tmp_path, schedule="mine", **layout)
