"""The task of `launch bench critic`, its plan, and what it makes of the records of its runs."""

import itertools
import json

import pytest

from actors.engines.base import Sampling
from actors.episodes.task import Task
from actors.policy.policy import Policy
from benchmarks.critic import OBJECTIVES, Plan, configuration, figures_of, report, table
from benchmarks.delayed_reward import (
    LUCK,
    MOST_TURNS,
    RIGHT,
    SCORES,
    WRONG,
    DelayedReward,
    episode,
    task_files,
    write_task,
)
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError, SluiceError
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import append_records
from tests.actors.conftest import tokenizer  # noqa: F401 - a fixture

TURNS = 4


async def played(tokenizer, label, answer):  # noqa: F811 - the fixture's value
    """What the policy saw at the end, and the episode; `answer` says it for each letter."""
    row, said = iter(episode(label, TURNS)[1]), []

    def reply(tokens):
        said.append(tokenizer.decode(tokens))
        return tokenizer.encode(answer(next(row)) + "<|end|>")

    policy = Policy(ScriptedEngine(reply), tokenizer, Sampling(max_new_tokens=2))
    environment = DelayedReward(DelayedReward.Settings(turns=TURNS))
    found = await environment.run(Task(task_id="g1.0", prompt="", label=label), policy)
    return said[-1:], found


async def test_the_reward_comes_at_the_end_and_is_right_answers_and_luck(tokenizer):  # noqa: F811
    for label in ("0-1", "0-2", "0-3"):
        opening, letters = episode(label, TURNS)
        [said], right = await played(tokenizer, label, RIGHT.__getitem__)
        scores = "".join(
            f"<|user|>{TURNS - n}{SCORES[opening + n]}{letter}<|assistant|>{RIGHT[letter]}<|end|>"
            for n, letter in enumerate(letters)
        )
        assert said == scores.removesuffix(f"{RIGHT[letters[-1]]}<|end|>")
        [trajectory] = right.trajectories
        assert [turn.reward for turn in trajectory.turns] == [None] * TURNS
        assert trajectory.reward == (opening + TURNS - 7.5) / TURNS
        _, wrong = await played(tokenizer, label, WRONG.__getitem__)
        assert wrong.trajectories[0].reward == (opening - 7.5) / TURNS
        assert (right.outcome, wrong.outcome) == (1.0, 0.0)  # luck is no part of what is measured


def test_luck_outweighs_all_answers_and_any_score_has_a_character():
    lucks = [episode(f"0-{n}", TURNS)[0] for n in range(1000)]
    assert {luck: pytest.approx(250, abs=60) for luck in LUCK} == {luck: lucks.count(luck) for luck in LUCK}
    assert min(b - a for a, b in itertools.pairwise(LUCK)) > TURNS
    assert max(LUCK) + MOST_TURNS < len(SCORES)


@pytest.mark.slow
def test_prompts_and_demonstrations_are_those_of_the_seed(tmp_path):
    for directory in ("a", "b"):
        write_task(tmp_path / directory, turns=TURNS, seed=3)
    files, same = task_files(tmp_path / "a", 3), task_files(tmp_path / "b", 3)
    assert [path.read_bytes() for path in files] == [path.read_bytes() for path in same]
    shown = [json.loads(line) for line in files.demonstrations.read_text().splitlines()]
    assert {len(row["prompt"]) for row in shown} == {1, 3, 5, 7}
    said = [(row["prompt"][-1]["content"][-1], row["response"]) for row in shown]
    assert all(answer in (RIGHT[letter], WRONG[letter]) for letter, answer in said)
    right = sum(RIGHT[letter] == answer for letter, answer in said) / len(said)
    assert right == pytest.approx(0.5, abs=0.02)
    trained, heldout = files.prompts.read_text().splitlines(), files.heldout.read_text().splitlines()
    assert not {json.loads(line)["label"] for line in trained} & {
        json.loads(line)["label"] for line in heldout
    }


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_runs_of_a_seed_differ_in_their_advantage_alone(tmp_path, objective):
    plan = Plan(tmp_path, steps=7)
    config = configuration(plan, objective, 2)
    assert config.learner.has_critic == objective.startswith("gae")
    plain = configuration(plan, "reinforce", 2)
    learner = {"advantage", "critic", "whiten_advantages"}
    assert config.model_dump(exclude={"run": True, "learner": learner}) == plain.model_dump(
        exclude={"run": True, "learner": learner}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objectives": ("ppo",)}, "--objectives ppo: there are reinforce"),
        ({"turns": 10}, "--turns 10: an episode has 1 to 9"),
        ({"parallel": 0}, "--parallel 0: it is 1 at least"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        Plan(tmp_path, **change)


def test_no_baseline_of_siblings_can_see_the_luck(tmp_path):
    config = configuration(Plan(tmp_path), "reinforce", 0)
    assert config.admission.samples_per_prompt == 1
    assert config.learner.whiten_advantages


def records(steps, right, **values):
    evaluations = [
        {"kind": "evaluation", "step": n * 10, "sampled": share, "time_s": 0.0}
        for n, share in enumerate(right)
    ]
    return evaluations + [
        {"source": "learner", "step": n, "time_s": 10.0 * n, "train/stage": "rl", "time/step_s": 2.0,
         **values}
        for n in range(1, steps + 1)
    ]  # fmt: skip


def test_figures_of_a_run_are_those_of_its_steps_and_evaluations(tmp_path):
    run = RunDirectory(tmp_path, "gae-0")
    with pytest.raises(SluiceError, match="0 steps and 0 evaluations"):
        figures_of(run)
    warmup = {"source": "learner", "step": 3, "time_s": 0.0, "train/stage": "warmup"}
    found = records(40, [0.5, 0.6, 0.9, 0.9, 0.96], **{"critic/explained_variance": 0.5})
    append_records(run.metrics, [warmup, *records(5, [0.1]), *found])  # a learner that died trained 5 again
    figures = figures_of(run)
    assert (figures["steps"], figures["right_first"], figures["right_last"]) == (40, 0.5, 0.96)
    # smoothed: 0.8 at 20 and 0.92 at 30
    assert figures["steps_to_mark"] == pytest.approx(28.3)
    assert (figures["explained_variance"], figures["seconds"], figures["step_s"]) == (0.5, 390.0, 2.0)
    assert (figures["evaluated_steps"], figures["right"]) == ([0, 10, 20, 30, 40], [0.5, 0.6, 0.9, 0.9, 0.96])


def test_a_run_that_never_gets_there_has_no_step_to_tell(tmp_path):
    run = RunDirectory(tmp_path, "reinforce-0")
    append_records(run.metrics, records(20, [0.5, 0.6, 0.5]))
    figures = figures_of(run)
    assert (figures["steps_to_mark"], figures["explained_variance"]) == (None, None)


def test_the_report_says_who_was_ahead_in_each_seed(tmp_path):
    def figures(last, mark):
        return {
            "right_first": 0.3, "right_last": last, "steps_to_mark": mark, "explained_variance": None,
            "step_s": 1.0,
        }  # fmt: skip

    runs = {"reinforce-0": figures(0.6, None), "gae-0": figures(0.9, 70.4), "gae-1": figures(0.8, 80.0)}
    found = report(Plan(tmp_path, seeds=2), runs)
    assert found["gae_less_reinforce"] == pytest.approx([0.3])
    assert (found["gae_wins"], found["complete"]) == (1, False)
    assert found["objectives"]["gae"]["steps_to_mark"] == [70.4, 80.0]
    lines = table(found).splitlines()
    assert lines[0].split() == ["run", "first", "last", "to", "0.9", "explained", "s/step"]
    assert lines[1].split() == ["gae-0", "0.300", "0.900", "70", "-", "1.00"]
    assert lines[3].split() == ["reinforce-0", "0.300", "0.600", "-", "-", "1.00"]
