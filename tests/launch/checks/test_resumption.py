"""A run that is started again: it goes on, or says what it lacks, and names what is set otherwise."""

import json

import pytest

from launch.checks.resumption import over, remarks
from launch.dashboard.run_list import facts_of_runs
from launch.run_view.run_files import RunFiles, changed_settings
from launch.screens.run_tables import whole_run
from launch.settings.run_config import RunConfig
from learner.config.lora import LoraConfig
from learner.config.loss import RewardModelLoss
from storage.disk.run_directory import RunDirectory


def config(steps: int, target: float | None = None, lr: float = 1e-4, **layer: object) -> RunConfig:
    learner = {"steps": steps, "target_accuracy": target, "optimizer": {"lr": lr}}
    return RunConfig.model_validate({"run": "mine", "learner": learner, **layer})


SUPERVISED = config(0, warmup={"steps": 7, "demonstrations": "chats.jsonl"})


@pytest.fixture
def ended(tmp_path):
    """A run of four steps that has ended by itself, after three where it reached its target of 0.9."""

    def make(*, reached: bool) -> RunDirectory:
        run = RunDirectory(tmp_path, "mine")
        run.config.write_text(config(4, 0.9 if reached else None).model_dump_json())
        progress = {
            "stage": "done",
            "warmup_step": 7,
            "step": 3 if reached else 4,
            "target_reached_step": 3 if reached else None,
        }
        (run.path / "progress.json").write_text(json.dumps(progress))
        return run

    return make


@pytest.mark.parametrize(
    ("reached", "asked", "said"),
    [
        (False, config(4), "it has trained 4 steps: give a higher --learner.steps"),
        (False, config(3), "it has trained 4 steps: give a higher --learner.steps"),
        (False, config(6), None),
        (False, SUPERVISED, "it has trained 7 steps on demonstrations: give prompts, a reward"),
        (True, config(4, 0.9), "it has reached its target of 0.9 after 3 steps: give a higher"),
        (True, config(9, 0.8), "it has reached its target of 0.9 after 3 steps: give a higher"),
        (True, config(9, 0.95), None),
        (True, config(4), None),
    ],
)
def test_a_run_that_has_ended_goes_on_where_it_is_asked_for_more(ended, reached, asked, said):
    found = over(asked, ended(reached=reached))
    assert (found is None) if said is None else (said in found)


def test_a_run_that_goes_on_names_what_is_set_otherwise(ended):
    [to, other] = remarks(config(6, lr=2e-4), ended(reached=False))
    assert to == "Run 'mine' had ended after step 4, and goes on to step 6."
    assert other.splitlines() == [
        "Settings that have changed since the last start:",
        "  learner.steps: 4 -> 6",
        "  learner.optimizer.lr: 0.0001 -> 0.0002",
    ]


def test_a_start_records_what_has_changed_for_lists_and_the_page(ended):
    run = ended(reached=False)
    run.write_provenance()
    run.write_provenance(changed_settings(RunFiles(run.path).settings, config(4, 0.9)))
    assert whole_run(run.path)["changed"] == ["learner.target_accuracy: none -> 0.9"]
    [facts] = facts_of_runs(run.path.parent, ["mine"])
    assert facts["changed"] == ["learner.target_accuracy: none -> 0.9"]


def test_a_finished_supervised_stage_is_not_extended_in_silence(ended):
    longer = SUPERVISED.model_copy(update={"warmup": SUPERVISED.warmup.model_copy(update={"steps": 12})})
    run = ended(reached=False)
    assert "is not extended to 12: `launch local --from mine` begins another run" in str(over(longer, run))
    lora = longer.learner.model_copy(update={"lora": LoraConfig(rank=4)})  # its checkpoints lack the weights
    assert f"`launch local --model.path {run.export}` begins" in str(
        over(longer.model_copy(update={"learner": lora}), run)
    )
    scores = SUPERVISED.warmup.model_copy(update={"loss": RewardModelLoss()})
    assert over(SUPERVISED.model_copy(update={"warmup": scores}), run) == (
        f"it has trained 7 steps on pairs: {run.export} has the reward model"
    )


def test_a_run_that_is_taken_up_as_it_was_says_nothing(ended):
    run = ended(reached=False)
    (run.path / "progress.json").write_text(json.dumps({"stage": "rl", "step": 2}))
    assert over(config(4), run) is None
    assert remarks(config(4), run) == []
