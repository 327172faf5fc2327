"""What `launch status` finds on a bus, whoever of the run answers there, and what it says about that."""

import asyncio
import json
import re
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from nats.js.api import ConsumerConfig, ConsumerInfo, SequenceInfo

from bus.codec import Json, encode
from bus.config import BusConfig
from bus.connection.bus import Bus
from bus.connection.roles import hold_role
from bus.errors import BusAwayError, ConfigError
from bus.messages import Metrics, RoleHolder, Status
from bus.requests import StepGroups
from bus.server.nats_server import NatsServer
from bus.streams.publish import Publisher
from launch.run_view.run_status import RunState, look_at_run
from launch.run_view.waiting_reasons import problems, waits
from launch.screens.status_report import WIDTH, report, screen
from launch.settings.run_config import RunConfig, validate
from storage.settings.admission import AdmissionConfig
from tests.bus.security.secured import by_role, make_streams, secured_bus
from tests.launch.messages import actor, learner, state_of, storage
from tests.launch.speaking_processes import CONFIG, answer, speaking

pytestmark = pytest.mark.nats


@pytest.fixture
def where(bus_server: NatsServer) -> RunConfig:
    return validate({"run": "test", "bus": {"url": bus_server.url}})


async def looked(where: RunConfig) -> dict[str, Json]:
    return report(await look_at_run(where, asyncio.Event()))


async def test_whole_run_is_healthy_and_its_figures_are_those_of_the_bus(bus: Bus, where: RunConfig):
    await answer(bus)
    publisher = Publisher(bus)
    for step in range(3):
        values = {"train/stage": "rl", "train/trajectories": 32, "staleness/max_versions": step}
        metrics = Metrics(source="learner", step=step, time_s=100.0 + 10 * step, values=values)
        await publisher.publish(bus.subject("events", "metrics"), encode(metrics), message_id=f"m{step}")
    await publisher.publish(bus.subject("events", "evaluation"), b"another kind", message_id="e")
    await publisher.publish(bus.subject("tasks", "rollout", 5), b"x" * 500, message_id="lease-5")
    ended = actor(0, recent_ends={"completed": 97, "timeout": 2, "engine_error": 1})
    async with speaking(bus, storage(), learner(), ended, actor(1, policy_version=19)):
        began = time.monotonic()
        found = await looked(where)
        took_s = time.monotonic() - began
    assert (found["healthy"], found["problems"], found["waits"]) == (True, [], [])
    assert [member["role"] for member in found["members"]] == ["storage", "learner", "actor", "actor"]
    assert found["versions"]["oldest_in_use"] == 19
    assert found["leases"]["waiting"] == 1
    assert found["streams"]["TASKS"]["bytes"] > 500
    assert found["streams"]["TASKS"]["bytes_max"] == 256 << 20
    assert found["rates"]["steps_per_minute"] == 6
    assert found["rates"]["trained_trajectories_per_minute"] == 192
    assert found["rates"]["generated_tokens_per_minute"] == 60 * 2 * 4321
    assert found["rates"]["until_s"] == pytest.approx(time.time(), abs=60), "when the bus got that step"
    assert found["staleness"] == {"last_step": 2, "worst": 3, "bound": 4}
    assert found["episodes"]["infra_failed_fraction"] == 0.03
    assert found["episodes"]["recent_ends"] == {"completed": 97, "timeout": 2, "engine_error": 1}
    assert took_s < 10
    assert json.loads(json.dumps(found)) == found
    lines = screen(found).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 24
    assert lines[0] == "test  rl  healthy"
    assert "episodes   3% failed of 100 recent: 2 timeout, 1 engine_error" in lines


async def test_what_answers_nothing_is_named_and_the_rest_is_told(
    bus: Bus, where: RunConfig, monkeypatch: pytest.MonkeyPatch
):
    now = time.time
    monkeypatch.setattr(
        time, "time", lambda: now() + 7200
    )  # by this host's clock the bus is two hours behind
    await answer(bus, shards=(1,))
    async with speaking(bus, storage()), hold_role(bus, "learner", "a") as renewing:
        renewing.cancel()  # the process was stopped: its role is not renewed
        began = time.monotonic()
        found = await looked(where)
        took_s = time.monotonic() - began
    shard, silent, nobody = found["problems"]
    assert shard == "shard 0 did not answer within 1.3 s"
    assert silent.startswith("learner was not heard within 1.3 s: process ")
    assert re.search(r" held its role last, and lives, silent since [\d:]{8} \(\d{1,2}\.\d+ s\)$", silent), (
        silent
    )
    assert nobody.startswith("no actor was heard within 1.3 s, and 64 groups are to be rolled out: if none")
    assert [(member["source"], member["state"]) for member in found["members"]] == [("storage", "alive")]
    assert took_s < 10


async def test_storage_that_never_was_there_is_named_with_the_command_that_starts_it(
    bus: Bus, where: RunConfig
):
    found = await looked(where)
    assert not found["healthy"]
    assert found["problems"][:2] == [
        "no storage holds its role: if none is starting, start one with `launch storage --run test`",
        "no learner holds its role: if none is starting, start one with `launch learner --run test`",
    ]


def test_a_time_out_is_told_as_one_beside_what_the_bus_knows():
    """A host under load is late by seconds: its actors ask for leases, and are not to be started again."""
    rollout = ConsumerInfo("rollout", "TASKS", ConsumerConfig(), None, num_waiting=3, num_ack_pending=2)
    state = replace(state_of(), roles_known=False)
    nobody, busy = problems(state), problems(replace(state, consumers={"TASKS/rollout": rollout}))
    assert nobody[-1].startswith("no actor was heard within 1.3 s: if none runs, start one with")
    assert busy[-1] == "no actor was heard within 1.3 s, but some ask the bus for leases: they are busy"
    assert nobody[0] == "storage was not heard within 1.3 s, and the bus did not say who holds its role"
    late = replace(state_of(storage()), dispatcher=groups_of_nothing(), settings_known=False)
    assert "storage has not announced the run yet" not in problems(late)
    assert "storage has not announced the run yet" in problems(replace(late, settings_known=True))
    taken = SequenceInfo(2, 2, last_active=datetime.fromtimestamp(970, UTC))
    held = replace(rollout, num_waiting=0, delivered=taken)
    late = replace(state, consumers={"TASKS/rollout": held}, asked_s=1000.0, clock_ahead_s=-10.0)
    assert re.search(
        r"; 2 leases are held by .* or gone, none was taken since [\d:]{8} \(20\.0 s\): if none",
        problems(late)[-1],
    )


def test_a_silent_member_is_told_with_the_time_of_its_last_renewal():
    silent = replace(
        state_of(asked_s=1000.0),
        holders={"shard-0": RoleHolder(incarnation="a", host="h", pid=7)},
        renewed_s={"shard-0": 953.0},
    )
    found = report(silent)
    [member] = found["members"]
    assert (member["state"], member["since_s"]) == ("silent", 953.0)
    assert re.search(
        r"member     shard-0 silent since [\d:]{8} \(47\.0 s\) on h, pid 7: sends nothing", screen(found)
    )
    assert found["rates"]["generated_tokens_per_minute"] is None, (
        "no actor was heard, which is not a rate of 0"
    )


def test_a_run_on_demonstrations_alone_lacks_no_actor_and_has_no_figures_of_rollouts():
    alone = validate({"run": "test", "learner": {"steps": 0}, "data": {"task": None}})
    shown = screen(report(replace(state(storage(), learner(stage="warmup")), config=alone)))
    assert "actor" not in shown
    assert not [label for label in ("staleness", "leases", "episodes", "step 0 of 0") if label in shown]


async def test_unknown_run_is_the_users_mistake(bus: Bus, where: RunConfig):
    with pytest.raises(ConfigError, match="this bus has no run 'another'"):
        await look_at_run(where.model_copy(update={"run": "another"}), asyncio.Event())


async def test_what_a_key_may_not_hear_is_never_told_as_absent(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("launch.run_view.run_status.FIRST_S", 20.0)  # a busy machine answers late
    async with secured_bus(tmp_path, "test") as (secure, server):
        connect = by_role(secure, "test")
        await make_streams(connect)
        async with connect("storage", "test") as keeper, connect("learner", "test") as teacher:
            await answer(keeper)
            async with speaking(keeper, storage()), speaking(teacher, learner()):

                async def look(role: str) -> RunState:
                    key = BusConfig(url=server.url, creds=secure.files("test").creds(role))
                    return await look_at_run(RunConfig(run="test", bus=key), asyncio.Event())

                for role in ("storage", "watcher"):
                    state = await look(role)
                    assert {one.role for one in state.statuses.values()} == {"storage", "learner"}, role
                with pytest.raises(ConfigError, match=r"permissions violation .*credentials of a watcher"):
                    await look("learner")


async def test_bus_that_is_away_is_an_error_of_its_own_within_the_limit(server: NatsServer, where: RunConfig):
    await server.kill()
    began = time.monotonic()
    with pytest.raises(BusAwayError):
        await look_at_run(where, asyncio.Event())
    assert time.monotonic() - began < 30


def state(*statuses: Status) -> RunState:
    """A run of which these are heard, and whose dispatcher answers."""
    heard = state_of(*(replace(one, host="h") for one in statuses))
    return replace(heard, config=CONFIG, dispatcher=groups_of_nothing(), shards={0, 1})


def groups_of_nothing() -> StepGroups:
    return StepGroups(step=0, groups=(), incarnation="", trained_through=0, trains_from=0, stage="rl")


def test_a_long_wait_is_the_state_of_the_run_and_says_how_long():
    waiting = {"waits_for": "waiting for the batch", "since_s": 1000.0}
    found = [state_of(learner(waiting=given), asked_s=1720.0).state for given in (None, waiting)]
    assert found == ["training", "waiting"]
    lacking = learner(wait="evaluation", doing="waiting for the evaluation of version 9", waiting=waiting)
    told = report(state_of(lacking, asked_s=1720.0))
    assert told["waiting"] == waiting
    assert told["waits"] == [
        "the learner, before step 21: waiting for the evaluation of version 9, for 12 min 00 s now"
    ]
    assert report(state_of(actor(0)))["state"] == "unseen"


LACKS = learner(doing="it lacks groups", wait="batch", reason="12 of 20 groups are stored")
WAITS = "the learner waits for 8 more groups of step 21: "


def test_actors_that_are_not_heard_are_not_told_as_idle():
    [found] = waits(state(LACKS, storage()))
    assert found == f"{WAITS}no actor was heard within 1.3 s, 64 groups are out"


def test_learner_that_lacks_groups_is_told_with_the_speed_of_the_engines_that_have_them():
    slow = {"generated_tokens_per_s": 6.0}
    found = waits(state(LACKS, storage(), actor(0, **slow), actor(1, **slow), actor(2, running=0, **slow)))
    assert found == [
        f"{WAITS}2 actors are rolling out, 64 groups are out; engines run 60 requests and 9 more queue, at "
        "18 tokens/s (0.3 each)"
    ]


def test_learner_whose_groups_are_being_scored_is_told_how_long_rewards_take():
    scoring = {"running": 0, "waiting": 0, "rewards_running": 64, "rewards_longest_s": 25.0, "reward_s": 30.0}
    assert waits(state(LACKS, storage(), actor(**scoring))) == [
        f"{WAITS}no actor is rolling out, 64 groups are out; 64 rewards run, the longest for 25.0 s; "
        "before, one took 30.0 s"
    ]


def test_what_has_most_rollouts_is_named_first():
    first = {"running": 2, "waiting": 0, "rewards_running": 3, "rewards_longest_s": 2.0, "reward_s": None}
    assert waits(state(LACKS, storage(), actor(generated_tokens_per_s=500.0, **first)))[0].endswith(
        "; 3 rewards run, the longest for 2.00 s; engines run 2 requests, at 500 tokens/s (250 each)"
    )


def held(*actors: Status) -> str:
    """What the status says of whom the learner of `LACKS` waits for."""
    told, *_ = waits(state(LACKS, storage(), *actors))
    return told.partition("64 groups are out; ")[2]


def test_rollouts_that_neither_an_engine_nor_a_reward_has_are_in_environments():
    idle = {"running": 0, "waiting": 0}
    assert held(actor(rollouts_running=64, **idle)) == "64 rollouts are in environments"
    both = held(actor(rollouts_running=64, **idle), actor(1, running=1, waiting=0, rollouts_running=1))
    assert both.startswith("64 rollouts are in environments; engines run 1 request, at ")
    assert held(actor(running=8, waiting=2, rollouts_running=10)).startswith(
        "engines run 8 requests and 2 more"
    )
    assert held(actor(rollouts_running=0, **idle)) == (
        "no actor runs a rollout: leases wait to be taken, or results to be stored"
    )


def test_groups_wait_for_engines_while_none_of_them_serves():
    def engines(*states, waiting=0):
        each = {str(n): {"state": s} for n, s in enumerate(states)}
        return actor(running=0, waiting=waiting, rollouts_running=waiting, engines=each)

    assert held(engines("starting", "waiting", "starting")) == "no engine serves: 2 starting, 1 waiting"
    queued = held(engines("starting", waiting=8))
    assert queued == "8 requests wait for an engine; no engine serves: 1 starting"
    assert held(engines("starting", "serving")).startswith("no actor runs a rollout")
    starting = replace(actor(doing="starting its engine", wait="engine"), values={})
    assert held(starting) == "actors without an engine: 1 starting its engine"


def test_learner_that_waits_for_one_late_group_is_told_with_storages_reason():
    reason = "group 7, rolling out since version 3, must be trained by version 7"
    waiting = learner(wait="batch", reason=reason)
    assert waits(state(waiting, storage(stored=30, rolling_out=0), actor())) == [
        f"the learner waits for the groups of step 21: {reason}"
    ]
    assert waits(state(waiting, storage(stored=30), actor(waiting=0))) == [
        f"the learner waits for the groups of step 21: {reason}; engines run 30 requests, at 4321 "
        "tokens/s (144 each)"
    ]


def test_actors_that_wait_at_the_staleness_bound_are_counted_with_the_bound():
    idle = {"wait": "leases", "running": 0}
    bound = storage()
    found = waits(state(learner(), bound, actor(0, **idle), actor(1, **idle)))
    assert found == [
        "2 actors wait: the dispatcher holds leases back, staleness bound 4 is reached by the newest version"
    ]
    need = replace(storage(), doing="all that is needed is rolling out or stored", wait="staleness")
    by_need = CONFIG.model_copy(update={"admission": AdmissionConfig(ahead="need")})
    assert waits(replace(state(learner(), need, actor(0, **idle)), config=by_need)) == [
        "1 actor waits: storage says: all that is needed is rolling out or stored"
    ]


def test_leases_that_the_brake_holds_back_are_told_to_actors_and_by_storage():
    braking = replace(storage(), doing="waiting for the effective sample size: it was 0.200", wait="throttle")
    assert waits(state(learner(), braking, actor(wait="leases", running=0))) == [
        "1 actor waits: storage says: waiting for the effective sample size: it was 0.200",
        "storage: waiting for the effective sample size: it was 0.200",
    ]


def test_an_alarm_is_a_problem_of_the_run():
    wrong = state(storage(), learner(alarm="engines and learner disagree"), actor(0))
    assert "learner: ALARM: engines and learner disagree" in report(wrong)["problems"]


def test_everybody_waits_for_a_storage_that_is_silent():
    idle = {"wait": "leases", "running": 0}
    silent = replace(state(learner(wait="batch"), actor(0, **idle)), dispatcher=None)
    assert waits(silent) == [
        "the learner waits for the groups of step 21: storage did not answer within 1.3 s",
        "1 actor waits: storage did not answer within 1.3 s",
    ]


def test_run_that_is_done_lacks_nothing_when_its_processes_have_ended():
    done = report(state(learner(stage="done", doing="ended")))
    assert (done["healthy"], done["waits"]) == (True, ["nobody waits: the run is done"])


def test_full_disk_is_the_first_problem_and_what_the_learner_waits_for():
    full = "the disk of runs/test is full: 0 of 1024 MiB are free, and nothing more is stored: free some"
    crowded = replace(state(LACKS, actor()), dispatcher=None, full_disk=full)
    found = report(crowded)
    assert found["problems"] == [
        full,
        "no answer from storage: `launch local` starts who ended again when there is room",
    ]
    assert found["waits"] == [f"the learner waits for the groups of step 21: {full}"]
