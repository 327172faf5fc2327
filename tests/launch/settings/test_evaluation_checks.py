"""Settings of evaluations that do not fit the rest of a run's are refused."""

import pytest

from bus.errors import ConfigError
from launch.settings.config_checks import refuse_nobody_rolls_out
from launch.settings.run_config import resolve

SETS = [{"name": "base", "prompts": "base.jsonl", "answered_by": "base"}]


def test_a_set_is_answered_by_an_opponent_that_stays_as_it_is():
    for opponents in ({}, {"base": {"version": "latest - 3"}}, {"other": {"path": "model"}}):
        settings = {"evaluation": {"sets": SETS}, "actors": {"opponents": opponents}}
        with pytest.raises(ConfigError, match=r"answered_by=.base. is none of actors\.opponents"):
            resolve(settings)
    resolve({"evaluation": {"sets": SETS}, "actors": {"opponents": {"base": {"path": "model"}}}})
    with pytest.raises(ConfigError, match="is of a model that stays as it is"):
        resolve(
            {
                "evaluation": {"sets": SETS, "best": "base/sampled"},
                "actors": {"opponents": {"base": {"path": "model"}}},
            }
        )


def test_a_set_is_answered_by_a_model_behind_an_endpoint_of_another_name_than_an_opponents():
    there = {"endpoints": {"base": {"url": "https://host/v1", "model": "large"}}}
    resolve({"evaluation": {"sets": SETS}, "actors": {"evaluation": there}})
    opponents = {"base": {"path": "model"}}
    with pytest.raises(ConfigError, match=r"endpoints\.base: this name is that of an opponent"):
        resolve({"actors": {"evaluation": there, "opponents": opponents}})


@pytest.mark.parametrize("evaluation", [{"only": True}, {"servers": 1}])
def test_engines_that_only_evaluate_do_not_take_turns_with_a_learner(evaluation):
    with pytest.raises(ConfigError, match=f"colocation.enabled with actors.evaluation.{min(evaluation)}"):
        resolve({"colocation": {"enabled": True}, "actors": {"evaluation": evaluation}})


def test_servers_beside_a_pair_that_runs_already_are_refused():
    engine = {
        "type": "sglang", "url": "http://there:30001", "disaggregation": {"enabled": True, "prefill_url": "http://there:30000"},
    }  # fmt: skip
    resolve({"actors": {"engine": engine}})
    with pytest.raises(ConfigError, match=r"actors\.evaluation\.servers with .*prefill_url"):
        resolve({"actors": {"engine": engine, "evaluation": {"servers": 1}}})


def test_a_run_whose_own_settings_only_evaluate_is_refused():
    only = resolve({"actors": {"evaluation": {"only": True}}})
    with pytest.raises(ConfigError, match="no actor would roll out; give it to the `launch actors`"):
        refuse_nobody_rolls_out(only)
    refuse_nobody_rolls_out(resolve())
