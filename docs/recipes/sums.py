"""Write sums in words: 8,000 to train on in sums.jsonl, and 256 of other pairs in held.jsonl."""

import json
import random
from pathlib import Path

FORMS = (
    "What is {a} + {b}? Answer with the number only.",
    "Add {a} and {b}. Answer with the number only.",
    "How much is {a} plus {b}? Answer with the number only.",
)


def write(file: str, pairs: list[tuple[int, int]]) -> None:
    """Write one prompt with its label for each pair of numbers."""
    rows = [{"prompt": random.choice(FORMS).format(a=a, b=b), "label": str(a + b)} for a, b in pairs]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))


random.seed(0)
all_pairs = [(a, b) for a in range(1, 100) for b in range(1, 100)]
random.shuffle(all_pairs)
write("held.jsonl", all_pairs[:256])
write("sums.jsonl", all_pairs[256:8256])
