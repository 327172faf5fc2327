"""Runs whose learner and engines take turns at a device."""

import json
import math
import re
from pathlib import Path

EVENTS = ("device_yielded", "device_taken_back", "device_held", "device_given_back")
COLOCATED = (
    "--colocation.enabled", "--actors.evaluation.engine", "rollout", "--colocation.lapse-s", "60"
)  # fmt: skip


def said(run: Path, part_name: str) -> list[tuple[str, str, float, int]]:
    """Return what a part said of the device: event, hold, time by the host's clock, tokens sampled so far."""
    path = run / f"logs/{part_name}.log"
    found = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        if event := re.search(rf"\b({'|'.join(EVENTS)}) ", line):
            values = dict(re.findall(r"(\w+)=(\S+)", line))
            found.append((event[1], values["hold"], float(values["at_s"]), int(values.get("tokens", -1))))
    return found


def assert_never_both(run: Path) -> int:
    """The engines sampled nothing from before each hold until after it; returns how many holds that were."""
    free = []
    times = said(run, "actors")
    if len(times) % 2:  # the last was not over when the actors ended
        _, hold, _, tokens = times[-1]
        times.append(("device_taken_back", hold, math.inf, tokens))
    for (event, _, begin, before), (_, _, end, after) in batched(times, 2):
        assert event == "device_yielded"
        assert before == after, "tokens were sampled meanwhile"
        free.append(
            (begin if before else 0.0, end)
        )  # engines that had not started wait for the end of a hold
    holds = [(at_s, hold) for event, hold, at_s, _ in said(run, "learner") if event in EVENTS[2:]]
    early = ended_before_an_engine_was_ready(run)
    for (held, hold), (given_back, _) in batched(holds, 2):
        assert hold in early or any(begin < held and given_back < end for begin, end in free), (
            held,
            given_back,
            free,
        )
    return len(holds) // 2


def evaluations(run: Path) -> dict[int, tuple[int, int]]:
    """Return the oldest and the newest version that drew a token, by the version asked for."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        row["policy_version"]: (row["oldest_version"], row["newest_version"])
        for row in rows
        if row["kind"] == "evaluation"
    }


def ended_before_an_engine_was_ready(run: Path) -> set[str]:
    """Holds of which no engine had to hear, by the host's clock."""
    ready = re.search(r"\bengine_ready .*\bat_s=(\S+)", (run / "logs/actors.log").read_text(errors="replace"))
    ready_s = float(ready[1]) if ready else math.inf
    given_back = [
        (hold, at_s) for event, hold, at_s, _ in said(run, "learner") if event == "device_given_back"
    ]
    return {hold for hold, at_s in given_back if at_s <= ready_s}


def batched(items, size):
    """Pairs for size 2; what is left over is left out: a process that is killed says no more."""
    return zip(*[iter(items)] * size, strict=False)


def assert_took_turns(run: Path, *, steps: int) -> None:
    """Assert that engines stood still at each step of a finished run, and had the versions to evaluate."""
    assert assert_never_both(run) >= steps
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    waited = {
        row["step"] for row in rows if row.get("train/stage") == "rl" and "time/waiting_for_device_s" in row
    }
    assert len(waited) == steps, "a row may come twice"
    assert "engine_lost" not in (run / "logs/actors.log").read_text(), "freeing the device is no failure"
    evaluated = evaluations(run)
    last = steps + 1
    assert {0, 1, last} <= evaluated.keys()
    for version in (1, last):
        assert evaluated[version] == (version, version), "nothing was published while the learner waited"
