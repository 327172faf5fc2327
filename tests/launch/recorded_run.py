"""The files of a run that is over."""

import json
from pathlib import Path

from launch.settings.run_config import resolve
from storage.disk.run_directory import RunDirectory

START_S = 1_700_000_000.0


def record(directory: Path, name: str, *, rewards: list[float], stage: str = "rl", **layer: object) -> Path:
    """Write what a run leaves after so many steps, one every ten seconds."""
    run = RunDirectory(directory, name)
    config = resolve({"run": name, "directory": str(directory), "data": {"task": "sort"}, **layer})
    run.config.write_text(config.model_dump_json())
    run.write_provenance()
    rows = [
        {
            "time_s": START_S + 10 * step, "step": step, "kind": "metrics", "source": "learner",
            "train/stage": "rl", "train/policy_version": step + 1, "reward/mean": reward,
            "time/step_s": 10.0, "time/waiting_for_batch_s": 4.0,
        }
        for step, reward in enumerate(rewards, start=1)
    ]  # fmt: skip
    newest = len(rewards) + 1
    versions = dict.fromkeys(("policy_version", "oldest_version", "newest_version"), newest)
    rows.append({"kind": "evaluation", "sampled": 0.5, "greedy": 0.6, **versions})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = {"stage": stage, "step": len(rewards), "policy_version": len(rewards) + 1}
    (run.path / "progress.json").write_text(json.dumps(progress))
    (run.path / "checkpoints/step_00000002").mkdir(parents=True)
    return run.path
