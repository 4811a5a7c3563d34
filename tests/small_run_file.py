"""The run file of a run of two data ranks that takes some milliseconds a step on a core."""

from __future__ import annotations


def run_file(steps: int) -> str:
    """Return the run file of so many steps, each with a row in the record."""
    return f"""
model = {{ preset = "tiny", layers = 1, hidden = 64, ffn = 64, vocab_size = 300 }}
data = {{ tokenizer = "byte", corpus = "synthetic", seq_len = 64 }}
train = {{ batch_tokens = 512, eval_tokens = 512, steps = {steps}, log_every = 1 }}
layout = {{ dp = 2 }}
"""
