"""An engine of several nodes: settings that fit it, and those that are refused by name."""

import pytest

from actors.engines.fleet.gpu_plan import gpu_plan
from actors.settings.engines import refuse_stray_node
from bus.errors import ConfigError
from launch.settings.run_config import resolve

NODES = {
    "type": "sglang", "nodes": 2, "rendezvous": "head:29500", "update": "tensor", "server": {"tp_size": 4},
}  # fmt: skip


def of(engine: dict, **actors: object) -> dict:
    return {"actors": {"engine": NODES | engine, **actors}}


@pytest.mark.parametrize(
    ("layer", "remedy"),
    [
        (of({"node_rank": 2}), "node_rank=2 of nodes=2: they count from 0"),
        (of({"rendezvous": "head"}), "rendezvous='head': give HOST:PORT, an address of node 0"),
        (of({"url": "http://there:1", "server": {}}), "leave out nodes"),
        (of({"update": "group"}), "update=group: SGLang does not tell whether a rank of another node"),
        (of({"update": "disk"}), "name a directory that all of them share as weights_directory"),
        (of({"adapter": "loaded"}), "set adapter=merged"),
        (of({"disaggregation": {"enabled": True}}), "its servers are of one host each"),
        (of({"server": {"tp_size": 3}}), "does not divide the 3 ranks of actors.engine.server"),
        (of({"server": {"tp_size": 2, "dp_size": 2}}), "SGLang has no replicas over several nodes"),
        (of({}, fleet={"engines": 2}), "with actors.fleet.engines=2: its actors have that one engine alone"),
        (of({}, evaluation={"servers": 1}), "with actors.evaluation.servers"),
        (of({}) | {"colocation": {"enabled": True}}, "with colocation.enabled"),
    ],
)
def test_what_does_not_go_with_several_nodes_is_refused_by_name(layer, remedy):
    with pytest.raises(ConfigError) as refused:
        resolve(layer)
    assert remedy in str(refused.value)


def test_each_node_of_an_engine_counts_its_own_gpus():
    opponents = {"base": {"engine": "embedded", "version": "latest - 3"}}
    config = resolve(of({"update": "disk", "weights_directory": "/shared"}, opponents=opponents))
    assert gpu_plan(config.actors).opponents == {"base": 2}


def test_a_run_may_leave_the_rendezvous_to_its_jobs_and_a_node_may_not():
    engine = resolve(of({"rendezvous": ""})).actors.engine.servers
    with pytest.raises(ConfigError, match=r"nodes=2 needs actors\.engine\.rendezvous=HOST:PORT"):
        refuse_stray_node(engine)
    refuse_stray_node(resolve(of({})).actors.engine.servers)
    with pytest.raises(ConfigError, match=r"rendezvous='head:29500' are for an engine of several nodes"):
        refuse_stray_node(resolve(of({"nodes": 1})).actors.engine.servers)
