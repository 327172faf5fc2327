"""The mixture, data sets and best checkpoint of the documentation, stopped and taken up again."""

import json
from pathlib import Path

import pytest

from storage.metrics.records import read_records
from tests.e2e.commands import SMALL, Command, assert_whole, wait_for_step

pytestmark = [pytest.mark.nightly, pytest.mark.nats, pytest.mark.timeout(900)]
PAGE = Path(__file__).parents[2] / "docs/data.md"


def example(heading: str) -> str:
    """The first configuration below a heading of the page."""
    _, _, below = PAGE.read_text().partition(f"## {heading}\n")
    return below.split("```toml\n")[1].split("```")[0]


def write_prompts(directory: Path, name: str, count: int) -> None:
    numbers = (f"{7919 * (n + len(name)):06d}"[-6:] for n in range(count))
    rows = (
        {"prompt": f"sort {digits}", "label": "".join(sorted(digits)), "metadata": {"level": n % 2}}
        for n, digits in enumerate(numbers)
    )
    (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def launched(directory: Path) -> Command:
    return Command(
        directory, "local", *SMALL, "--config", "mix.toml", "--learner.checkpoint.keep", "1",
        "--data.heldout", "words.jsonl",
    )  # fmt: skip


def test_the_example_of_the_documentation_mixes_measures_and_keeps_the_best(tmp_path: Path):
    (tmp_path / "mix.toml").write_text(example("Several sources") + example("Several held-out data sets"))
    for name, count in (("chat", 40), ("math", 40), ("aime", 3), ("words", 2)):
        write_prompts(tmp_path, name, count)
    run = tmp_path / "runs/sort"
    launcher = launched(tmp_path)
    try:
        wait_for_step(launcher, run, 2, timeout_s=300.0)
        assert launcher.stop(300) == 0, launcher.said()
        launcher = launched(tmp_path)
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    assert_whole(run, 4, 4, 4)
    summary = json.loads((run / "summary.json").read_text())
    assert_best(run, summary)
    assert summary["evaluation_sets"].keys() == {"aime", "words"}
    assert_mixed(run)


def assert_best(run: Path, summary: dict) -> None:
    """The best evaluated version's checkpoint is there beside the newest, and no other."""
    best = summary["best_checkpoint"]
    scores = {int(v): found["pass@4"] for v, found in summary["evaluation_sets"]["aime"].items() if int(v)}
    assert best["metric"] == "aime/pass@4"
    assert best["value"] == max(scores.values()) == scores[best["policy_version"]]
    assert best["path"] == str(Path("runs/sort/checkpoints") / f"step_{best['step']:08d}")
    assert best["step"] == best["policy_version"] - 1
    kept = {path.name for path in (run / "checkpoints").glob("step_*")}
    assert kept == {f"step_{best['step']:08d}", "step_00000004"}


def assert_mixed(run: Path) -> None:
    """Every step tells its sources, whose prompts were drawn by their shares and whose shares moved."""
    rows = [row for row in read_records(run / "metrics.jsonl") if "source/chat/share" in row]
    assert {row["step"] for row in rows} == {1, 2, 3, 4}
    names = ("chat", "math=0", "math=1")
    for row in rows:
        assert sum(row[f"source/{name}/groups_in_step"] for name in names) == 4
        assert sum(row[f"source/{name}/share"] for name in names) == pytest.approx(1.0)
    for row in (row for row in read_records(run / "metrics.jsonl") if row.get("train/stage") == "rl"):
        told = {name.removeprefix("source_reward/") for name in row if name.startswith("source_reward/")}
        assert told, row
        assert told <= {*names}, row
    last = rows[-1]
    assert sum(last[f"source/{name}/groups"] for name in names) >= 16
    floors = {"chat": 0.025, "math=0": 0.0375, "math=1": 0.0375}  # a tenth of what is configured
    assert all(row[f"source/{name}/share"] >= floors[name] - 1e-3 for row in rows for name in names)
