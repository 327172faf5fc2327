"""Settings of further policies: what is inherited, and which cannot be played or told apart."""

from pathlib import Path

import pytest

from bus.config import BusConfig
from bus.errors import ConfigError
from launch.settings.policies import policy_bus, shares_servers
from launch.settings.run_config import of_policy, preset, resolve, validate

PANEL = {"data": {"task": "panel"}, "actors": {"environment": {"type": "panel", "reward": "exact"}}}
OWN_GAME = {"type": "game", "game": {"type": "plugin", "start": "my_game:start"}}


def refusal(*layers):
    with pytest.raises(ConfigError) as refused:
        resolve(*layers)
    return str(refused.value)


def policies(**tables):
    return {"policies": tables}


def test_a_further_policy_has_the_runs_settings_with_its_own_over_them_and_measures_nothing():
    own = {"agents": "rewriter, selector", "warmup": {"steps": 7}, "learner": {"optimizer": {"lr": 1e-3}}}
    config = resolve(PANEL, policies(second=own), {"run": "mine", "learner": {"steps": 9}})
    found = of_policy(config, "second")
    assert config.policies["second"].agents == ("rewriter", "selector")
    assert (found.run, found.trains, found.policies) == ("mine__second", "second", {})
    assert (found.warmup.steps, found.learner.steps, found.learner.optimizer.lr) == (7, 9, 1e-3)
    assert found.learner.optimizer.warmup_steps == config.learner.optimizer.warmup_steps
    assert found.learner.target_accuracy is found.data.heldout is None
    assert (config.trains, config.parts[-1]) == ("default", "learner-second")
    with pytest.raises(ConfigError, match=r"no policy 'secnd' beside its own: did you mean 'second'\?"):
        of_policy(config, "secnd")


def test_a_setting_of_a_further_policy_may_be_written_as_flags_are():
    flags = {"agents": "selector", "learner": {"checkpoint": {"save-every": "3"}, "target-accuracy": "0.5"}}
    learner = of_policy(resolve(PANEL, policies(second=flags), {"run": "mine"}), "second").learner
    assert learner.checkpoint.save_every == 3


def test_a_flag_of_a_further_policy_may_be_none():
    flags = {"agents": "selector", "learner": {"target-accuracy": "none"}, "model": {"path": "none"}}
    run = validate(PANEL, {"model": {"path": "org/model"}}, policies(second=flags), {"run": "mine"})
    found = of_policy(run, "second")
    assert (found.model.path, found.learner.target_accuracy) == (None, None)


@pytest.mark.parametrize("targets", ["q_proj,v_proj", "q_proj, v_proj", '["q_proj", "v_proj"]'])
def test_a_flag_of_a_further_policy_may_be_a_list(targets):
    flags = {
        "agents": "selector",
        "learner": {"lora": {"rank": "4", "targets": targets}},
        "engine": {"type": "sglang", "urls": "http://one:1,http://two:2"},
    }
    third = {"agents": "solver", "model": {"freeze": "[a-c]mbed,norm"}}
    run = validate(PANEL, policies(second=flags, third=third), {"run": "mine"})
    found = of_policy(run, "second")
    assert found.learner.lora.targets == ("q_proj", "v_proj")
    assert found.actors.engine.urls == ("http://one:1", "http://two:2")
    assert of_policy(run, "third").model.freeze == ("[a-c]mbed", "norm")


def test_settings_of_a_further_policy_are_checked_like_those_of_the_run():
    said = refusal(PANEL, policies(second={"agents": ["selector"], "learner": {"stps": 3}}))
    assert said == "policies.second: unknown key learner.stps: did you mean 'steps'?"
    said = refusal(PANEL, policies(second={"agent": ["selector"]}))
    assert said == "unknown key policies.second.agent: did you mean 'agents'?"
    offload = {"agents": ["selector"], "warmup": {"optimizer": {"offload": 0.5}}}
    apart = {"learner": {"parallel": {"distributed_optimizer": False}}}
    assert "policies.second: warmup.optimizer.offload=0.5 needs" in refusal(
        PANEL, apart, policies(second=offload)
    )


def test_a_policy_that_no_agent_plays_is_refused():
    said = refusal(preset("nim"), policies(second={}))
    assert "policies.second: no agent is this policy" in said
    assert "of player-1, player-2" in said
    assert "no environment has an agent 'rewritr': did you mean 'rewriter-" in refusal(
        PANEL, policies(second={"agents": ["rewritr"]})
    )
    said = refusal(preset("nim"), policies(second={"agents": ["player"]}))
    assert "all agents (player-1, player-2) are further policies" in said
    game = {"actors": {"environment": OWN_GAME | {"opponent": "second"}}, "data": {"task": "nim"}}
    resolve(game, policies(second={}))
    resolve(
        {"actors": {"environment": OWN_GAME}, "data": {"task": "nim"}}, policies(second={"agents": ["x"]})
    )
    own = {"type": "plugin", "environment": "a:b", "agents": ["solver", "judge"]}
    said = refusal({"actors": {"environment": own}}, policies(second={"agents": ["jugde"]}))
    assert "no environment has an agent 'jugde': did you mean 'judge'? there are: judge, solver" in said
    resolve({"actors": {"environment": own}}, policies(second={"agents": ["judge"]}))


def test_a_policy_that_is_the_opponent_in_a_game_is_no_player_beside():
    rival = policies(rival={"agents": ["player-1"]})
    said = refusal(preset("duel"), rival)
    assert "policies.rival.agents has 'player-1', and environment.opponent='rival' has it play" in said
    resolve(preset("duel"), rival, {"actors": {"environment": {"opponent": "self"}}})
    measured = {"actors": {"environment": {"opponent": "self", "heldout_opponent": "rival"}}}
    assert "environment.heldout_opponent='rival' has it" in refusal(preset("duel"), rival, measured)
    resolve(preset("duel"), policies(rival={"agents": ["critic"]}), {"actors": {"environment": OWN_GAME}})


def test_a_policy_that_an_environment_names_and_nobody_trains_is_refused():
    assert "environment.opponent='rivl' is none of opponents (rival)" in refusal(
        preset("duel"), {"actors": {"environment": {"opponent": "rivl"}}}
    )
    judged = {"actors": {"environment": {"type": "debate", "decided_by": "judges", "reward": "exact"}}}
    assert "environment.decided_by='judges' is none of opponents (none)" in refusal(PANEL, judged)
    resolve(PANEL, judged, policies(judges={}))


def test_policies_have_names_and_agents_of_their_own():
    assert "policies.self: this name is that of another player" in refusal(PANEL, policies(self={}))
    past = {"actors": {"opponents": {"past": {"version": "latest - 2"}}}}
    assert "policies.past: this name is that of an opponent" in refusal(PANEL, past, policies(past={}))
    assert "policies.a__b: a name is letters and digits" in refusal(PANEL, policies(a__b={}))
    assert "a run's name has 64 characters at most" in refusal(PANEL, policies(a={}), {"run": "r" * 62})
    two = policies(a={"agents": ["rewriter"]}, b={"agents": ["rewriter"]})
    assert "policies.b.agents: agent 'rewriter' is policy 'a' already" in refusal(PANEL, two)


def test_policies_share_no_engine_and_no_device_with_a_learner():
    second = policies(second={"agents": ["selector"]})
    assert "colocation.enabled with policies (second)" in refusal(
        PANEL, second, {"colocation": {"enabled": True}}
    )
    assert "actors.evaluation.only with policies (second)" in refusal(
        PANEL, second, {"actors": {"evaluation": {"only": True}}}
    )
    attached = {"actors": {"engine": {"type": "sglang", "url": "http://there:30000"}}}
    assert "http://there:30000, which has the weights of policy 'default'" in refusal(PANEL, second, attached)
    elsewhere = policies(second={"agents": ["selector"], "engine": {"url": "http://there:30001"}})
    assert of_policy(resolve(PANEL, elsewhere, attached), "second").actors.engine.url.endswith("30001")
    recorded = {"type": "sglang", "routed_experts": True}
    assert "routed_experts=True differs" in refusal(
        PANEL, policies(second={"agents": ["selector"], "engine": recorded})
    )


def test_weights_of_a_further_policy_are_not_served_by_its_learner_which_may_be_done_before_the_run():
    served = {"learner": {"publication": {"transport": {"type": "http", "port": 7000}}}}
    said = refusal(PANEL, served, policies(second={"agents": ["selector"]}))
    assert said.startswith(
        "policies.second: learner.publication.transport.type=http: the learner of a further"
    )
    assert "set policies.second.learner.publication.transport.type=files" in said
    of_its_own = {"agents": ["selector"], "learner": {"publication": {"transport": {"type": "bus"}}}}
    resolve(PANEL, served, policies(second=of_its_own))
    assert "policies.second: learner.publication" in refusal(
        PANEL, policies(second={"agents": ["selector"], **served})
    )


def test_a_further_policys_weights_are_not_left_to_a_choice_that_may_be_http():
    config = resolve(PANEL, policies(second={"agents": ["selector"]}))
    assert config.learner.publication.transport.type == "auto"
    assert of_policy(config, "second").learner.publication.transport.type == "bus"


def test_each_policy_has_a_directory_of_events_and_a_meeting_place_of_its_own():
    second = policies(second={"agents": ["selector"]})
    config = resolve(PANEL, second, {"metrics": {"tensorboard": True, "tensorboard_directory": "/events"}})
    assert of_policy(config, "second").metrics.tensorboard_directory == Path("/events/second")
    assert of_policy(resolve(PANEL, second), "second").metrics.tensorboard_directory is None
    hosts = {"learner": {"world": {"nodes": 2, "master": "host:7000"}}}
    said = refusal(PANEL, second, hosts)
    assert (
        "policies.second.learner.world.master=host:7000 is where the hosts of policy 'default' meet" in said
    )
    resolve(PANEL, second, {"learner": {"world": {"nodes": 2}}})
    elsewhere = {"agents": ["selector"], "learner": {"world": {"master": "host:7001"}}}
    resolve(PANEL, policies(second=elsewhere), hosts)


def test_policies_share_no_gpu_unless_one_is_placed_there_by_its_own_settings():
    def second(**server):
        return policies(second={"agents": ["selector"], "engine": {"server": server}})

    placed = {"actors": {"engine": {"type": "sglang", "server": {"base_gpu_id": 4, "tp_size": 2}}}}
    said = refusal(PANEL, second(tp_size=1), placed)
    assert "its servers would use GPU 4, as those of policy 'default' do" in said
    assert "policies.second.engine.server.base_gpu_id=6" in said
    resolve(PANEL, second(base_gpu_id=6), placed)
    resolve(PANEL, second(**{"base-gpu-id": 4}), placed)
    resolve(PANEL, second(tp_size=8), {"actors": {"engine": {"type": "sglang", "server": {"tp_size": 2}}}})


def test_a_policy_does_not_attach_to_a_server_of_an_opponent_or_a_pair():
    past = {"version": "latest - 2", "url": "http://past:1"}
    pair = {"enabled": True, "prefill_url": "http://pair:2"}
    engine = {"type": "sglang", "url": "http://own:3", "disaggregation": pair}
    attached = {"actors": {"engine": engine, "opponents": {"past": past}}}
    for url, whose in (("http://past:1/", "opponent 'past'"), ("http://pair:2", "policy 'default'")):
        own = {"url": url, "disaggregation": {"enabled": False, "prefill_url": None}}
        said = refusal(PANEL, attached, policies(second={"agents": ["selector"], "engine": own}))
        assert (
            f"policies.second.engine attaches to {url.rstrip('/')}, which has the weights of {whose}" in said
        )


def test_a_secured_bus_has_credentials_for_each_policys_run_beside_those_of_the_run(tmp_path):
    found = policy_bus(BusConfig(creds=tmp_path / "mine/actor.creds"), "mine", "second")
    assert found.creds == tmp_path / "mine__second/actor.creds"
    assert policy_bus(BusConfig(), "mine", "second") == BusConfig()


def test_policies_share_servers_that_add_adapters_unless_their_engines_differ_or_they_are_told_not_to():
    loaded = {"actors": {"engine": {"type": "sglang", "url": "http://there:1", "adapter": "loaded"}}}
    lora = {"learner": {"lora": {"rank": 4}}}

    def second(**tables):
        return policies(second={"agents": ["selector"], **tables})

    def shared(*layers):
        config = resolve(PANEL, lora, *layers)
        return shares_servers(config, "second", of_policy(config, "second").actors.engine)

    assert shared(loaded, second())
    elsewhere = {"url": "http://there:2"}
    assert not shared(loaded, second(engine=elsewhere))
    assert not shared(loaded, second(engine=elsewhere, shares_servers=False))
    merged = {"actors": {"engine": {"type": "sglang", "url": "http://there:1", "adapter": "merged"}}}
    assert not shared(merged, second(engine=elsewhere))
    for layer in (merged, second(shares_servers=False)):
        said = refusal(PANEL, lora, loaded, second(), layer)
        assert "http://there:1, which has the weights of policy 'default'" in said


def test_a_policy_with_other_frozen_weights_is_not_at_the_servers_of_the_runs_own():
    loaded = {"actors": {"engine": {"type": "sglang", "adapter": "loaded"}}, "learner": {"lora": {"rank": 4}}}
    for setting, table in (
        ("model.scratch=", {"model": {"scratch": {"layers": 7}}}),
        ("learner.publish_dtype=float32", {"learner": {"publish_dtype": "float32"}}),
    ):
        own = {"agents": ["selector"], **table}
        said = refusal(PANEL, loaded, policies(second=own))
        assert f"policies.second.{setting}" in said
        assert "set policies.second.shares_servers=false, for servers of its own" in said
        resolve(PANEL, loaded, policies(second=own | {"shares_servers": False}))
