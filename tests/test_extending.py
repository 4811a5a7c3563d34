"""docs/extending.md works: its blocks are applied to a copy of the source, which then has what they add."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```diff\n\+\+\+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = ("An optimiser", "A part of a step", "A model family")

pytestmark = pytest.mark.timeout(600)


def apply(block: str, before: str) -> str:
    """The text of a file after the changes of a block, each at a place that occurs once."""
    for place in re.split(r"^@@\n", block, flags=re.MULTILINE):
        lines = [(line[:1] or " ", line[1:]) for line in place.splitlines()]
        old = "".join(f"{text}\n" for mark, text in lines if mark != "+")
        new = "".join(f"{text}\n" for mark, text in lines if mark != "-")
        assert before.count(old) == 1 or not before, f"{before.count(old)} times:\n{old}"
        before = before.replace(old, new) if old else new
    return before


class Copy(NamedTuple):
    """A copy of the source with the changes of one section of the page."""

    folder: Path
    files: list[str]
    lines: int
    """Lines that came."""

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A `meshwright` command of the copy."""
        return self._python("-m", "meshwright", *words)

    def script(self, text: str, *words: str) -> subprocess.CompletedProcess[str]:
        """A program that imports the copy."""
        return self._python("-c", text, *words)

    def _python(self, *words: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(self.folder)}
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    def result(self, *words: str) -> dict[str, Any]:
        """The object of a command that must succeed."""
        ran = self.run(*words, "--json")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found


def extended(section: str, folder: Path) -> Copy:
    """A copy in `folder` with the blocks of a section applied, and the bytecode of the other files."""
    shutil.copytree(ROOT / "src" / "meshwright", folder / "meshwright")
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    files, lines = [], 0
    for name, block in BLOCK.findall(text):
        path = folder / "meshwright" / name
        path.write_text(apply(block, path.read_text() if path.exists() else ""))
        files.append(name)
        lines += len(re.findall(r"^\+.*\S", block, re.MULTILINE))
    return Copy(folder, files, lines)


TINY = (
    "--model.preset", "tiny", "--model.layers", "2", "--model.hidden", "32", "--model.ffn", "40",
    "--model.heads", "4", "--model.kv_heads", "2", "--model.vocab_size", "64", "--data.corpus", "synthetic",
    "--data.seq_len", "32", "--train.batch_tokens", "256", "--layout.dp", "2", "--layout.zero", "3",
)  # fmt: skip


def compared(verdict: dict[str, Any]) -> set[str]:
    """Kinds of values that `verify` has compared, without their step."""
    return {row["kind"].split(" ", 2)[2] for row in verdict["rows"]}


@pytest.fixture(scope="module")
def optimiser(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy with the optimiser of the page, which has one state of a parameter, as `sgd` has."""
    return extended("An optimiser", tmp_path_factory.mktemp("optimiser"))


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy with the part of the page."""
    return extended("A part of a step", tmp_path_factory.mktemp("part"))


@pytest.mark.parametrize("section", [*SECTIONS])
def test_every_block_of_the_page_has_its_place(section: str, tmp_path: Path) -> None:
    assert extended(section, tmp_path).files


def test_the_optimiser_of_the_page_works(optimiser: Copy) -> None:
    assert len(optimiser.files) <= 4 and optimiser.lines <= 30
    named = (*TINY, "--train.optimiser", "adagrad")
    trained = optimiser.result("train", *named, "--train.steps", "3", "--out", "runs/adagrad")
    assert trained["status"] == "finished" and trained["step"] == 3
    verdict = optimiser.result("verify", *named, "--precision", "exact")
    assert verdict["equal"] and {"sum_sq", "parameter"} <= compared(verdict)
    memory = optimiser.result("dryrun", *named)["ranks"][0]["most"]
    assert memory["optimiser"] == memory["masters"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            (
                "plan",
                "llama3-8b",
                "--cluster",
                "h100",
                "--gpus",
                "8",
                "--batch-tokens",
                "1M",
                "--layout.tp",
                "8",
            ),
            marks=pytest.mark.full,
        ),
        ("explain", *TINY, "--cluster", "h100"),
    ],
    ids=lambda words: words[0],
)
def test_the_planner_knows_the_optimiser_of_the_page(optimiser: Copy, words: tuple[str, ...]) -> None:
    with_one_state, like, with_two = (
        json.dumps(optimiser.result(*words, "--train.optimiser", name) | {"searched": None}).replace(name, "")
        for name in ("adagrad", "sgd", "adamw")
    )
    assert with_one_state == like != with_two


def test_a_key_that_the_optimiser_of_the_page_does_not_read_is_refused(optimiser: Copy) -> None:
    ran = optimiser.run("spec", "check", *TINY, "--train.optimiser", "adagrad", "--train.beta2", "0.9")
    assert ran.returncode == 2
    assert "--train.beta2: 0.9 has no effect with train.optimiser = 'adagrad'" in ran.stderr


@pytest.mark.full  # `make test` applies its blocks, and runs the optimiser's copy
def test_the_part_of_the_page_works(part: Copy) -> None:
    verdict = part.result("verify", *TINY, "--train.swa", "2", "--precision", "exact")
    assert verdict["equal"] and "swa" in compared(verdict)
    with_mean, without = (
        part.result("dryrun", *TINY, *words)["ranks"][0]["most"] for words in (("--train.swa", "2"), ())
    )
    assert with_mean["optimiser"] - without["optimiser"] == without["masters"]


@pytest.mark.full
def test_the_part_of_the_page_is_in_checkpoints(part: Copy) -> None:
    words = ("--train.swa", "2", "--through", "checkpoint", "--precision", "exact")
    verdict = part.result("verify", *TINY, *words)
    assert verdict["equal"] and "loaded swa" in compared(verdict)


LOGITS = """
import sys
from pathlib import Path
import torch
from meshwright.exchange.hf import load_hf

folder, tokens, logits = map(Path, sys.argv[1:])
with torch.no_grad():
    torch.save(load_hf(folder)(torch.load(tokens)), logits)
"""
"""Writes the logits that a copy computes of an HF folder and tokens."""


@pytest.mark.full  # `make test` applies its blocks, and runs the optimiser's copy
def test_the_family_of_the_page_works(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    copy, folder = extended("A model family", tmp_path / "copy"), tmp_path / "theirs"
    assert len(copy.files) <= 5
    torch.manual_seed(0)
    theirs = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.2,
    )).eval()  # fmt: skip
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):  # zeros at first
            torch.nn.init.normal_(parameter)
    theirs.save_pretrained(folder)
    tokens = torch.randint(101, (2, 24))
    torch.save(tokens, tmp_path / "tokens.pt")
    computed = copy.script(LOGITS, str(folder), str(tmp_path / "tokens.pt"), str(tmp_path / "logits.pt"))
    assert computed.returncode == 0, computed.stderr
    with torch.no_grad():
        torch.testing.assert_close(
            torch.load(tmp_path / "logits.pt"), theirs(tokens).logits, rtol=0, atol=1e-5
        )
    words = ("--model.hf", str(folder), "--data.corpus", "synthetic", "--data.seq_len", "32")
    verdict = copy.result(
        "verify", *words, "--train.batch_tokens", "128", "--layout.tp", "2", "--precision", "exact"
    )
    assert verdict["equal"]
    copy.result("import", str(folder), "--out", "runs/imported")
    exported = copy.folder / "exported"
    copy.result("export", "runs/imported", str(exported))
    whole = {name: each.clone() for name, each in load_file(exported / "model.safetensors").items()}
    assert whole.keys() == theirs.state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in theirs.state_dict().items())


def test_a_block_whose_place_is_gone_is_told() -> None:
    assert apply(" a\n-b\n+c\n", "a\nb\nd\n") == "a\nc\nd\n"
    with pytest.raises(AssertionError, match="0 times"):
        apply(" a\n-b\n+c\n", "a\nd\n")
