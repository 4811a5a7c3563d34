"""Writes chats.jsonl beside this file: 200 short chats about units, capitals, sums and the calendar.

Each answer begins with the result and goes on with how it follows, in whole sentences; a model that is tuned
on them answers other questions in the same way. The rows are the same on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

FILE = Path(__file__).parent / "chats.jsonl"
SYSTEM = "You answer in two short sentences: the result, then how it follows."
UNITS = [
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("kilograms", "grams", 1000),
    ("hours", "minutes", 60), ("minutes", "seconds", 60), ("litres", "millilitres", 1000),
    ("weeks", "days", 7), ("days", "hours", 24), ("feet", "inches", 12), ("yards", "feet", 3),
]  # fmt: skip
CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Chile": "Santiago", "Denmark": "Copenhagen",
    "Egypt": "Cairo", "Finland": "Helsinki", "Ghana": "Accra", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga", "Mongolia": "Ulaanbaatar", "Nepal": "Kathmandu",
    "Oman": "Muscat", "Peru": "Lima", "Qatar": "Doha", "Romania": "Bucharest", "Spain": "Madrid",
    "Thailand": "Bangkok", "Uruguay": "Montevideo", "Vietnam": "Hanoi", "Zambia": "Lusaka",
}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def conversion(draw: Random) -> tuple[str, str]:
    """A question about units, and its answer."""
    (large, small, factor), count = draw.choice(UNITS), draw.randint(2, 30)
    total = count * factor
    return (
        f"How many {small} are {count} {large}?",
        f"{total:,} {small}. There are {factor:,} {small} to each of the {count} {large}.",
    )


def capital(draw: Random) -> tuple[str, str]:
    """A question about a country, and its answer."""
    country, city = draw.choice(sorted(CAPITALS.items()))
    return (
        f"What is the capital of {country}?",
        f"{city}. It is where the government of {country} has its seat.",
    )


def total(draw: Random) -> tuple[str, str]:
    """A question about a sum, and its answer."""
    one, other = draw.randint(11, 99), draw.randint(11, 99)
    tens, ones = one // 10 * 10 + other // 10 * 10, one % 10 + other % 10
    return (
        f"What is {one} plus {other}?",
        f"{one + other}. The tens make {tens}, and the ones {ones}.",
    )


def weekday(draw: Random) -> tuple[str, str]:
    """A question about the week, and its answer."""
    today, ahead = draw.randrange(7), draw.randint(2, 6)
    later = DAYS[(today + ahead) % 7]
    return (
        f"Today is {DAYS[today]}. Which day is it in {ahead} days?",
        f"{later}. It comes {ahead} days after {DAYS[today]}.",
    )


def chats(count: int = 200, seed: int = 0) -> list[dict[str, list[dict[str, str]]]]:
    """Rows of one to three questions with their answers, half of them with a system message."""
    draw = Random(seed)
    rows = []
    for _ in range(count):
        messages = [{"role": "system", "content": SYSTEM}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 3)):
            question, answer = draw.choice([conversion, capital, total, weekday])(draw)
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        rows.append({"messages": messages})
    return rows


if __name__ == "__main__":
    FILE.write_text("".join(json.dumps(row) + "\n" for row in chats()), encoding="utf-8")
