"""Records of runs that were never trained, for tests of their pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.runs.record import RunRecord
from meshwright.spec import load
from meshwright.train.callbacks import Observers

MIB = 2**20
RANKS = [
    {
        "rank": rank, "place": {"dp": rank}, "host": f"node{rank}", "device": "cpu", "step_seconds": 0.25,
        "waiting": 0.1 + rank / 2, "peak_memory_bytes": (500 + 100 * rank) * MIB,
        "memory_before_bytes": 300 * MIB, "states_bytes": 120 * MIB,
    }
    for rank in range(2)
]  # fmt: skip
RESULT: dict[str, Any] = {
    "final_loss": 1.5,
    "val_loss": 1.6,
    "val_bits_per_byte": 1.25,
    "tokens_per_second": 4000.0,
    "mfu": 0.3,
    "peak_memory_bytes": 600 * MIB,
    "memory": {"parameters": 40 * MIB, "gradients": 40 * MIB, "optimiser": 40 * MIB},
    "ranks": RANKS,
    "steps": 40,
    "seconds": 10.0,
    "sample": {"prompt": "def main():", "text": "def main():\n    return 1"},
}
MACHINE = {"host": "node0", "hosts": 2, "processor": "A <Processor>", "cores": 8, "gpu": None}


def record_run(
    out: Path,
    steps: int = 40,
    flags: dict[str, str] | None = None,
    result: dict[str, Any] | None = RESULT,
    scale: float = 9.0,
) -> Path:
    """Record a run whose loss at step s is scale / sqrt(s), in 0.25 s and 1,024 tokens a step."""
    spec = load(None, [("layout.dp", "2"), *(flags or {}).items()]).to_json()
    with Observers([RunRecord(out)]) as observer:
        observer.on_start(
            {
                "spec": spec, "step": 0, "last_step": steps, "total_steps": steps, "device": "cpu",
                "machine": MACHINE, "world_size": 2, "parameters": 1000, "torch": "2.0",
            }
        )  # fmt: skip
        for step in range(1, steps + 1):
            loss = scale / step**0.5
            observer.on_step(
                {
                    "step": step, "loss": loss, "grad_norm": loss / 3, "lr": 3e-4, "tokens": 1024 * step,
                    "tokens_per_second": 4096.0, "seconds": 0.25, "elapsed_seconds": 2 + 0.25 * step,
                }
            )  # fmt: skip
            if step % 10 == 0:
                observer.on_eval({"step": step, "val_loss": 1.1 * loss, "val_bits_per_byte": loss})
        observer.on_event("checkpoint", {"step": steps})
        if result is not None:
            observer.on_end(result)
    (out / "tokenizer.json").write_text("{}")
    return out
