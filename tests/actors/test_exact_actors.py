"""Actors where engine and learner compute alike: whose own settings do not go with that do not start."""

import asyncio
from pathlib import Path

import pytest

from actors.engines.on_policy import on_policy
from actors.environments.base import Environment
from actors.evaluation.dedicated import own_servers
from actors.other_policies.opponents import opponent_engine
from actors.service import ActorSettings, run_actors
from actors.settings.actors import ActorsConfig, SamplingConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.settings.opponents import OpponentConfig
from bus.connection import Bus
from bus.errors import ConfigError

pytestmark = pytest.mark.nats


class Idle(Environment):
    async def run(self, task, policy):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (EmbeddedEngineConfig(dtype="bfloat16"), r"numerics=exact: actors\.engine\.dtype=bfloat16"),
        (SglangEngineConfig(url="http://127.0.0.1:1"), r"numerics=exact: actors\.engine\.type=sglang"),
    ],
)
async def test_an_actor_of_another_engine_than_the_runs_does_not_start(
    bus: Bus, tmp_path: Path, engine, said
):
    settings = ActorSettings(
        actors=ActorsConfig(engine=engine), sampling=SamplingConfig(), shards=1, max_staleness=4,
        logs=tmp_path, exact=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=said):
        await run_actors(bus, settings, Idle(), asyncio.Event())


def test_an_actor_knows_which_policies_log_probs_are_at_temperature_1_alone(tmp_path):
    def unscaled(engine):
        settings = ActorSettings(
            actors=ActorsConfig(engine=engine),
            sampling=SamplingConfig(),
            shards=1,
            max_staleness=4,
            logs=tmp_path,
        )
        return settings.unscaled

    assert unscaled(on_policy(SglangEngineConfig())) == {"default"}
    assert unscaled(SglangEngineConfig()) == unscaled(EmbeddedEngineConfig()) == set()


def test_opponents_and_held_out_prompts_are_answered_by_servers_in_ordinary_arithmetic(tmp_path):
    engine, opponent = SglangEngineConfig(), OpponentConfig(path=tmp_path)
    settings = ActorSettings(
        actors=ActorsConfig(engine=engine), sampling=SamplingConfig(), shards=1, max_staleness=4,
        logs=tmp_path, rollout_engine=on_policy(engine),
    )  # fmt: skip
    assert settings.engine.settings["rl_on_policy_target"] == "fsdp"
    for ordinary in (own_servers(settings.actors), opponent_engine("old", opponent, settings.actors.engine)):
        assert (ordinary.settings, ordinary.environment) == ({}, {})
