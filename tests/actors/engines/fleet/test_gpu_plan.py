"""Which GPUs the engines of one actor process begin on."""

import itertools

import pytest

from actors.engines.fleet.gpu_plan import GpuPlan, gpu_plan, gpus_used
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from bus.errors import ConfigError


def actors(engine, **more):
    return ActorsConfig.model_validate({"engine": {"type": "sglang", **engine}, **more})


def sglang(**server):
    return SglangEngineConfig(server=server)


def test_policies_of_other_parallel_sizes_have_no_gpu_in_common():
    own = actors({"server": {"tp_size": 2}}, fleet={"engines": 2}, evaluation={"servers": 1})
    further = {"wide": sglang(tp_size=4), "small": sglang()}
    plan = gpu_plan(own, further)
    assert plan == GpuPlan((0, 2), {}, (4,), {"wide": (6, 10), "small": (14, 15)})
    used = [gpus_used(own.engine, plan.rollouts)]
    used += [gpus_used(further[name], plan.policies[name]) for name in further]
    assert used[1] == set(range(6, 14))
    assert not any(one & other for one, other in itertools.combinations(used, 2))


def test_engines_without_a_server_of_their_own_take_no_gpu():
    here = {"version": "latest - 1", "engine": "embedded"}
    opponents = {"here": here, "there": {"version": "latest - 1"}}
    plan = gpu_plan(actors({}, opponents=opponents), {"small": EmbeddedEngineConfig(), "second": sglang()})
    assert plan == GpuPlan((0,), {"here": 1, "there": 1}, (), {"small": (2,), "second": (2,)})
    beside = actors({"url": "http://a:1"}, evaluation={"servers": 2})
    assert gpu_plan(beside, {"second": sglang(tp_size=2)}) == GpuPlan((0,), {}, (0, 1), {"second": (2,)})


def test_a_pair_takes_the_gpus_of_both_of_its_servers():
    pair = {"enabled": True, "prefill": {"tp-size": 3}}
    own = actors({"server": {"tp_size": 2}, "disaggregation": pair})
    assert gpu_plan(own, {"second": sglang()}).policies == {"second": (5,)}


def test_a_size_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"server\.tp_size='two' is not a whole number"):
        gpu_plan(actors({"server": {"tp_size": "two"}}))
