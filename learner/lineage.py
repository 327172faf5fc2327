"""Which groups made which policy version: one line a step, for audits."""

import json
from collections.abc import Sequence
from pathlib import Path


def record(path: Path, *, step: int, policy_version: int, incarnation: str, lease_ids: Sequence[int]) -> None:
    """Add the step that made `policy_version`. A step trained again after a resume has a later line."""
    line = {
        "step": step,
        "policy_version": policy_version,
        "incarnation": incarnation,
        "leases": list(lease_ids),
    }
    with path.open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read(path: Path, *, until_step: int) -> dict[int, list[int]]:
    """Step -> leases, as they count in weights of `until_step`: of a step trained again, the last time."""
    steps: dict[int, list[int]] = {}
    if not path.exists():
        return steps
    for line in path.read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut short by a kill: that step never became durable
            continue
        if entry["step"] <= until_step:
            steps[entry["step"]] = entry["leases"]
    return dict(sorted(steps.items()))
