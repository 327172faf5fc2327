"""Episodes that clients from outside lead: they take tasks, ask the policy, and say when they are done."""

import asyncio
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hmac import compare_digest
from typing import Self

import structlog
from aiohttp import web

from actors.environments.session_episode import (
    TaskDescriptions,
    UnpaidError,
    posted_episode,
    scored_episode,
    scoring_of,
    unscored_episode,
    with_metadata,
)
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError, LatestUses
from actors.episodes.task import JSON, Task
from actors.gateway.dialects.refusal import RefusedError, invalid
from actors.gateway.server import Gateway, keys_of
from actors.gateway.session import Session
from actors.gateway.task_offers import Taker, TaskOffer, TaskOffers
from actors.gateway.task_requests import described, failure_of, task_request
from actors.policy.policy import Policy
from actors.rewards.scoring.answer_scoring import AnswerScoring
from actors.rewards.scoring.call_times import CallTimes
from actors.settings.clients import ClientsConfig
from actors.settings.groups import InterruptionConfig
from bus.codec import Json
from bus.errors import HandBackError
from bus.waiting import cancelled, set_within, unless

log = structlog.get_logger()
OPEN_TO_ALL = (
    "whoever reaches it takes tasks with their labels and pays for them: let the policy run nothing on this "
    "host, or use a bus with credentials"
)
LOOK_S = 1.0
"""Seconds after which a session whose client is gone is noticed."""


class ClientsEnvironment:
    """Offers each rollout to clients, and waits until the one that took it is done."""

    trajectories_per_episode: int | None = None

    def __init__(
        self, config: ClientsConfig, scoring: AnswerScoring | None, token: str | None = None,
        finish_within_s: float = InterruptionConfig().finish_within_s,
    ) -> None:  # fmt: skip
        """`token` is what a client must know to take tasks; None lets everybody who reaches the gateway."""
        self.token = token
        self._drain_s = finish_within_s if config.drain_timeout_s is None else config.drain_timeout_s
        self._config = config
        self._descriptions = TaskDescriptions(config.shown_metadata)
        self._scoring = scoring
        """Computes rewards; None where clients post them."""
        self.reward_times: tuple[CallTimes, ...] = () if scoring is None else scoring.times
        self._gateway = Gateway(config.gateway, self._add_routes)
        self._offers = TaskOffers()
        self._stop = asyncio.Event()
        self._others = Taker()
        """Clients that nobody here has started."""
        self._programs: dict[str, Taker] = {}
        """Programs that were started here, by what they are known by."""
        self._episodes = 0
        self._latest = LatestUses()
        """Episodes for which a reward was posted."""

    @classmethod
    def from_config(
        cls, config: ClientsConfig, *,
        token: str | None = None, finish_within_s: float = InterruptionConfig().finish_within_s,
    ) -> Self:  # fmt: skip
        """Build; episodes get `finish_within_s` to end after a stop, unless the settings say otherwise.
        Raises `ConfigError` for a reward that cannot be used."""
        return cls(config, scoring_of(config), token, finish_within_s)

    @property
    def url(self) -> str:
        return self._gateway.url

    @property
    def gateway(self) -> Gateway:
        return self._gateway

    @property
    def status(self) -> dict[str, Json]:
        return {
            "sessions": len(self._others.sessions),
            "tasks_offered": self._offers.offered,
            "clients_waiting": self._offers.waiting,
            "client_episodes": self._episodes,
        }

    async def open(self, stop: asyncio.Event) -> None:
        """Begin to serve; `stop` has those who wait for a client go back. Raises `ConfigError`."""
        self._stop = stop
        await self._gateway.start()
        if self.token is None:
            log.warning("gateway_asks_for_no_token", url=self.url, consequence=OPEN_TO_ALL)

    @contextmanager
    def program(self, url: str) -> Iterator[tuple[str, Taker]]:
        """Let a program take tasks while inside, at the path that is yielded; nobody else knows it. `url` is
        where the program reaches the gateway."""
        key, taker = secrets.token_urlsafe(24), Taker(url)
        self._programs[key] = taker
        try:
            yield f"/programs/{key}/tasks", taker
        finally:
            del self._programs[key]
            taker.leave(taker.gone or "its program is ended")

    @property
    def offered(self) -> int:
        return self._offers.offered

    def refuse(self, reason: str) -> None:
        self._offers.refuse(reason)

    async def leases_wanted(self, samples: int, timeout_s: float) -> int:
        """Return how many groups of so many rollouts clients wait for, once some do or time is over."""
        if not self._offers.leases_wanted(samples):
            await self._offers.wanted_within(timeout_s)
        return self._offers.leases_wanted(samples)

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Have a client roll `task` out once. Raises EngineError, RewardError, EpisodeError for what became
        of the client, and HandBackError where nobody takes the group, or this process ends."""
        policy = policy.fresh(task.task_id)
        with self._offers.offering(task) as offer:
            await self._claimed(offer)
            own = offer.own
            if own is not None:
                task = replace(own.task, task_id=task.task_id)
            metadata: dict[str, Json] = {} if own is None else {"client_task": own.name}
            async with self._gateway.session(policy, task.task_id) as session:
                session.reward_owner = None if self._scoring is not None else self._owner(offer)
                offer.session.set_result((task, session))
                assert offer.taker is not None  # the offer was claimed
                try:
                    with offer.taker.leading(session):
                        await self._ended(task, session)
                except EpisodeError as fault:
                    stated = self._config.failed_reward
                    waited = session.longest_wait_s > self._config.idle_timeout_s / 2
                    if stated is None or session.last is None or (waited and session.failed is None):
                        raise
                    episode = unscored_episode(policy, session, stated, str(fault), metadata)
                else:
                    await session.close()
                    episode = await self._episode(policy, session, task, metadata)
        self._episodes += 1
        return episode

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        return episodes if self._scoring is None else await self._scoring.score_group(episodes)

    async def close(self) -> None:
        """Close the gateway, and give up the rewards' connections and processes."""
        await self._gateway.close()
        if self._scoring is not None:
            await self._scoring.close()

    def _owner(self, offer: TaskOffer) -> str:
        return "client" if offer.taker is self._others else "program"

    async def _claimed(self, offer: TaskOffer) -> None:
        try:
            async with asyncio.timeout(self._config.claim_timeout_s):
                while not (offer.claimed.is_set() or self._stop.is_set()):
                    await unless(self._stop, offer.claimed.wait())
        except TimeoutError as error:
            if offer.group.claimed:
                raise EpisodeError(
                    f"no client took task {offer.task.task_id} within {self._config.claim_timeout_s:g} s, "
                    "though one took another rollout of its group"
                ) from error
        if offer.refused is not None:
            raise EpisodeError(f"task {offer.task.task_id}: {offer.refused}")
        if not offer.claimed.is_set():
            raise HandBackError(f"no client took task {offer.task.task_id}")

    async def _ended(self, task: Task, session: Session) -> None:
        """Return when the client is done. Raises EpisodeError where it failed or left."""
        ending = asyncio.create_task(self._drained(), name="drain")
        try:
            async with asyncio.timeout(self._config.episode_timeout_s):
                while not await set_within(session.ended, LOOK_S):
                    if ending.done():
                        raise HandBackError(f"the client of task {task.task_id} was not done at the stop")
                    silent_s = time.monotonic() - session.last_request_s
                    if silent_s > self._config.idle_timeout_s and not session.is_answering:
                        raise _failed(task, f"asked nothing for {silent_s:.0f} s") from TimeoutError()
        except TimeoutError as error:
            reason = f"was not done after {self._config.episode_timeout_s:g} s"
            raise _failed(task, reason) from error
        finally:
            await cancelled(ending)
        if session.failure is not None:
            raise session.failure
        if session.failed is not None:
            raise _failed(task, f"failed: {session.failed}")

    async def _drained(self) -> None:
        await self._stop.wait()
        await asyncio.sleep(self._drain_s)

    async def _episode(
        self, policy: Policy, session: Session, task: Task, metadata: Mapping[str, Json]
    ) -> Episode:
        last = session.last
        if last is None:
            raise _failed(task, "asked the policy nothing")
        if self._scoring is not None:
            return await scored_episode(self._scoring, policy, session, task, last, metadata)
        if session.reward is not None:
            episode = posted_episode(policy, session, session.reward, metadata)
            self._latest.note(worked=True, reward=min(part.reward for part in episode.trajectories))
            return episode
        unpaid = f"the client of task {task.task_id} ended it without a reward"
        if session.end and (lowest := self._latest.lowest(self._config.lowest)) is not None:
            return unscored_episode(policy, session, lowest, unpaid, metadata)
        raise UnpaidError(unpaid)

    # Requests that are no agent's.

    def _add_routes(self, app: web.Application) -> None:
        app.router.add_post("/tasks", self._take)
        app.router.add_get("/tasks", self._tell)
        app.router.add_post("/programs/{program}/tasks", self._take)
        for prefix in ("", "/s/{session}"):
            app.router.add_post(f"{prefix}/end", self._end)
        app.router.add_post("/rewards/{reward_key}/end", self._end)

    async def _take(self, request: web.Request) -> web.Response:
        taker = self._taker(request)
        key = request.headers.get("Idempotency-Key", "")
        if key in taker.claims:
            return _json(taker.claims[key])
        own, wait_s = task_request(await self._gateway.body_of(request))
        if own is not None and taker is not self._others:
            raise invalid("a program takes the run's tasks, and brings none of its own")
        taker.last_request_s = time.monotonic()
        if self._stop.is_set():
            # A client that asks again at once must not be in the way.
            await asyncio.sleep(min(wait_s, LOOK_S))
            offer = None
        else:
            offer = await unless(self._stop, self._offers.claim(own, taker, wait_s))
        if offer is None:
            raise RefusedError(503, "no_task", "there is no task now: ask again", retry=True)
        task, session = await asyncio.shield(offer.session)
        url = self._gateway.url_of(session, taker.url)
        reward_url = self._gateway.reward_url_of(session, taker.url)
        answer = json.dumps(described(self._told(task), url, session.key, reward_url)).encode()
        if key:
            taker.remember(key, answer)
        return _json(answer)

    def _told(self, task: Task) -> dict[str, JSON]:
        """Return what a client learns of a task: the whole of it where the client gives the reward."""
        if self._scoring is not None:
            return self._descriptions.of(task)
        return {**with_metadata(task, task.metadata), "label": task.label}

    async def _tell(self, request: web.Request) -> web.Response:
        self._refuse_stranger(request)
        return web.json_response(self.status)

    async def _end(self, request: web.Request) -> web.Response:
        session = self._gateway.owned_session_of(request, "end its episode")
        session.end_episode(failure_of(await self._gateway.body_of(request)))
        return web.json_response({"ended": True})

    def _taker(self, request: web.Request) -> Taker:
        """Return who asks. Raises `RefusedError` for who may not take tasks."""
        program = request.match_info.get("program")
        if program is None:
            self._refuse_stranger(request)
            return self._others
        if program not in self._programs:
            raise RefusedError(404, "unknown_program", "use SLUICE_TASKS_URL as it was given")
        return self._programs[program]

    def _refuse_stranger(self, request: web.Request) -> None:
        token = self.token
        if token is None or any(compare_digest(key.encode(), token.encode()) for key in keys_of(request)):
            return
        reason = "give the gateway's token as a bearer token: `launch gateway --show-token` says it"
        raise RefusedError(401, "unknown_token", reason)


def _failed(task: Task, reason: str) -> EpisodeError:
    return EpisodeError(f"the client of task {task.task_id} {reason}")


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
