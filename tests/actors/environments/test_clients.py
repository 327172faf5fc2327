"""Clients from outside lead episodes: they take tasks, ask, and say how it ended; nobody is waited for."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from actors.engines.base import Sampling
from actors.environments import clients
from actors.environments.clients import ClientsEnvironment
from actors.episodes.episode import Episode
from actors.episodes.errors import EpisodeError
from actors.episodes.task import Task
from actors.policy.policy import Policy
from actors.rewards.base import RewardError
from actors.rollouts.worker import end_after
from actors.settings.clients import ClientsConfig
from benchmarks.scripted_engine import ScriptedEngine
from bus.errors import HandBackError
from tests.actors.gateway.served import TOKENIZER, encoded, script

pytestmark = pytest.mark.usefixtures("looking_often")
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def looking_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "LOOK_S", 0.02)


def task(sample: int = 0, group: int = 0) -> Task:
    return Task(task_id=f"g{group:08d}.{sample}", prompt=f"task {group}", label="fine", metadata={"n": 1})


class Lab:
    """An environment that serves, and a client."""

    def __init__(self, environment: ClientsEnvironment, http: aiohttp.ClientSession) -> None:
        self.environment = environment
        self.http = http
        self.stop = asyncio.Event()
        self.policy = Policy(ScriptedEngine(script(lambda _: "fine")), TOKENIZER, Sampling(max_new_tokens=64))

    def rollout(self, sample: int = 0, group: int = 0) -> "asyncio.Task[Episode]":
        return asyncio.create_task(self.environment.run(task(sample, group), self.policy))

    async def post(self, url: str, body: object = None, **headers: str) -> tuple[int, dict]:
        url = url if url.startswith("http") else f"{self.environment.url}{url}"
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(url, json=body or {}, headers=names) as answer:
            return answer.status, await answer.json()

    async def take(self, **body: object) -> dict:
        status, taken = await self.post("/tasks", {"wait_s": 10, **body})
        assert status == 200, taken
        return taken

    async def ask(self, taken: dict) -> str:
        _, answer = await self.post(f"{taken['openai_base_url']}/chat/completions", HELLO)
        return answer["choices"][0]["message"]["content"]


@asynccontextmanager
async def lab(
    *, token: str | None = None, finish_within_s: float = 30.0, **settings: object
) -> AsyncIterator[Lab]:
    config = ClientsConfig(**{"reward": "posted", **settings})
    environment = ClientsEnvironment.from_config(config, token=token, finish_within_s=finish_within_s)
    async with aiohttp.ClientSession() as http:
        found = Lab(environment, http)
        await environment.open(found.stop)
        try:
            yield found
        finally:
            await environment.close()


async def test_client_takes_a_task_and_is_recorded_with_the_reward_that_it_posts():
    async with lab() as at:
        rollout = at.rollout()
        taken = await at.take()
        assert (taken["prompt"], taken["label"], taken["metadata"]) == ("task 0", "fine", {"n": 1})
        assert await at.ask(taken) == "fine"
        await at.post(taken["reward_url"], {"components": {"style": 0.25}, "final": False})
        assert not rollout.done()
        await at.post(taken["reward_url"], {"reward": 1, "components": {"style": 0.5}})
        [trajectory] = (await rollout).trajectories
        assert (trajectory.reward, trajectory.end) == (1.0, "completed")
        assert trajectory.reward_components == {"style": 0.5}
        assert trajectory.token_ids[trajectory.loss_mask].tolist() == encoded("fine<|im_end|>")
        status, said = await at.post(f"{taken['openai_base_url']}/chat/completions", HELLO)
        assert (status, said["error"]["code"]) == (403, "session_closed")


@pytest.mark.parametrize(("shown", "metadata"), [((), {}), (("n", "absent"), {"n": 1})])
async def test_client_that_does_not_pay_gets_no_label_and_only_metadata_that_is_named(shown, metadata):
    async with lab(reward="exact", shown_metadata=shown) as at:
        rollout = at.rollout()
        taken = await at.take()
        assert (taken["metadata"], "label" in taken) == (metadata, False)
        await at.ask(taken)
        await at.post(taken["end_url"])
        assert (await rollout).trajectories[0].reward == 1.0


async def test_outcome_beside_the_reward_is_what_a_held_out_task_counts_with():
    async with lab() as at:
        rollout = at.rollout()
        taken = await at.take()
        await at.ask(taken)
        await at.post(taken["reward_url"], {"reward": {"solver": 0.2}, "outcome": 0.5})
        episode = await rollout
        assert (episode.outcome, episode.trajectories[0].reward) == (0.5, 0.2)


async def test_session_is_found_by_key_and_by_header_too():
    async with lab() as at:
        rollout = at.rollout()
        taken = await at.take()
        bearer, header = {"Authorization": f"Bearer {taken['session']}"}, {"X_Session_ID": taken["session"]}
        paying = {"Authorization": f"Bearer {taken['reward_url'].rpartition('/')[2]}"}
        assert (await at.post("/v1/chat/completions", HELLO, **bearer))[0] == 200
        anthropic = {**HELLO, "max_tokens": 9}
        assert (await at.post("/v1/messages", anthropic, Authorization="Bearer x", **header))[0] == 200
        for path in ("/reward", "/end"):
            assert (await at.post(path, {"reward": 1} if path == "/reward" else {}, **header))[0] == 403
        assert not rollout.done()
        assert (await at.post("/reward", {"reward": 0.5}, **paying))[0] == 200
        assert [part.reward for part in (await rollout).trajectories] == [0.5, 0.5]


async def test_reward_function_judges_what_a_client_ended():
    async with lab(reward="exact") as at:
        rollout = at.rollout()
        taken = await at.take()
        assert "label" not in taken
        await at.ask(taken)
        assert (await at.post(taken["reward_url"], {"reward": 1}))[0] == 403
        assert (await at.post(taken["end_url"]))[0] == 200
        assert [part.reward for part in (await rollout).trajectories] == [1.0]


async def test_siblings_are_taken_before_a_new_group_is_begun():
    async with lab() as at:
        rollouts = [at.rollout(sample, group) for sample in range(2) for group in range(2)]
        taken = [await at.take() for _ in range(4)]
        assert [one["prompt"] for one in taken] == ["task 0", "task 0", "task 1", "task 1"]
        for one in taken:
            await at.ask(one)
            await at.post(one["reward_url"], {"reward": 1})
        await asyncio.gather(*rollouts)


async def test_clients_own_tasks_share_groups_by_name_and_never_mix():
    own = {"name": "mine", "prompt": "my own", "label": "7", "metadata": {"from": "me"}}
    async with lab() as at:
        rollouts = [at.rollout(sample, group) for group in range(2) for sample in range(2)]
        first, other, second = await at.take(task=own), await at.take(), await at.take(task=own)
        assert [first["task_id"], second["task_id"]] == ["g00000000.0", "g00000000.1"]
        assert (first["prompt"], first["label"], first["metadata"]) == ("my own", "7", {"from": "me"})
        assert (other["task_id"], other["prompt"]) == ("g00000001.0", "task 1")
        status, said = await at.post("/tasks", {"wait_s": 0, "task": own})
        assert (status, said["error"]["code"]) == (503, "no_task")  # the group of the others is not its own
        last = await at.take()
        for one in (first, other, second, last):
            await at.ask(one)
            await at.post(one["reward_url"], {"reward": 1})
        episodes = await asyncio.gather(*rollouts)
        names = [episode.trajectories[0].metadata.get("client_task") for episode in episodes]
        assert names == ["mine", "mine", None, None]


async def test_leases_are_wanted_by_clients_that_wait_and_by_no_others():
    async with lab() as at:
        assert await at.environment.leases_wanted(2, 0.0) == 0
        waiting = [asyncio.create_task(at.take()) for _ in range(3)]
        while at.environment.status["clients_waiting"] < 3:
            await at.environment.leases_wanted(2, 1.0)
        assert await at.environment.leases_wanted(2, 0.0) == 2
        rollouts = [at.rollout(sample, group) for group in range(2) for sample in range(2)]
        await asyncio.gather(*waiting)
        assert await at.environment.leases_wanted(2, 0.0) == 0
        for rollout in rollouts:
            rollout.cancel()
        await asyncio.wait(rollouts)


async def test_request_for_a_task_that_comes_again_gets_the_same_one():
    async with lab() as at:
        rollouts = [at.rollout(sample) for sample in range(2)]
        keys = [{"Idempotency_Key": name} for name in ("a", "a", "b")]
        first, again, other = [(await at.post("/tasks", {}, **key))[1]["session"] for key in keys]
        assert (first == again, first == other) == (True, False)
        for rollout in rollouts:
            rollout.cancel()
        await asyncio.wait(rollouts)


async def test_strangers_get_no_task_where_a_token_is_asked_for():
    async with lab(token="secret") as at:
        rollout = at.rollout()
        for wrong in ({}, {"Authorization": "Bearer secre"}, {"x_api_key": "é"}):
            status, said = await at.post("/tasks", {}, **wrong)
            assert (status, said["error"]["code"]) == (401, "unknown_token")
        async with at.http.get(f"{at.environment.url}/tasks") as answer:
            assert answer.status == 401
        assert (await at.post("/tasks", {}, Authorization="Bearer secret"))[0] == 200
        rollout.cancel()
        await asyncio.wait([rollout])


async def test_group_that_nobody_takes_goes_back_and_one_that_was_begun_fails():
    async with lab(claim_timeout_s=0.1) as at:
        with pytest.raises(HandBackError, match="no client took"):
            await at.rollout()
    async with lab(claim_timeout_s=2.0) as at:  # the first is taken within it on a busy machine too
        begun, left = at.rollout(0, 1), at.rollout(1, 1)
        await at.take()
        with pytest.raises(EpisodeError, match="another rollout of its group") as failure:
            await left
        assert end_after(failure.value) == "timeout"
        begun.cancel()
        await asyncio.wait([begun])


async def test_client_that_fails_leaves_or_says_no_reward_costs_its_episode_alone():
    async with lab() as at:
        rollout = at.rollout()
        taken = await at.take()
        await at.ask(taken)
        await at.post(taken["end_url"], {"failed": "the browser crashed"})
        with pytest.raises(EpisodeError, match="the browser crashed"):
            await rollout
        rollout = at.rollout()
        await at.post((await at.take())["end_url"])
        with pytest.raises(EpisodeError, match="asked the policy nothing"):
            await rollout
        rollout = at.rollout()
        taken = await at.take()
        await at.ask(taken)
        await at.post(taken["end_url"])
        with pytest.raises(RewardError, match="without a reward"):
            await rollout
    async with lab(idle_timeout_s=0.2) as at:
        rollout = at.rollout()
        await at.take()
        with pytest.raises(EpisodeError, match="asked nothing") as failure:
            await rollout
        assert end_after(failure.value) == "timeout"


async def test_at_the_stop_what_was_begun_may_end_and_the_rest_goes_back():
    async with lab(drain_timeout_s=5) as at:
        begun, waiting = at.rollout(0), at.rollout(1)
        taken = await at.take()
        at.stop.set()
        with pytest.raises(HandBackError):
            await waiting
        assert (await at.post("/tasks"))[1]["error"]["code"] == "no_task"
        await at.ask(taken)
        await at.post(taken["reward_url"], {"reward": 1})
        assert (await begun).end == "completed"


@pytest.mark.parametrize("settings", [{"drain_timeout_s": 0.1}, {"finish_within_s": 0.1}])
async def test_clients_have_the_time_to_end_that_the_settings_give(settings):
    async with lab(**settings) as at:
        begun = at.rollout(0)
        await at.take()
        at.stop.set()
        async with asyncio.timeout(30):
            with pytest.raises(HandBackError, match="not done at the stop"):
                await begun


@pytest.mark.parametrize(
    "body",
    [
        {"wait_s": -1},
        {"wait_s": "soon"},
        {"task": {}},
        {"task": {"prompt": ""}},
        {"task": {"prompt": [{"content": "no role"}]}},
    ],
)
async def test_malformed_requests_for_tasks_are_refused(body: dict):
    async with lab() as at:
        status, said = await at.post("/tasks", body)
        assert (status, said["error"]["code"]) == (400, "invalid_request")
