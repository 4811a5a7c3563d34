"""Verbs that predict take a model in the place of a run file: a preset, a known name, or an HF folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.main import main
from meshwright.exchange.hf_config import write_hf_config
from meshwright.spec import ModelSpec, UserError

LENGTHS = ["--data.seq_len", "1024", "--train.batch_tokens", "16384"]
VERBS = (
    ["explain", "--cluster", "h100", "--layout.dp", "4", "--layout.zero", "2"],
    ["simulate", "--layout.pp", "4"],
    ["dryrun", "--layout.dp", "4", "--layout.zero", "3", "--model.layers", "2"],
)


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_model_is_asked_about_as_its_preset_is(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "config.json"
    folder.write_text(
        json.dumps(write_hf_config(ModelSpec.model_validate({"preset": "smollm2-135m"}), "bfloat16"))
    )
    verb, *flags = words

    def told(*model: str) -> dict[str, Any]:
        assert main([verb, *model, *flags, *LENGTHS, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        if verb == "dryrun":
            return {key: found["ranks"][0][key] for key in ("wire", "peak", "units")}
        return {key: found[key] for key in found.keys() & {"step_seconds", "memory", "peak_activations"}}

    wanted = told("--model.preset", "smollm2-135m")
    assert wanted
    assert told("smollm2-135m") == wanted
    assert told("HuggingFaceTB/SmolLM2-135M-Instruct") == wanted
    assert told(str(tmp_path)) == told(str(folder)) == wanted


@pytest.mark.parametrize("words", VERBS, ids=lambda words: words[0])
def test_a_name_that_is_no_model_s_is_one_sentence(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"MODEL: 'smollm2-135' is neither .* did you mean 'smollm2-135m'\?"):
        main([words[0], "smollm2-135", *words[1:], *LENGTHS])
