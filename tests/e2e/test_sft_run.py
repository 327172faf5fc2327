"""`launch local --sft`: a run on demonstrations alone, which is stopped on its way and goes on."""

import json
import math
import random
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from launch.run_view.recorded_runs import recorded_runs
from launch.run_view.run_files import RunFiles
from tests.e2e.commands import Command, part, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.nats, pytest.mark.timeout(900)]
STEPS = 40
SETTINGS = (
    "--sft", "chats.jsonl", "--warmup.heldout", "heldout.jsonl", "--warmup.heldout-every", "10",
    "--warmup.steps", str(STEPS), "--warmup.batch-size", "16", "--warmup.optimizer.lr", "5e-3",
)  # fmt: skip


def chats(directory: Path) -> None:
    """Write chats of two turns: the digits of a number in order."""
    rng = random.Random(0)
    for name, count in (("chats", 200), ("heldout", 30)):
        rows = []
        for _ in range(count):
            asked = ["".join(rng.choices("0123456789", k=3)) for _ in range(2)]
            said = [("user", f"sort {text}", "assistant", "".join(sorted(text))) for text in asked]
            turns = [(role, text) for a, b, c, d in said for role, text in ((a, b), (c, d))]
            rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps_of(run: Path) -> dict[int, dict]:
    """The steps that were recorded, each the last time that it was trained."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row.get("train/stage") == "warmup"}


def trained(directory: Path, *, stopped_after: int = 0) -> Path:
    run = directory / "runs/default"
    if stopped_after:
        launcher = Command(directory, "local", *SETTINGS)
        try:
            begun = run / "metrics.jsonl"
            wait_until(
                lambda: begun.exists() and max(steps_of(run), default=0) >= stopped_after, "steps", launcher
            )
            assert launcher.stop(60) == 0, launcher.said()
        finally:
            launcher.kill()
        assert 0 < max(steps_of(run)) < STEPS
        assert [one.state for one in recorded_runs([run])] == ["stopped"]
    launcher = Command(directory, "local", *SETTINGS)
    try:
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    return run


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sft")
    chats(directory)
    return trained(directory, stopped_after=5)


def test_it_trains_without_prompts_and_actors_and_its_held_out_loss_falls(resumed: Path):
    assert [one.state for one in recorded_runs([resumed])] == ["finished"]
    assert sorted(path.stem for path in (resumed / "logs").glob("*.log")) == ["bus", "learner", "storage"]
    assert (resumed / "export/model.safetensors").exists()
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["groups"]["issued"] == 0  # else a run that goes on with prompts would roll them out
    steps = steps_of(resumed)
    assert sorted(steps) == list(range(1, STEPS + 1))
    measured = {step: row["heldout/loss_nats"] for step, row in steps.items() if "heldout/loss_nats" in row}
    assert sorted(measured) == [10, 20, 30, 40]
    assert measured[40] < 0.6 * measured[10]


def trained_on_pairs(directory: Path, *settings: str) -> Path:
    rows = [
        {"prompt": f"sort {n}", "chosen": "".join(sorted(f"{n}")), "rejected": f"{n}"}
        for n in range(100, 164)
        if sorted(f"{n}") != list(f"{n}")
    ]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    batches = ["--warmup.batch-size", "16", "--warmup.steps", "20"]
    if "--warmup.optimizer.lr" not in settings:
        batches += ["--warmup.optimizer.lr", "1e-3"]
    files = ("--pairs", "pairs.jsonl", "--warmup.heldout", "pairs.jsonl")
    launcher = Command(directory, "local", *files, *batches, *settings)
    try:
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    return directory / "runs/default"


@pytest.mark.nightly
def test_a_run_on_pairs_learns_which_of_two_answers_is_preferred(tmp_path: Path):
    steps = steps_of(trained_on_pairs(tmp_path))
    first, last = steps[1], steps[20]
    assert (first["train/loss"], first["rewards/margins"]) == (pytest.approx(math.log(2)), 0)
    assert last["rewards/margins"] > 0.1
    assert last["heldout/rewards/accuracies"] == 1
    assert last["heldout/loss_nats"] < 0.65


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [(), ("--learner.lora.rank", "8", "--warmup.optimizer.lr", "1e-2")])
def test_a_reward_model_is_exported_as_transformers_reads_it(tmp_path: Path, settings: tuple[str, ...]):
    run = trained_on_pairs(tmp_path, "--warmup.loss.type", "reward_model", *settings)
    last = steps_of(run)[20]
    model = AutoModelForSequenceClassification.from_pretrained(run / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    chosen, rejected = [], []
    for row in map(json.loads, (tmp_path / "pairs.jsonl").read_text().splitlines()):
        for key, found in (("chosen", chosen), ("rejected", rejected)):
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[key]}]
            tokens = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)["input_ids"]
            found.append(model(tokens).logits.item())
    assert last["heldout/rewards/chosen"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-3)
    assert last["heldout/rewards/rejected"] == pytest.approx(sum(rejected) / len(rejected), abs=1e-3)
    assert last["heldout/rewards/accuracies"] > 0.9


@pytest.mark.nightly
def test_its_losses_are_those_of_a_run_that_was_not_stopped(resumed: Path, tmp_path: Path):
    chats(tmp_path)
    whole, again = steps_of(trained(tmp_path)), steps_of(resumed)
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in whole.values()] == [row[name] for row in again.values()]


@pytest.mark.nightly
def test_a_learner_that_is_killed_goes_on_from_its_checkpoint_to_the_bit(resumed: Path, tmp_path: Path):
    chats(tmp_path)
    run = tmp_path / "runs/default"
    launcher = Command(tmp_path, "local", *SETTINGS, "--learner.checkpoint.save-every", "4")
    try:
        wait_until((run / "progress.json").exists, "a checkpoint", launcher)
        part(launcher, "learner").kill()
        assert launcher.wait(300) == 0, launcher.said()
    finally:
        launcher.kill()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row.get("train/stage") == "warmup"]
    assert steps.count(1) == 1
    assert sorted({*steps}) == list(range(1, STEPS + 1))
    again, expected = steps_of(run), steps_of(resumed)
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in again.values()] == [expected[step][name] for step in again]
    assert RunFiles(run).saved_steps[-1] == STEPS
