"""Evaluations on servers that do nothing else, and in actors that roll nothing out."""

import asyncio
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs

from actors import service
from actors.engines.fleet.fleet import Fleet
from actors.evaluation.dedicated import beside_rollouts, exact_engine, own_servers, refuse_unfit_servers
from actors.evaluation.engines import OwnEngine
from actors.evaluation.evaluator import Evaluator
from actors.rewards.base import RewardError
from actors.rollouts.worker import Worker
from actors.service import ActorSettings, run_actors
from actors.settings.actors import ActorsConfig, SamplingConfig
from actors.settings.engines import EmbeddedEngineConfig, SglangEngineConfig
from actors.settings.groups import FailureLimitsConfig, InterruptionConfig, RetriesConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.codec import encode
from bus.errors import ConfigError, EngineLostError, leaves
from bus.messages import Metrics
from bus.security.permissions import COUNTERS
from bus.streams.blob_store import put_blob
from bus.streams.publish import Publisher
from learner.config.model import ScratchModel
from learner.initial.scratch_model import build_model_directory
from storage.metrics.records import ENDED
from storage.model_files.packed_files import bundle
from storage.weights.blob_sources import Blobs
from tests.actors.evaluation.asked_sets import ask
from tests.actors.held_out import PROMPTS, TIMEOUT_S, Recording, published, until
from tests.actors.sglang_stand_in import StandIn
from tests.actors.tiny import tiny_model

pytestmark = [pytest.mark.nats, pytest.mark.usefixtures("quick")]
SIZES = ScratchModel(layers=1, hidden_size=16, intermediate_size=16, heads=2, kv_heads=1, context=64)


@pytest.fixture
async def sglang():
    server = StandIn()
    await server.start()
    yield server
    await server.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_model_directory(tmp_path_factory.mktemp("scratch"), SIZES, seed=0)


def evaluating(**evaluation):
    return ActorsConfig.model_validate({"evaluation": evaluation})


async def test_a_server_at_a_url_is_given_each_version_that_is_evaluated(bus, evaluations, sglang, directory):
    settings = evaluating(urls=[sglang.url])
    own = OwnEngine(beside_rollouts(settings, directory, directory, actor="a"), Blobs(bus))

    async def another(_):
        await published(bus, 9, tiny_model("qwen3", seed=9))

    first, second = tiny_model("qwen3", seed=1), tiny_model("qwen3", seed=2)
    await own.start()
    async with evaluations.evaluator(own, Recording(another)):
        await evaluations.ask(await published(bus, 3, first))
        assert (await evaluations.result()).drawn_by == (3, 3)
        await evaluations.ask(await published(bus, 5, second))
        assert (await evaluations.result()).drawn_by == (5, 5)
    assert [version for version in sglang.versions if version] == ["3", "5"]
    name = "model.norm.weight"
    assert torch.equal(sglang.weights[name], second.state_dict()[name])
    assert {body["path"] for body in sglang.updates} == {"begin_weight_update", "update_weights_from_tensor"}
    assert len(sglang.asked) == 4 * PROMPTS + 1  # and a token, when it was looked at


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("gone", r"cannot evaluate: no answer from an SGLang server .*Start SGLang there first"),
        ("model", r"serves LlamaForCausalLM \(stand-in\), and the run's model is Qwen3ForCausalLM"),
        ("context", r"takes contexts of 40 tokens, and an answer may have sampling.max_new_tokens=32"),
        ("weights", r"does not take the weights of version 1: .*out of memory"),
    ],
)
async def test_servers_that_do_not_fit_are_refused_at_the_start(bus, sglang, directory, trouble, said):
    if trouble == "gone":
        await sglang.close()
    elif trouble == "model":
        sglang.architectures = ["LlamaForCausalLM"]
    elif trouble == "context":
        sglang.longest_prompt = 40
    else:
        sglang.refuses_weights = True
    settings, policy = evaluating(urls=[sglang.url]), await published(bus, 1, tiny_model("qwen3", seed=1))
    with pytest.raises(ConfigError, match=said):
        await refuse_unfit_servers(settings, directory, Blobs(bus), policy, max_new_tokens=32)


async def test_servers_that_fit_have_the_policy_after_the_look_at_them(bus, sglang, directory):
    policy = await published(bus, 1, tiny_model("qwen3", seed=1))
    await refuse_unfit_servers(
        evaluating(urls=[sglang.url]), directory, Blobs(bus), policy, max_new_tokens=32
    )
    assert sglang.versions[-1] == "1"


async def test_engines_that_are_lost_cost_an_evaluation_and_not_the_actor(bus, evaluations, model):
    built = []

    class Lost(ScriptedEngine):
        async def generate(self, request):
            if len(built) <= 2:
                raise EngineLostError("all engines failed")
            return await super().generate(request)

    def build():
        built.append(Lost(lambda _: [5] * 8, policy_version=-1))
        return built[-1]

    with capture_logs() as logs:
        async with evaluations.evaluator(OwnEngine(build, Blobs(bus)), Recording()):
            await evaluations.ask(await published(bus, 1, model))
            await evaluations.settled()
            await evaluations.ask(await published(bus, 2, model))
            assert (await evaluations.result()).drawn_by == (2, 2)
    said = [entry["event"] for entry in logs if "all engines failed" in entry.get("reason", "")]
    assert said == ["message_handed_back", "evaluation_skipped"]


async def test_an_evaluation_on_own_engines_that_a_stop_interrupts_is_another_actors(bus, evaluations, model):
    begun, never = asyncio.Event(), asyncio.Event()

    async def hang(_):
        begun.set()
        await never.wait()

    def own():
        return OwnEngine(lambda: ScriptedEngine(lambda _: [5] * 8, policy_version=-1), Blobs(bus))

    async with asyncio.timeout(TIMEOUT_S):
        async with evaluations.evaluator(own(), Recording(hang)) as (stop, running):
            await evaluations.ask(await published(bus, 3, model))
            await begun.wait()
            stop.set()
            await running
        assert not await evaluations.no_task_is_left()
        async with evaluations.evaluator(own(), Recording()):
            assert (await evaluations.result()).drawn_by == (3, 3)
    assert evaluations.results.empty()


async def test_a_model_that_stays_as_it_is_is_measured_once_beside_the_policy(bus, evaluations, model):
    policy, base = (ScriptedEngine(lambda _: [5] * 8, policy_version=0) for _ in range(2))
    for engine in (policy, base):
        await engine.start()
    own = OwnEngine(lambda: policy, Blobs(bus))
    with capture_logs() as logs:
        async with evaluations.evaluator(own, Recording(), opponents={"base": base}):
            for version in (3, 4):
                asked = await published(bus, version, model)
                await ask(bus, asked, data_set="base", answered_by="base")
                result = await evaluations.result()
                assert (result.policy_version, result.drawn_by) == (version, (version, version))
            await ask(bus, asked, data_set="other", answered_by="another")
            await evaluations.settled()
    assert (len(policy.requests), len(base.requests)) == (0, 6)
    [skipped] = [entry["reason"] for entry in logs if entry["event"] == "evaluation_skipped"]
    assert skipped == "'another' is no opponent of this actor: there are base"


@pytest.mark.parametrize("only", [True, False])
async def test_servers_that_do_not_tell_what_they_keep_are_refused_but_where_an_actor_only_evaluates(
    bus, tmp_path, only
):
    drafting = SglangEngineConfig(server={"speculative_algorithm": "EAGLE"})
    settings = ActorSettings(
        actors=ActorsConfig(engine=drafting, evaluation=evaluating(only=only).evaluation),
        sampling=SamplingConfig(top_p=0.9, keep_masks=True), shards=1, max_staleness=4, logs=tmp_path,
    )  # fmt: skip
    stop = asyncio.Event()
    stop.set()
    with nullcontext() if only else pytest.raises(ConfigError, match="SGLang does not tell"):
        await run_actors(bus, settings, Recording(), stop)


async def announced(bus, directory):
    """Publish version 4 of the directory's model, with its files, as what the run's policy is."""
    from transformers import AutoModelForCausalLM

    files = await put_blob(bus, Publisher(bus), encode(bundle(directory)), "model")
    weights = AutoModelForCausalLM.from_pretrained(directory)
    manifest = replace(await published(bus, 4, weights), model=files)
    await bus.put("policy", manifest)
    return manifest


async def test_an_actor_that_only_evaluates_takes_no_prompts_and_ends_with_the_run(
    bus, evaluations, directory, tmp_path
):
    manifest = await announced(bus, directory)
    only = ActorsConfig(engine=EmbeddedEngineConfig(seed=0), evaluation=evaluating(only=True).evaluation)
    settings = ActorSettings(
        actors=only, sampling=SamplingConfig(max_new_tokens=8), shards=1, max_staleness=4, logs=tmp_path
    )
    environment = Recording()
    running = asyncio.create_task(run_actors(bus, settings, environment, asyncio.Event()))
    await evaluations.ask(manifest)
    assert (await evaluations.result()).drawn_by == (4, 4)
    leases = await bus.js.streams_info()
    consumers = [c for s in leases for c in await bus.js.consumers_info(s.config.name)]
    assert [c.name for c in consumers if c.num_waiting] == ["evaluation"]
    await bus.put("policy", replace(manifest, policy_version=5, stage="done"))
    await asyncio.wait_for(running, TIMEOUT_S)
    assert environment.runs == 2 * PROMPTS


class Unscored(Recording):
    async def run(self, task, policy):
        self.runs += 1
        raise RewardError("the labels of held-out prompts are missing")


@pytest.mark.parametrize("only", [True, False])
async def test_held_out_prompts_whose_reward_always_fails_are_named_and_end_the_actor(
    bus, evaluations, directory, tmp_path, only
):
    manifest = await announced(bus, directory)
    actors = ActorsConfig(
        engine=EmbeddedEngineConfig(seed=0), evaluation=evaluating(only=only).evaluation,
        failures=FailureLimitsConfig(at_least=3 * PROMPTS, after_s=0),
    )  # fmt: skip
    settings = ActorSettings(
        actors=actors, sampling=SamplingConfig(max_new_tokens=8), shards=1, max_staleness=4, logs=tmp_path
    )
    ended = asyncio.Queue()
    await bus.listen(bus.subject(COUNTERS), Metrics, ended.put_nowait)
    running = asyncio.create_task(run_actors(bus, settings, Unscored(), asyncio.Event()))
    await evaluations.ask(manifest)

    async def named():
        return (
            "held-out prompts: version 4 has no result: 8 of 8 rollouts failed, the last: RewardError: "
            in (bus.state.values.get("alarm", ""))
        )

    await until(named)
    await evaluations.ask(replace(manifest, policy_version=5) if only else manifest, prompts=PROMPTS + 1)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(running, TIMEOUT_S)
    [error] = leaves(raised.value)
    told = "held-out prompts: of the latest 12 rollouts, 12 failed by their reward: .*: the labels of held"
    assert isinstance(error, ConfigError)
    assert re.match(told, str(error))
    while ENDED not in (values := (await asyncio.wait_for(ended.get(), TIMEOUT_S)).values):
        pass
    assert values[ENDED] == str(error)


ALWAYS = {"Opponents.run", "EngineClaims.run", "report_status", "stop_when_done"}
ROLLING_OUT = {
    "Worker.run", "PolicyFollower.run", "ProbeCheck.run", "EngineAdmin.run", "report_metrics",
    "Evaluator.run",
}  # fmt: skip


@pytest.mark.parametrize("only", [True, False])
async def test_all_that_an_actor_runs_beside_its_rollouts_is_started_with_its_settings(
    bus, directory, tmp_path, monkeypatch, only
):
    await announced(bus, directory)
    built = []
    monkeypatch.setattr(service, "Worker", lambda *args, **kw: built.append(Worker(*args, **kw)) or built[-1])
    monkeypatch.setattr(
        service, "Evaluator", lambda *args, **kw: built.append(Evaluator(*args, **kw)) or built[-1]
    )
    actors = ActorsConfig(
        engine=EmbeddedEngineConfig(seed=0), evaluation=evaluating(only=only).evaluation,
        failures=FailureLimitsConfig(at_least=3), retries=RetriesConfig(timeout=2),
        interruption=InterruptionConfig(finish_within_s=7.0),
    )  # fmt: skip
    settings = ActorSettings(
        actors=actors, sampling=SamplingConfig(max_new_tokens=8), shards=1, max_staleness=4, logs=tmp_path,
        calls_rewards=True, account=tmp_path / "account",
    )  # fmt: skip
    started, stop = set(), asyncio.Event()

    def begin(loop, work, **kwargs):
        started.add(getattr(work, "__qualname__", ""))
        return asyncio.Task(work, loop=loop, **kwargs)

    asyncio.get_running_loop().set_task_factory(begin)
    running = asyncio.create_task(run_actors(bus, settings, Recording(), stop))

    async def all_started():
        return started >= (ALWAYS if only else ALWAYS | ROLLING_OUT) or (running.done() and running.result())

    await until(all_started)
    stop.set()
    await asyncio.wait_for(running, TIMEOUT_S)
    asyncio.get_running_loop().set_task_factory(None)
    evaluator = built[-1]
    assert (evaluator.parts.limits, evaluator.parts.finish_within_s) == (actors.failures, 7.0)
    if only:
        return
    worker, _ = built
    assert (worker.parts.retries, worker.interruption.config) == (actors.retries, actors.interruption)
    assert worker.room.admission is not None
    assert worker.parts.first_calls is not None
    assert worker._leases.account._writer is not None


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ({"urls": ["host:1"]}, "no URL"),
        ({"urls": ["http://a:1", "http://a:1/"]}, "names a server twice"),
        ({"urls": ["http://a:1"], "servers": 1}, "leave out one of them"),
        ({"urls": ["http://a:1"], "engine": "rollout"}, "engine='rollout' with urls"),
        ({"only": True, "engine": "none"}, "engine='none' with only"),
        ({"only": True, "servers": 1}, "set actors.engine.urls or actors.fleet.engines instead"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(evaluation, said):
    with pytest.raises(ValidationError, match=said):
        evaluating(**evaluation)


def test_a_server_that_rolls_out_is_no_server_for_evaluations():
    engine = {"type": "sglang", "urls": ["http://a:1/", "http://b:1"]}
    with pytest.raises(ValidationError, match="names http://b:1, which rolls out with other weights"):
        ActorsConfig.model_validate({"engine": engine, "evaluation": {"urls": ["http://b:1"]}})


def test_an_actor_that_only_evaluates_needs_prompts_that_it_can_answer():
    with pytest.raises(ValidationError, match="no held-out prompts are offered to clients"):
        ActorsConfig.model_validate({"environment": {"type": "clients"}, "evaluation": {"only": True}})


def test_own_servers_have_the_settings_of_the_rollouts_and_take_any_version(directory):
    engine = {"type": "sglang", "update": "group", "server": {"tp_size": 2}, "routed_experts": True}
    actors = ActorsConfig.model_validate({"engine": engine, "evaluation": {"servers": 2}})
    own = own_servers(actors)
    assert (own.update, own.settings, own.routed_experts, own.attached) == ("disk", {"tp_size": 2}, False, ())
    assert actors.evaluates_on == "own"
    fleet = beside_rollouts(actors, directory, Path(), actor="a")()
    assert isinstance(fleet, Fleet)
    assert list(fleet.engines) == ["evaluation-0", "evaluation-1"]
    assert exact_engine(actors.engine).update == "disk"
    elsewhere = own_servers(
        actors.model_copy(update={"evaluation": evaluating(urls=["http://a:1"]).evaluation})
    )
    assert (elsewhere.update, elsewhere.attached, elsewhere.settings) == ("tensor", ("http://a:1",), {})


def test_engines_that_only_evaluate_take_whole_weights_where_others_load_adapters():
    engine = {"type": "sglang", "adapter": "loaded"}
    actors = ActorsConfig.model_validate({"engine": engine, "evaluation": {"servers": 1}})
    assert own_servers(actors).adapter == "merged"
    assert exact_engine(actors.engine).adapter == "merged"
