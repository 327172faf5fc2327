"""Whoever adds an engine states in its settings all that the fleet, checks and plans go by."""

from pathlib import Path
from typing import ClassVar, Literal

import pytest

from actors.engines.fleet.build import EnginePlace, build_engine
from actors.engines.fleet.colocation import able_to_release
from actors.engines.fleet.engine_admin import attached_builds
from actors.engines.fleet.gpu_plan import gpu_plan, gpus_used
from actors.engines.on_policy import on_policy, tells_unscaled_logprobs
from actors.engines.served_adapters import served_adapters
from actors.engines.sglang.server.kernel_versions import learners_kernels
from actors.evaluation.dedicated import exact_engine
from actors.other_policies.opponents import opponent_engine
from actors.policy.cut_off_sampling import told_by
from actors.settings.actors import ActorsConfig, SamplingConfig
from actors.settings.engines import EmbeddedEngineConfig, EngineSettings, SglangEngineConfig, refuse_inexact
from actors.settings.opponents import OpponentConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from launch.checks.engine_check import own_servers
from launch.settings.config_checks import check_together
from launch.settings.run_config import RunConfig


class EchoEngine(EngineSettings):
    type: Literal["echo"] = "echo"
    built_by: ClassVar[str] = f"{__name__}:echo"

    times: int = 2


def echo(config: EchoEngine, _model: Path, place: EnginePlace) -> ScriptedEngine:
    assert place.log_file.name == "log"
    return ScriptedEngine(lambda prompt: [*prompt] * config.times)


async def test_an_engine_that_is_added_is_built_and_asked_nothing_else(tmp_path: Path):
    engine = EchoEngine(routed_experts=True)
    built = build_engine(engine, tmp_path, tmp_path / "log")
    assert isinstance(built, ScriptedEngine)
    actors = ActorsConfig().model_copy(update={"engine": engine})
    assert gpu_plan(actors).rollouts == (0,)
    assert gpus_used(engine, (0,)) == set()
    assert attached_builds(engine, tmp_path) == {}
    assert served_adapters(engine, None, max_staleness=4) is None
    for kept in (able_to_release(engine), exact_engine(engine), told_by(engine, SamplingConfig(top_k=4))):
        assert kept is engine
    assert opponent_engine("rival", OpponentConfig(version=0), engine) is engine
    assert (
        opponent_engine("rival", OpponentConfig(version=0, engine="embedded"), engine)
        == EmbeddedEngineConfig()
    )
    assert engine.servers == SglangEngineConfig(routed_experts=True)
    assert not tells_unscaled_logprobs(engine)
    assert await learners_kernels(engine, {}) == {}
    with pytest.raises(ConfigError, match=r"actors\.engine\.type=echo: set it to sglang"):
        on_policy(engine)
    with pytest.raises(ConfigError, match=r"actors\.engine\.type=echo: it adds up in another way"):
        refuse_inexact(engine, exact=True)


@pytest.mark.parametrize("colocated", [False, True])
def test_a_run_may_have_an_engine_that_is_added(*, colocated: bool):
    config = RunConfig()
    actors = config.actors.model_copy(update={"engine": EchoEngine()})
    colocation = config.colocation.model_copy(update={"enabled": colocated})
    config = config.model_copy(update={"actors": actors, "colocation": colocation})
    check_together(config)
    assert own_servers(config) is None
