"""One rollout as the requests of an agent see it: caps, retries and what the agent left behind."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import structlog

from actors.engines.base import Sampling
from actors.episodes.errors import EpisodeError, LatestUses, is_of_host
from actors.episodes.task import FixedMessages
from actors.gateway.dialects.exchange import Ask, Finish, Reply
from actors.gateway.dialects.known_chats import KnownChats, Meaning
from actors.gateway.dialects.openai_responses import KeptResponses
from actors.gateway.dialects.refusal import RefusedError, TooLongError, invalid
from actors.gateway.posted_reward import PostedReward
from actors.gateway.request_kinds import RequestKind, SubAgents, kind_of
from actors.gateway.retries import Attempt, Exchanges
from actors.gateway.tool_hooks import ToolHook, passed
from actors.policy.messages import Completion, MessagesError, ToolCall
from actors.policy.policy import Policy
from actors.settings.gateway import GatewayConfig, Pin
from bus.config import LEAST_TEMPERATURE
from bus.errors import ContextFullError, EngineError, HandBackError, RequestRefusedError, SluiceError
from bus.policy_names import DEFAULT_POLICY
from bus.process.log_throttle import LogThrottle
from bus.trajectory import End
from bus.waiting import cancelled, set_within

log = structlog.get_logger()
DIFFERENCES_LOG_PERIOD_S = 10.0


class Session:
    """Answers requests by the policy of one rollout, which records them. A request is checked before anything
    changes; one that is refused leaves the session as it was."""

    def __init__(
        self, policy: Policy, config: GatewayConfig, *, name: str, hook: ToolHook | None = None,
        differences: LogThrottle | None = None, requests: LatestUses | None = None,
    ) -> None:  # fmt: skip
        self.key = secrets.token_urlsafe(24)
        """What the session is found by; only its agent knows it."""
        self.reward_key = secrets.token_urlsafe(24)
        """What the reward is posted with and the end is told with. Its agent does not know it, only who leads
        the episode."""
        self.reward: PostedReward | None = None
        """What the owner of the reward key posted last."""
        self.reward_source = ""
        self.reward_owner: str | None = "client"
        """Who has the reward key; None where this run computes rewards itself."""
        self.last: Completion | None = None
        """The newest answer that the agent got itself, as the policy gave it; of choices the first."""
        self.chats = KnownChats[Meaning]()
        self.responses = KeptResponses(config.most_body_bytes)
        self.agents: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.ended = asyncio.Event()
        """Set when the owner of the reward key has said that its episode is over, by a final reward or
        otherwise."""
        self.failed: str | None = None
        """Why the episode failed, as its owner said."""
        self.last_request_s = time.monotonic()
        """When the newest request came that was not refused, by the monotonic clock."""
        self.first_request_s: float | None = None
        """When the first such request came."""
        self._longest_wait_s = 0.0
        self._unanswered_s = 0.0
        self._waiting_since: list[float] = []
        """When each request that is at the engine now came there."""
        self._name = name
        self._policy = policy
        self._config = config
        self._hook = hook
        self._differences = differences or LogThrottle(DIFFERENCES_LOG_PERIOD_S)
        self._requests = requests or LatestUses()
        """Latest requests of all sessions, of which some were answered."""
        self._exchanges = Exchanges(config.retry_grace_s)
        self._failures: dict[bytes, SluiceError] = {}
        """What failed for reasons other than the request, by its digest, until its retry succeeds."""
        self._unclaimed: dict[str, list[Completion]] = {}
        """Answers that no request has got yet, by the name of the first reply."""
        self._answered: dict[str, Completion] = {}
        """Answers that a request got, by the name of the reply."""
        self._sub_agents = SubAgents()
        self._rewarded = asyncio.Event()
        self._is_closed = False
        self._cap: End | None = None
        self._cap_reason = ""
        self._over_long = ""
        """Why the newest request that was refused was too long, unless one was answered since."""

    @property
    def end(self) -> End | None:
        """Return how the episode ended if the gateway ended it: a cap, or a context that does not fit."""
        return self._cap or ("length" if self._over_long else None)

    @property
    def end_cause(self) -> str:
        """Return why the gateway ended the episode, in words; nothing where it did not."""
        return self._cap_reason or self._over_long

    @property
    def failure(self) -> SluiceError | None:
        """Return what kept an answer from the agent, though its request was in order."""
        return next(iter(self._failures.values()), None)

    def had(self, attempt: Attempt) -> bool:
        """Return whether the request came before. Raises `RefusedError` for another request's key."""
        return self._exchanges.earlier(attempt) is not None

    async def answer(self, ask: Ask, headers: Mapping[str, str], attempt: Attempt) -> Reply:
        """Answer a request, or give a retry the answer of its first attempt. Raises `RefusedError`."""
        kind = kind_of(headers, ask, self._config.rules, self._sub_agents)
        known = self._policy.opponents & set(self._config.policies_named)
        if kind.policy != DEFAULT_POLICY and kind.policy not in known:
            others = ", ".join(sorted(known)) or "no other"
            raise invalid(f"there is no policy {kind.policy!r} to answer, but {others}")
        exchange = self._exchanges.earlier(attempt)
        if exchange is None:
            self._refuse_if_over(ask.choices)
            self._refuse_unmeetable(ask)
            self._sub_agents.note(headers)
            exchange = self._exchanges.begin(attempt, self._turn(ask, kind, attempt.digest), ask.choices)
        else:
            self.counts["retries"] += 1
        self.last_request_s = time.monotonic()
        self.first_request_s = self.first_request_s or self.last_request_s
        reply = await self._exchanges.answer(exchange)
        self.last_request_s = time.monotonic()
        for each, completion in zip(reply.all, self._unclaimed.pop(reply.reply_id, ()), strict=False):
            self._answered[each.reply_id] = completion
        if kind.is_the_agents_own:
            self.last = self._answered.get(reply.reply_id, self.last)
        return reply

    async def count_tokens(self, ask: Ask) -> int:
        """Return the tokens of a request's prompt; nothing is recorded."""
        self._refuse_if_over()
        try:
            return await self._policy.count_tokens(ask.messages, ask.tools or None)
        except MessagesError as error:
            raise invalid(str(error)) from error

    def reward_turn(self, reply_id: str, reward: float) -> None:
        """Take the reward of one answer from the owner of the reward key. Raises `RefusedError` for an answer
        that the session has not given, and where the run computes rewards."""
        self._refuse_unwanted_reward()
        completion = self._answered.get(reply_id)
        if completion is None:
            raise RefusedError(404, "unknown_turn", "no answer of this session has that id")
        self._policy.reward_turn(completion, reward)

    def _refuse_unwanted_reward(self) -> None:
        if self.reward_owner is None:
            self.counts["refused_rewards"] += 1
            raise RefusedError(403, "reward_not_wanted", "this run computes rewards itself: post none")

    def post_reward(self, posted: PostedReward, address: str) -> None:
        """Take the reward of the outcome from the owner of the reward key, who may change it. Raises
        `RefusedError` where the run computes rewards."""
        self._refuse_unwanted_reward()
        self.reward = posted
        self.reward_source = f"{self.reward_owner} {address}"
        self.last_request_s = time.monotonic()
        self._rewarded.set()
        if posted.final:
            self.ended.set()

    def refuse_payment(self, what: str, address: str) -> RefusedError:
        """Return the refusal for whoever has the key of the session alone, and count it."""
        self.counts["refused_rewards"] += 1
        if self.counts["refused_rewards"] == 1:
            log.warning("agent_tried_to_pay_itself", session=self._name, asked_for=what, address=address)
        return RefusedError(
            403, "reward_key_needed",
            f"the key of the session does not {what}: that takes the reward_url or end_url that whoever "
            "leads the episode was given",
        )  # fmt: skip

    def end_episode(self, failed: str | None) -> None:
        self.failed = failed
        self.ended.set()

    @property
    def is_answering(self) -> bool:
        return self._exchanges.under_way > 0

    async def rewarded_within(self, timeout_s: float) -> bool:
        """Wait for a posted reward for at most the given time; return whether there is one."""
        return self._rewarded.is_set() or await set_within(self._rewarded, timeout_s)

    async def close(self) -> None:
        """Refuse further requests, and end what is under way at the engine; a reward may still be posted.
        What was sampled and reached no request is not trained on."""
        self._is_closed = True
        await self._exchanges.close()
        self._leave_untrained(chain.from_iterable(self._unclaimed.values()))
        self._unclaimed.clear()

    async def _turn(self, ask: Ask, kind: RequestKind, digest: bytes) -> Reply:
        sampling, lost = pinned(self._policy.sampling, ask.sampling, self._config.pinned)
        sampling = replace(sampling, stop=(*sampling.stop, *ask.stop))
        self._note_differences(ask, lost)
        with self._refusing(digest), self._timed():
            completions = await self._completions(ask, kind, sampling)
            try:
                reply, *further = [await self._shown(ask, completion) for completion in completions]
            except BaseException:
                self._leave_untrained(completions)
                raise
        self._requests.note(worked=True)
        self._failures.pop(digest, None)
        self._over_long = ""
        self.agents.add(kind.agent)
        self._unclaimed[reply.reply_id] = completions
        return replace(reply, further=tuple(further))

    async def _completions(self, ask: Ask, kind: RequestKind, sampling: Sampling) -> list[Completion]:
        """Return as many answers as the request wants, each of which is recorded."""
        answering = [
            asyncio.create_task(
                self._policy.chat(
                    FixedMessages(ask.messages),
                    kind.agent,
                    tools=ask.tools or None,
                    sampling=sampling,
                    trainable=kind.is_trained,
                    policy=kind.policy,
                    prefix=ask.prefix,
                )
            )
            for _ in range(ask.choices)
        ]
        try:
            return list(await asyncio.gather(*answering))
        except BaseException:
            await cancelled(*answering)
            self._leave_untrained(
                one.result() for one in answering if not (one.cancelled() or one.exception())
            )
            raise

    def _leave_untrained(self, completions: Iterable[Completion]) -> None:
        """Keep answers out of the loss that reach no request."""
        for completion in completions:
            self._policy.leave_untrained(completion.number)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        self._waiting_since.append(began)
        try:
            yield
        except asyncio.CancelledError:
            self._unanswered_s = max(self._unanswered_s, time.monotonic() - began)
            raise
        finally:
            self._longest_wait_s = max(self._longest_wait_s, time.monotonic() - began)
            self._waiting_since.remove(began)

    @property
    def longest_wait_s(self) -> float:
        """Return the longest time that one request took at the engine, those that are there now included: the
        end of a program is known before that of its connections."""
        return max(self._longest_wait_s, self._under_way_s)

    @property
    def unanswered_s(self) -> float:
        """Return the longest wait of requests that have no answer, or had none when whoever asked was gone,
        or the session was closed."""
        return max(self._unanswered_s, self._under_way_s)

    @property
    def _under_way_s(self) -> float:
        return time.monotonic() - self._waiting_since[0] if self._waiting_since else 0.0

    @contextmanager
    def _refusing(self, digest: bytes) -> Iterator[None]:
        """Translate what the policy raises, and note what is not the request's fault."""
        try:
            yield
        except ContextFullError as error:
            self._over_long = str(error)
            raise TooLongError(error.tokens, error.longest) from error
        except RequestRefusedError as error:
            self._over_long = str(error)
            raise RefusedError(400, "context_length_exceeded", str(error)) from error
        except MessagesError as error:
            raise invalid(str(error)) from error
        except (EngineError, HandBackError) as error:
            self._failures[digest] = error
            reason = f"the policy cannot answer: {error}"
            raise RefusedError(503, "policy_unavailable", reason, retry=True) from error
        # A hook, a template or a parser may raise anything. Where it works for others, what the policy wrote
        # did it, and its program is told so; else the episode says nothing of the policy.
        except Exception as error:
            log.exception("gateway_turn_failed", session=self._name)
            self._requests.note(worked=False)
            if self._requests.work and not is_of_host(error):
                raise invalid(f"the gateway failed on this request: {type(error).__name__}") from error
            self._failures[digest] = EpisodeError(f"the gateway failed: {error!r}")
            raise RefusedError(500, "internal_error", f"the gateway failed: {error!r}") from error

    async def _shown(self, ask: Ask, completion: Completion) -> Reply:
        """Return what the agent gets of a completion, which is recorded whole."""
        self.counts["turns"] += 1
        self.counts["tokens"] += len(completion.token_ids)
        calls, words = passed(self._hook, completion.tool_calls)
        if words:
            self.counts["denied_calls"] += len(words)
            log.info("tool_calls_denied", session=self._name, reasons=words)
        finish: Finish = "stop" if completion.finish_reason == "stop" else "length"
        content = str(completion.message["content"]).removeprefix(ask.prefix)
        nats = completion.logprobs
        told = nats is not None and ask.tells_logprobs
        texts = await self._policy.token_texts(completion.token_ids) if told else []
        return Reply(
            reply_id=secrets.token_hex(12),
            created_s=int(time.time()),
            content="\n".join(filter(None, [content, *words])),
            reasoning=completion.reasoning,
            tool_calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=len(completion.token_ids),
            stop_text=completion.stop_text if completion.stop_text in ask.stop else None,
            logprobs=tuple(zip(texts, nats.tolist(), strict=True)) if told and nats is not None else None,
            unmet=self._unmet(ask, calls),
        )

    def _unmet(self, ask: Ask, calls: Sequence[ToolCall]) -> tuple[str, ...]:
        """Return the names of what was asked for and an answer with these calls does not give."""
        wanted, unmet, names = ask.must_call, (*ask.unmet, *ask.unmeetable), [call.name for call in calls]
        if ask.one_call and len(names) > 1:
            unmet = (*unmet, "parallel_tool_calls")
        if wanted is not None and not any(not wanted or name in wanted for name in names):
            self.counts["answers_without_demanded_call"] += 1
            return (*unmet, "tool_choice")
        is_beyond = ask.may_call is not None and not set(names).issubset(ask.may_call)
        return (*unmet, "tool_choice") if is_beyond else unmet

    def _refuse_unmeetable(self, ask: Ask) -> None:
        """Raise `RefusedError` for what cannot be given, unless the settings say to go on without it."""
        if ask.unmeetable and self._config.unmeetable == "refuse":
            names = ", ".join(ask.unmeetable)
            raise invalid(
                f"{names}: answers are sampled freely, since a grammar would change the probabilities that "
                "are trained on. Leave it out, or set actors.environment.gateway.unmeetable=ignore"
            )

    def _refuse_if_over(self, choices: int = 1) -> None:
        if self._is_closed:
            raise RefusedError(403, "session_closed", "this session is closed: its episode has ended")
        turns, tokens = self._config.most_turns, self._config.most_tokens
        if self.counts["turns"] + self._exchanges.under_way + choices > turns:
            raise self._capped("turn_limit", "turn_limit", f"this session has had its {turns} completions")
        if tokens is not None and self.counts["tokens"] >= tokens:
            reason = f"this session has had its {tokens} sampled tokens"
            raise self._capped("length", "token_limit", reason)

    def _capped(self, end: End, code: str, reason: str) -> RefusedError:
        if self._cap is None:
            self._cap, self._cap_reason = end, reason
        return RefusedError(403, code, reason)

    def _note_differences(self, ask: Ask, lost: dict[str, tuple[float, float]]) -> None:
        """Log what the agent asked for and does not get: once in a while, since each request repeats it."""
        without = [*ask.unmet, *ask.unmeetable]
        if not (lost or without or ask.left_out):
            return
        self.counts["requests_with_differences"] += 1
        times = self._differences.due(time.monotonic())
        if times and (lost or without):
            log.info(
                "sampling_is_the_runs",
                session=self._name,
                times=times,
                asked_and_instead=lost,
                without=without,
            )
        if times and ask.left_out:
            log.info("hosted_tools_are_left_out", session=self._name, times=times, types=ask.left_out)


def pinned(
    own: Sampling, asked: Mapping[str, float], pins: Sequence[Pin]
) -> tuple[Sampling, dict[str, tuple[float, float]]]:
    """Return the sampling of a request, and what it asked for and does not get: (asked, instead).

    Args:
        own: the run's.
        asked: temperature, top_p, top_k and max_new_tokens, as far as the client set them.
        pins: names of those that are the run's whatever was asked. max_new_tokens may only be lowered.
    """
    held = own.max_new_tokens
    wanted = {
        "temperature": asked.get("temperature", own.temperature),
        "top_p": asked.get("top_p", own.top_p),
        "top_k": max(0, int(asked.get("top_k", own.top_k))),  # -1 keeps all at other servers
    }
    given = {name: getattr(own, name) if name in pins else value for name, value in wanted.items()}
    lost = {name: (value, given[name]) for name, value in wanted.items() if value != given[name]}
    tokens = int(asked.get("max_new_tokens", held))
    if tokens > held:
        lost["max_new_tokens"] = (tokens, held)
    temperature = float(given["temperature"])
    sampling = replace(
        own,
        # Logits that are divided by next to nothing are not finite.
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=float(given["top_p"]),
        top_k=int(given["top_k"]),
        max_new_tokens=min(tokens, held),
    )
    return sampling, lost
