"""Dates to write as YYYY-MM-DD. A pretrained model of 135M parameters learns it in some 40 steps.

The problems are those of docs/first-real-run.md. The reward grades wrong answers, too: all answers
of a model that is not trained yet are wrong, and equal rewards teach nothing.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
SENTENCES = (
    "The meeting is on {}.",
    "Our flight leaves on {}.",
    "She was born on {}.",
    "The invoice is due on {}.",
    "On {} the shop opens again.",
)
NUM_ROWS = 2000


def write_rows(path: Path) -> Path:
    """Write the problems as JSON lines; return the file."""
    chance = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(NUM_ROWS):
            day, month, year = (
                chance.randint(1, 28),
                chance.randint(1, 12),
                chance.randint(1950, 2029),
            )
            sentence = chance.choice(SENTENCES).format(f"{MONTHS[month - 1]} {day}, {year}")
            row = {
                "prompt": f"{sentence} Write this date as YYYY-MM-DD.",
                "answer": f"{year}-{month:02}-{day:02}",
            }
            file.write(json.dumps(row) + "\n")
    return path


def graded(completion: str, answer: str, **row: object) -> float:
    """Return .6 for the share of right characters, .2 for the date, and .2 for nothing else."""
    text = completion.strip()
    found = re.search(r"\d{4}-\d\d-\d\d", text)
    given = found.group() if found else text[:10]
    same = sum(a == b for a, b in zip(given, answer, strict=False)) / len(answer)
    return 0.6 * same + 0.2 * (given == answer) + 0.2 * (text == answer)
