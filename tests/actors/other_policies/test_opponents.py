"""Frozen opponents: which version they are, what becomes of pinned versions, and what they sample."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from actors.engines.base import Sampling
from actors.environments.build import build_environment
from actors.episodes.task import Task
from actors.other_policies import opponents as opponents_module
from actors.other_policies.opponent_weights import PublishedWeights, manifest_at
from actors.other_policies.opponents import Opponents, opponent_engine
from actors.policy.other_engines import OtherEngines
from actors.policy.policy import Policy
from actors.settings.actors import ActorsConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.settings.games import GameConfig, Nim
from actors.settings.opponents import OpponentConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import ConfigError
from learner.config.publication import PublicationConfig
from learner.host_memory.copies import host_tensors
from learner.initial.scratch_model import character_tokenizer
from learner.publication.publisher import WeightPublisher
from storage.weights.blob_sources import Blobs
from storage.weights.blob_stores import BusBlobs
from tests.actors.tiny import recomputed, tiny_model
from tests.learner.publication.slow_disk import SlowDisk


class Loading:
    """Remembers the versions that it was given, with the number that is in their weights."""

    def __init__(self):
        self.loaded = []

    async def load_weights(self, state, policy_version):
        self.loaded.append((policy_version, float(state["a"][0])))
        return 0.0


def state(version):
    a = torch.zeros(5000)
    a[0] = version
    return {"a": a}


async def publisher(bus, directory, *, incarnation="one", kept=None, **config):
    made = WeightPublisher(
        bus, BusBlobs(bus), PublicationConfig(**{"keep": 2, "snapshot_every": 4} | config),
        incarnation=incarnation, kept=kept,
    )  # fmt: skip
    (directory / "config.json").write_text("{}")
    await made.start(directory)
    return made


async def publish(made, version, trains_from=0):
    await made.publish(
        host_tensors(state(version)), policy_version=version, stage="rl", trains_from=trains_from
    )
    await made.snapshots_written()
    return made.latest


def following(bus, **config):
    engine = Loading()
    return engine, PublishedWeights("past", OpponentConfig(**config), engine, Blobs(bus))


@pytest.mark.nats
async def test_an_opponent_behind_the_policy_stays_within_its_lag_and_changes_as_often_as_asked(
    bus, tmp_path
):
    engine, weights = following(bus, version="latest - 4", refresh_every=2)
    made = await publisher(bus, tmp_path)
    for version in range(13):
        assert await weights.follow(await publish(made, version))
        opponent = engine.loaded[-1][0]
        assert opponent == max(0, 2 * ((version - 4) // 2))
    assert engine.loaded == [(version, float(version)) for version in (0, 2, 4, 6, 8)]


@pytest.mark.nats
async def test_an_actor_that_comes_later_takes_the_oldest_version_that_is_old_enough_or_there(bus, tmp_path):
    made = await publisher(bus, tmp_path)
    for version in range(7):
        manifest = await publish(made, version)
    assert manifest.snapshot_at == 4  # versions before it are gone for newcomers
    for lag, expected in ((0, 6), (1, 5), (2, 4), (5, 4)):
        engine, weights = following(bus, version=f"latest - {lag}")
        assert await weights.follow(manifest)
        assert engine.loaded == [(expected, float(expected))]


@pytest.mark.nats
async def test_no_opponent_is_older_than_the_beginning_of_reinforcement_learning(bus, tmp_path):
    made = await publisher(bus, tmp_path)
    await publish(made, 0, trains_from=0)
    manifest = await publish(made, 1, trains_from=1)
    engine, weights = following(bus, version="latest - 10")
    assert await weights.follow(manifest)
    assert engine.loaded == [(1, 1.0)]


@pytest.mark.nats
async def test_an_opponent_from_before_the_warm_up_is_replaced_at_once_when_it_ends(bus, tmp_path):
    engine, weights = following(bus, version="latest - 10", refresh_every=5)
    made = await publisher(bus, tmp_path)
    assert await weights.follow(await publish(made, 0, trains_from=0))  # published before the warm-up
    for version in (1, 2, 3):
        assert await weights.follow(await publish(made, version, trains_from=1))
    assert engine.loaded == [(0, 0.0), (1, 1.0)]


@pytest.mark.nats
async def test_versions_that_a_resumed_learner_took_back_are_no_opponents_any_more(bus, tmp_path):
    engine, weights = following(bus, version="latest - 2")
    made = await publisher(bus, tmp_path)
    for version in range(6):
        await weights.follow(await publish(made, version))
    resumed = await publisher(bus, tmp_path, incarnation="two")
    for version in (2, 3, 4, 5):
        await weights.follow(await publish(resumed, version))
    assert [version for version, _ in engine.loaded] == [0, 1, 2, 3, 2, 3]


@pytest.mark.nats
async def test_a_pinned_version_that_is_gone_is_an_error_that_says_what_keeps_it(bus, tmp_path):
    made = await publisher(bus, tmp_path)
    for version in range(9):
        manifest = await publish(made, version)
    engine, weights = following(bus, version=3)
    with pytest.raises(ConfigError, match=r"version=3: the run is at version 8.*keep_versions=\[3\]"):
        await weights.follow(manifest)
    assert engine.loaded == []


@pytest.mark.nats
async def test_a_version_to_come_is_waited_for(bus, tmp_path):
    engine, weights = following(bus, version=1)
    made = await publisher(bus, tmp_path)
    await weights.follow(await publish(made, 0))
    assert engine.loaded == []
    await weights.follow(await publish(made, 1))
    await weights.follow(await publish(made, 2))
    assert engine.loaded == [(1, 1.0)]


@pytest.mark.nats
async def test_a_version_that_is_still_being_written_to_stay_is_waited_for(bus, tmp_path):
    disk, config = SlowDisk(tmp_path / "shared"), PublicationConfig(snapshot_every=1, keep_versions=(1,))
    (tmp_path / "config.json").write_text("{}")
    made = WeightPublisher(bus, disk, config, incarnation="one")
    await made.start(tmp_path)
    for version in range(4):
        manifest = await made.publish(
            host_tensors(state(version)), policy_version=version, stage="rl", trains_from=0
        )
    engine, weights = following(bus, version=1)
    assert await weights.follow(manifest)
    assert engine.loaded == []
    disk.goes_on.set()
    await made.snapshots_written()
    assert await weights.follow(made.latest)
    assert engine.loaded == [(1, 1.0)]


@pytest.mark.nats
async def test_a_kept_version_outlives_retirement_and_the_learner(bus, tmp_path):
    made = await publisher(bus, tmp_path, keep_versions=(1, 6), kept=tmp_path / "kept")
    for version in range(9):
        manifest = await publish(made, version)
    assert [kept.policy_version for kept in manifest.kept] == [1, 6]
    engine, weights = following(bus, version=1)
    ranks = replace(manifest, snapshot_rest=(manifest.snapshot,))  # a kept version is whole on rank 0 alone
    assert await weights.follow(ranks)

    resumed = await publisher(bus, tmp_path, incarnation="two", keep_versions=(1, 6), kept=tmp_path / "kept")
    manifest = await publish(resumed, 4)  # version 6 is of steps that were taken back
    assert [kept.policy_version for kept in manifest.kept] == [1]
    again, weights = following(bus, version=1)
    assert await weights.follow(manifest)
    assert engine.loaded == again.loaded == [(1, 1.0)]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["version-1"]


@pytest.mark.nats
async def test_a_kept_version_that_the_bus_lost_is_published_again(bus, tmp_path):
    made = await publisher(bus, tmp_path, keep_versions=(0,), kept=tmp_path / "kept")
    await publish(made, 0)
    await publish(made, 1)
    await bus.js.purge_stream(bus.topology.stream("WEIGHTS"))
    manifest = await publish(made, 2)
    engine, weights = following(bus, version=0)
    assert await weights.follow(manifest)
    assert engine.loaded == [(0, 0.0)]


@pytest.mark.nats
async def test_weights_that_cannot_be_fetched_now_are_tried_again(bus, tmp_path):
    made = await publisher(bus, tmp_path)
    manifest = await publish(made, 0)
    await bus.js.purge_stream(bus.topology.stream("WEIGHTS"))
    engine, weights = following(bus, version="latest - 1")
    assert not await weights.follow(manifest)
    assert await weights.follow(await publish(made, 1))
    assert [version for version, _ in engine.loaded] == [1]


@pytest.mark.nats
async def test_an_announcement_leads_to_each_version_from_its_snapshot_on(bus, tmp_path):
    made = await publisher(bus, tmp_path, snapshot_every=8)
    for version in range(7):
        manifest = await publish(made, version)
    for version in range(7):
        found = manifest_at(manifest, version)
        assert (found.policy_version, found.snapshot_at) == (version, 0)
        found.check()
    assert manifest_at(manifest, 7) is None
    assert manifest_at(replace(manifest, snapshot_version=3), 2) is None


NIM = Task(task_id="n", prompt="nim 9 3")


async def test_each_side_is_sampled_by_its_own_weights_and_only_the_policy_is_trained(serve):
    tokenizer = character_tokenizer()
    past = tiny_model("qwen3", seed=1)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "93"}], add_generation_prompt=True)
    assert max(prompt["input_ids"]) < past.config.vocab_size
    async with serve(policy_version=9) as engine, serve(policy_version=-1) as opponent:
        await opponent.load_weights(past.state_dict(), 2)
        policy = Policy(
            engine, tokenizer, Sampling(max_new_tokens=3), others=OtherEngines(opponents={"past": opponent})
        ).fresh("n")
        await policy.chat("93", "player-1")
        await policy.chat("93", "player-2", policy="past")
    mine, theirs = policy.trajectories(1.0)
    assert (mine.is_trained, theirs.is_trained) == (True, False)
    for trajectory, model, version in ((mine, tiny_model("qwen3", seed=0), 9), (theirs, past, 2)):
        [turn] = trajectory.turns
        sampled = trajectory.token_ids[turn.start : turn.stop]
        generation = type("Sampled", (), {"token_ids": sampled})
        expected = recomputed(model, trajectory.token_ids[: turn.start].tolist(), generation)
        np.testing.assert_allclose(trajectory.behaviour_logprobs[turn.start : turn.stop], expected, atol=1e-4)
        assert {*trajectory.policy_versions[turn.start : turn.stop].tolist()} == {version}


async def test_an_opponent_is_not_asked_which_tokens_it_kept_since_its_server_may_not_tell():
    mine, theirs = (ScriptedEngine(lambda _: [5] * 3, policy_version=1) for _ in range(2))
    sampling = Sampling(max_new_tokens=3, top_p=0.9, keep_masks=True)
    policy = Policy(
        mine, character_tokenizer(), sampling, others=OtherEngines(opponents={"past": theirs})
    ).fresh("n")
    for engine in (mine, theirs):
        await engine.start()
    await policy.chat("93", "player-1")
    await policy.chat("93", "player-2", policy="past")
    asked = [[request.sampling.records_kept for request in engine.requests] for engine in (mine, theirs)]
    assert asked == [[True], [False]]


@pytest.fixture
def directories(tmp_path):
    """The run's model without weights, and another one of the same tokenizer with weights."""
    found = []
    for name in ("model", "opponent"):
        directory = tmp_path / name
        character_tokenizer().save_pretrained(directory)
        tiny_model("qwen3", seed=0).config.save_pretrained(directory)
        found.append(directory)
    weights = {name: t.clone() for name, t in tiny_model("qwen3", seed=3).state_dict().items()}
    save_file(weights, found[1] / "model.safetensors")
    return found


@pytest.mark.nats
async def test_a_directory_is_an_opponent_and_follows_nothing(bus, tmp_path, directories):
    model, path = directories
    actors = ActorsConfig(opponents={"rival": {"path": path}})
    made = Opponents.from_config(actors, model, tmp_path, Blobs(bus), actor="a")
    try:
        await made.start()
        stop = asyncio.Event()
        stop.set()
        await made.run(lambda: None, stop)
        assert made.versions == {"rival": opponents_module.PATH_VERSION}
        assert made.failure == ""
        others = OtherEngines(opponents=made.engines)
        policy = Policy(None, character_tokenizer(), Sampling(max_new_tokens=4), others=others)
        await policy.chat("93", policy="rival")
        [trajectory] = policy.trajectories(0.0)
        assert len(trajectory.turns) == 1
    finally:
        await made.close()


@pytest.mark.nats
async def test_a_directory_with_another_tokenizer_or_without_a_model_is_refused(bus, tmp_path, directories):
    model, path = directories
    other = character_tokenizer()
    other.add_tokens(["zz"])
    other.save_pretrained(path)
    with pytest.raises(ConfigError, match="another tokenizer"):
        Opponents.from_config(
            ActorsConfig(opponents={"rival": {"path": path}}), model, tmp_path, Blobs(bus), actor="a"
        )
    (path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Opponents.from_config(
            ActorsConfig(opponents={"rival": {"path": path}}), model, tmp_path, Blobs(bus), actor="a"
        )


@pytest.mark.nats
async def test_a_quantised_directory_is_refused_for_an_embedded_engine_with_what_undoes_it(
    bus, tmp_path, directories
):
    model, path = directories
    config = json.loads((path / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "fp8"}}
    (path / "config.json").write_text(json.dumps(quantised))
    actors = ActorsConfig(opponents={"rival": {"path": path}})
    with pytest.raises(ConfigError, match=r"rival\.path=.* is quantised.*`launch convert dequantise`"):
        Opponents.from_config(actors, model, tmp_path, Blobs(bus), actor="a")


@pytest.mark.nats
async def test_a_directory_that_sglang_would_compute_otherwise_is_refused_for_its_servers_alone(
    bus, tmp_path, directories
):
    model, path = directories
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (path / "config.json").write_text(json.dumps(config))
    on_servers = ActorsConfig(engine=SglangEngineConfig(), opponents={"rival": {"path": path}})
    with pytest.raises(ConfigError, match="SGLang scales angles of the rope_type 'dynamic'"):
        Opponents.from_config(on_servers, model, tmp_path, Blobs(bus), actor="a")
    here = ActorsConfig(
        engine=SglangEngineConfig(), opponents={"rival": {"path": path, "engine": "embedded"}}
    )
    Opponents.from_config(here, model, tmp_path, Blobs(bus), actor="a")


def test_an_opponent_has_a_server_of_its_own():
    attached = SglangEngineConfig(url="http://one:1", update="group")
    with pytest.raises(ConfigError, match=r"name another server as actors\.opponents\.past\.url"):
        opponent_engine("past", OpponentConfig(version=0), attached)
    found = opponent_engine("past", OpponentConfig(version=0, url="http://two:2"), attached)
    assert (found.attached, found.update) == (("http://two:2",), "tensor")
    loading = SglangEngineConfig(adapter="loaded")
    assert opponent_engine("past", OpponentConfig(version=0), loading).adapter == "merged"
    own = opponent_engine("past", OpponentConfig(version=0), SglangEngineConfig(update="group"))
    assert (own.attached, own.update) == ((), "disk")
    embedded = opponent_engine("past", OpponentConfig(version=0, engine="embedded"), attached)
    assert embedded == EmbeddedEngineConfig()


@pytest.mark.parametrize(
    "settings", [{}, {"version": 1, "path": "x"}, {"version": "newest"}, {"version": -1}]
)
def test_an_opponent_is_one_version_or_one_directory(settings):
    with pytest.raises(ValidationError, match="version="):
        OpponentConfig.model_validate(settings)


def test_versions_are_numbers_or_behind_the_latest():
    assert OpponentConfig(version="7").pinned == 7
    assert (OpponentConfig(version="latest - 5").lag, OpponentConfig(version="latest-0").lag) == (5, 0)


async def test_an_environment_refuses_an_opponent_that_its_actor_does_not_have():
    environment = build_environment(GameConfig(game=Nim(), opponent="past"))
    with pytest.raises(Exception, match="there is no opponent 'past'"):
        await environment.run(NIM, Policy(None, character_tokenizer(), Sampling()))
