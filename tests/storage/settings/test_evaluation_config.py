"""Settings of evaluations: what is measured by default, and what is refused at the start."""

import json

import pytest

from bus.errors import ConfigError
from launch.settings.run_config import resolve
from storage.disk.run_directory import RunDirectory
from storage.prompts.run_prompts import read_prompts
from storage.settings.data import DataConfig
from storage.settings.evaluation import EvaluationConfig, EvaluationSetConfig

AIME = {"name": "aime", "prompts": "a.jsonl"}


@pytest.mark.parametrize(("samples", "ks"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_k_are_the_powers_of_two_and_n_unless_chosen(samples, ks):
    assert EvaluationSetConfig(**AIME, samples=samples).ks == ks
    assert EvaluationSetConfig(**AIME, samples=8, pass_at=(5, 1, 5)).ks == (1, 5)


def test_best_is_a_score_that_is_measured():
    aime = AIME | {"samples": 4}
    for best in ("heldout/greedy", "aime/sampled", "aime/pass@4", "aime/pass^2"):
        assert EvaluationConfig(sets=[aime], best=best).best == best
    for best, problem in (
        ("aime/pass@3", r"the scores of aime are sampled, greedy, pass@1, pass\^1, pass@2"),
        ("heldout/pass@1", "the scores of heldout are sampled, greedy"),
        ("gpqa/greedy", "is of no set; write set/score with one of: heldout, aime"),
        ("accuracy", "is of no set"),
    ):
        with pytest.raises(ValueError, match=problem):
            EvaluationConfig(sets=[aime], best=best)


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ([AIME, AIME], "two sets are named 'aime'"),
        ([AIME | {"name": "heldout"}], "'heldout' is the set that data.heldout gives"),
        ([AIME | {"name": "a/b"}], "pattern"),
        ([AIME | {"samples": 0}], "greater than or equal to 1"),
        ([AIME | {"samples": 4, "pass_at": [8]}], "pass_at has 8, which 4 samples of a prompt"),
        ([AIME | {"samples": 4, "pass_at": [0]}], "pass_at has 0"),
        ([AIME | {"temperature": 0}], "greater than 0"),
    ],
)
def test_sets_that_cannot_be_measured_are_refused(sets, problem):
    with pytest.raises(ValueError, match=problem):
        EvaluationConfig.model_validate({"sets": sets})


def test_the_best_by_held_out_prompts_needs_some():
    with pytest.raises(ConfigError, match=r"evaluation.best='heldout/sampled' needs held-out prompts"):
        resolve({"data": {"prompts": "a.jsonl"}, "evaluation": {"best": "heldout/sampled"}})
    resolve({"data": {"task": "sort"}, "evaluation": {"best": "heldout/sampled"}})


def test_prompts_of_sets_are_read_with_their_choices_and_none_may_be_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "p"}))
    data, run = DataConfig(prompts=tmp_path / "a.jsonl"), RunDirectory(tmp_path, "run")
    sets = [EvaluationSetConfig(name="aime", prompts=tmp_path / "a.jsonl", reward="math", environment="e")]
    [prompt] = read_prompts(data, run, 0, sets).sets["aime"]
    assert (prompt.content, prompt.metadata) == ("p", {"reward": "math", "environment": "e"})
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(ConfigError, match="holds no rows"):
        read_prompts(data, run, 0, [EvaluationSetConfig(name="b", prompts=tmp_path / "b.jsonl")])
