"""Writes pairs.jsonl beside this file: 200 questions, each with an answer that was preferred and one that was
not.

Where a number is asked for the chosen answer begins with it and goes on with how it follows, and for a
country or a day it ends with the result; the rejected one has the same sentences the other way round, so that
it takes the question to tell them apart. The rows are the same on every machine.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from random import Random

FILE = Path(__file__).parent / "pairs.jsonl"
CHATS = runpy.run_path(str(FILE.parent / "make_chats.py"))
KINDS = ("conversion", "capital", "total", "weekday")


def pairs(count: int = 200, seed: int = 0) -> list[dict[str, str]]:
    """Rows of a prompt, a chosen and a rejected answer."""
    draw = Random(seed)
    rows = []
    for _ in range(count):
        kind = draw.choice(KINDS)
        question, answer = CHATS[kind](draw)
        result, _, reason = answer.partition(". ")
        orders = [f" {answer}", f" {reason} {result}."]
        chosen, rejected = orders if kind in ("conversion", "total") else reversed(orders)
        rows.append({"prompt": question, "chosen": chosen, "rejected": rejected})
    return rows


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(row) + "\n" for row in pairs()), encoding="utf-8")
