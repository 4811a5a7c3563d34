"""The list of verbs, which `meshwright --help` prints at once, since this imports next to nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
HELP = ("-h", "--help")

SUMMARIES = {
    "init": "write a run file for what there is (text, model, run), what is wanted, where",
    "train": "train a model: start the ranks, log, checkpoint, report",
    "doctor": "examine hosts before a run: limits, ports, versions, clocks, disk, network",
    "verify": "compare the layout with one device in float64: loss, gradients, parameters",
    "launch": "submit a run as a job: --on slurm, kubernetes, ray, skypilot or ssh",
    "status": "say how a launched job is, and how far its runs are",
    "logs": "print the log of a launched job, or --follow it",
    "stop": "let a launched job save and end",
    "tokenize": "turn text, JSONL or source files into a folder of tokens for data.corpus",
    "data show": "print samples as a run reads them, with the tokens that are trained on marked",
    "data verify": "hash every file of a folder of tokens again",
    "plan": "find the best layouts of a model on a cluster: time, memory, money",
    "fit": "will a model fit GPUs of a node, trained or served: memory, layouts, commands",
    "simulate": "time one step of the run's pipeline: bubble, activations, a timeline by rank",
    "explain": "explain a run's layout on a cluster: time, memory, links, and why not others",
    "dryrun": "run the real step of one rank of any world on fake tensors: memory, messages",
    "goodput": "the best checkpoint interval under failures, and the effective time, tokens a day and cost",
    "validate": "compare the planner's predictions with measured runs, published or yours",
    "chaos": "inject faults into a run, and compare it with its twin without any",
    "profile": "measure this machine into a hardware file: products, attention, memory, messages",
    "clusters": "list the known clusters, or show one of them or a hardware file in full",
    "generate": "continue prompts with a trained model, or --chat with it, on any layout",
    "evaluate": "loss, bits per byte and perplexity of texts, and scores of tasks, by a model",
    "export": "write a run's model as an HF folder, or as a GGUF file for llama.cpp",
    "import": "make a run's folder of a trained model: HF, torch DCP, Megatron, DeepSpeed, litgpt, PEFT",
    "quantise": "write a model with 8 or 4 bits a weight, or --compare what that costs",
    "report": "make the page of a run again, or compare runs: curves, figures, differing keys",
    "average": "make a run whose weights are the mean of a run's checkpoints",
    "merge": "make a run whose weights are those of several models, merged",
    "distil": ("write a teacher's likeliest tokens for a run's samples: --distil.teacher RUN"),
    "checkpoint ls": "list a run's checkpoints",
    "checkpoint verify": "check every hash of a checkpoint",
    "spec show": "print a run's whole spec as TOML",
    "spec schema": "print the JSON schema of a run file, for editors",
    "spec check": "validate a run file, and print what would run; check for short",
    "spec presets": "list the named models",
    "completion": "print the script that completes commands in bash, zsh or fish",
}
"""Each verb in a few words, in the order of the list."""
SHORT = {"check": ("spec", "check")}
"""Verbs by a shorter name."""

MODULES = {
    "tokenize": "runs", "data show": "runs", "data verify": "runs", "explain": "plan", "profile": "hardware",
    "clusters": "hardware", "generate": "models", "export": "models", "import": "models",
    "checkpoint ls": "models", "checkpoint verify": "models", "average": "weights", "merge": "weights",
    "status": "launch", "logs": "launch", "stop": "launch",
    "spec show": "spec", "spec schema": "spec", "spec check": "spec", "spec presets": "spec",
}  # fmt: skip
"""The module of this package with a verb, if it has not the name of the verb."""


def program(version: str) -> str:
    """Return the text of `meshwright --help`."""
    return "\n".join(
        [
            f"meshwright {version}: trains and checks large language models on any mesh of devices",
            "",
            "usage: meshwright VERB [RUN.toml | RUN_FOLDER] [--TABLE.KEY VALUE ...] [FLAGS]",
            *section("verbs", [*SUMMARIES.items()]),
            "",
            "  meshwright VERB --help     its flags, and the keys of a run that are used most",
            "  meshwright VERB --help NAME ...  a flag, a key or a table of keys in full; all: everything",
            "  meshwright --version",
            "",
            "Every verb works without a run file, from presets and flags alone:",
            "  meshwright train --model.preset tiny --train.steps 200 --nproc 2 --out runs/first",
            "",
            "exit codes: 0 success; 1 failed, unequal (verify), or a run would fail (doctor); 2 a mistake in",
            "the command or the file; 70 verify compared nothing: ranks disagree, or one failed or hung;",
            "75 stopped by SIGTERM, SIGHUP or SIGUSR1 and saved: start it again with --resume auto;",
            "76 storage failed; 77 training data changed or is damaged; 78 the numbers went wrong;",
            "79 a crash loop: restarts get no further; 80 an unhealthy host: start again on another one;",
            "128 + n ended by signal n: 130 Ctrl-C (saved or not, as it says), 143 SIGTERM before it saved",
        ]
    )


def group(name: str) -> str:
    """Return the verbs of a group, as in `meshwright spec --help`."""
    rows = [row for row in SUMMARIES.items() if row[0].startswith(f"{name} ")]
    return "\n".join([f"usage: meshwright {name} VERB ...", *section("verbs", rows)])


def section(title: str, rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines of a title and two columns, or none without rows.

    The second column is wrapped, and a long entry of the first gets a line of its own.
    """
    if not rows:
        return []
    left = min(26, max(len(first) for first, _ in rows))
    lines = ["", f"{title}:"]
    for first, second in rows:
        wrapped = textwrap.wrap(second, WIDTH - left - 4)
        if len(first) > left:
            lines.append(f"  {first}")
            first = ""
        lines.append(f"  {first:<{left}}  {wrapped[0]}")
        lines += [" " * (left + 4) + more for more in wrapped[1:]]
    return lines
