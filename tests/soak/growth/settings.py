"""Settings of a compressed run: the smallest steps, and small bounds, so that the run reaches them."""

import json
import random
from pathlib import Path

from bus.codec import Json
from bus.topology import MIB
from launch.settings.run_config import Layer

RUN = "growth"
GROUPS, SAMPLES, MAX_STALENESS, SHARDS = 2, 2, 4, 2
EVERY_VERSIONS = 50
"""Versions from one evaluation to the next."""
EACH_STEP = {"step": 1.0, "group": float(GROUPS), "evaluation": 1 / EVERY_VERSIONS}
"""How many of each there are in a step."""
PROMPTS, HELDOUT = 500, 16
STREAM_MIB = 16
"""Largest size of each stream: the smallest that there is."""
RETAIN_BYTES = MIB
"""Bytes of segments that all shards keep; the oldest go to the archive within minutes."""
STREAMS = ("TASKS", "TRAJECTORIES", "OUTCOMES", "WEIGHTS", "FILES", "EVENTS", "DEAD")
STREAM_BOUNDS = dict.fromkeys((*STREAMS, "TRAJECTORIES-1"), STREAM_MIB * MIB)
"""Largest size of each stream, that of the second shard among them."""


def settings_of_run(directory: Path, nats_port: int) -> Layer:
    """Return the settings of a run whose prompts and archive lie in `directory`, and write its prompts."""
    draw = random.Random(0)
    prompts, heldout = directory / "prompts.jsonl", directory / "heldout.jsonl"
    write_prompts(prompts, PROMPTS, draw)
    write_prompts(heldout, HELDOUT, draw)
    return {
        "run": RUN,
        "data": {"prompts": str(prompts), "heldout": str(heldout)},
        "admission": {
            "groups_per_step": GROUPS, "samples_per_prompt": SAMPLES, "max_staleness": MAX_STALENESS,
        },
        "replay": {
            "shards": SHARDS, "retain_bytes": RETAIN_BYTES, "archive": str(directory / "archive"),
        },
        "model": {
            "dtype": "float32",
            "scratch": {
                "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 16,
            },
        },
        "sampling": {"max_new_tokens": 4},
        "actors": {
            "environment": {
                "type": "length_profile",
                "lengths": {"type": "recorded", "upper": [2, 4], "counts": [1.0, 1.0]},
            },
        },
        "warmup": {"steps": 0},
        "learner": {
            "steps": 1_000_000_000, "threads": 1, "optimizer": {"lr": 1e-4},
            "checkpoint": {"save_every": 50}, "publish_dtype": "float32",
        },
        "evaluation": {"every_versions": EVERY_VERSIONS},
        "bus": {"streams": {f"{name.lower()}_mib": STREAM_MIB for name in STREAMS}},
        "supervision": {"restarts": 100_000, "longest_pause_s": 1.0},
        "monitoring": {"nats_port": nats_port},
    }  # fmt: skip


def write_prompts(path: Path, count: int, draw: random.Random) -> None:
    """Write a file of so many prompts, drawn anew."""
    rows: list[Json] = [{"prompt": f"sort {draw.randrange(10**6):06d}", "label": ""} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
