"""One rollout as the requests of an agent see it: caps, retries and what the agent left behind."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import structlog

from actors.engines.base import Sampling
from actors.episodes.errors import EpisodeError
from actors.episodes.policy_faults import LatestUses, is_of_host
from actors.gateway.dialects.exchange import Ask, Finish, Reply
from actors.gateway.dialects.refusal import RefusedError, invalid
from actors.gateway.posted_reward import PostedReward
from actors.gateway.retries import Attempt, Exchanges
from actors.gateway.tool_hooks import ToolHook, passed
from actors.policy.messages import Completion, MessagesError
from actors.policy.policy import Policy
from actors.settings.gateway import GatewayConfig, Pin
from bus.errors import EngineError, HandBackError, RequestRefusedError, SluiceError
from bus.process.log_throttle import LogThrottle
from bus.trajectory import End
from bus.waiting import set_within

log = structlog.get_logger()
DIFFERENCES_LOG_PERIOD_S = 10.0


class Session:
    """Answers requests by the policy of one rollout, which records them.

    A request is checked before anything changes; one that is refused leaves the session as it was."""

    def __init__(
        self, policy: Policy, config: GatewayConfig, *, name: str, hook: ToolHook | None = None,
        differences: LogThrottle | None = None, requests: LatestUses | None = None,
    ) -> None:  # fmt: skip
        self.key = secrets.token_urlsafe(24)
        """What the session is found by; only its agent knows it."""
        self.reward_key = secrets.token_urlsafe(24)
        """What its reward is posted and its end is told with. Its agent does not know it, only who leads the
        episode."""
        self.reward: PostedReward | None = None
        """What the owner of the reward key posted last."""
        self.reward_source = ""
        """Who posted it, and from where."""
        self.reward_owner: str | None = "client"
        """Who has the reward key; None where this run computes rewards itself."""
        self.last: Completion | None = None
        """The newest answer that the agent got, as the policy gave it."""
        self.agents: set[str] = set()
        """Names of the agents that got answers."""
        self.counts: Counter[str] = Counter()
        self.ended = asyncio.Event()
        """Set when the owner of the reward key has said that its episode is over, by a final reward or
        otherwise."""
        self.failed: str | None = None
        """Why the episode failed, as its owner said."""
        self.last_request_s = time.monotonic()
        """When the newest request came that was not refused, by the monotonic clock."""
        self.longest_wait_s = 0.0
        """Longest time that one request took at the engine."""
        self.unanswered_s = 0.0
        """Longest time of those that had no answer when whoever asked was gone, or the session was closed."""
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
        self._unclaimed: dict[str, Completion] = {}
        """Answers that no request has got yet, by the name of the reply."""
        self._rewarded = asyncio.Event()
        self._is_closed = False
        self._cap: End | None = None
        self._is_over_long = False

    @property
    def end(self) -> End | None:
        """Return how the episode ended if the gateway ended it: a cap, or a context that does not fit."""
        return self._cap or ("length" if self._is_over_long else None)

    @property
    def failure(self) -> SluiceError | None:
        """Return what kept an answer from the agent, though its request was in order."""
        return next(iter(self._failures.values()), None)

    async def answer(self, ask: Ask, agent: str, attempt: Attempt) -> Reply:
        """Answer a request, or give a retry the answer of its first attempt. Raises `RefusedError`."""
        exchange = self._exchanges.earlier(attempt)
        if exchange is None:
            self._refuse_if_over()
            exchange = self._exchanges.begin(attempt, self._turn(ask, agent, attempt.digest))
        else:
            self.counts["retries"] += 1
        self.last_request_s = time.monotonic()
        reply = await self._exchanges.answer(exchange)
        self.last_request_s = time.monotonic()
        self.last = self._unclaimed.pop(reply.reply_id, self.last)
        return reply

    async def count_tokens(self, ask: Ask) -> int:
        """Return the tokens of a request's prompt; nothing is recorded."""
        self._refuse_if_over()
        try:
            return await self._policy.count_tokens(ask.messages, ask.tools or None)
        except MessagesError as error:
            raise invalid(str(error)) from error

    def post_reward(self, posted: PostedReward, address: str) -> None:
        """Take the reward of the outcome from the owner of the reward key, who may change it.

        Raises `RefusedError` where the run computes rewards."""
        if self.reward_owner is None:
            self.counts["refused_rewards"] += 1
            raise RefusedError(403, "reward_not_wanted", "this run computes rewards itself: post none")
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
        """Note that the episode is over, and why it failed if it did."""
        self.failed = failed
        self.ended.set()

    @property
    def is_answering(self) -> bool:
        """Return whether a request waits for the policy."""
        return self._exchanges.under_way > 0

    async def rewarded_within(self, timeout_s: float) -> bool:
        """Wait for a posted reward for at most the given time; return whether there is one."""
        return self._rewarded.is_set() or await set_within(self._rewarded, timeout_s)

    async def close(self) -> None:
        """Refuse further requests, and end what is under way at the engine; a reward may still be posted.

        What was sampled and reached no request is not trained on."""
        self._is_closed = True
        await self._exchanges.close()
        for completion in self._unclaimed.values():
            self._policy.leave_untrained(completion.number)
        self._unclaimed.clear()

    async def _turn(self, ask: Ask, agent: str, digest: bytes) -> Reply:
        sampling, lost = pinned(self._policy.sampling, ask.sampling, self._config.pinned)
        sampling = replace(sampling, stop=(*sampling.stop, *ask.stop))
        self._note_differences(ask, lost)
        with self._refusing(digest), self._timed():
            completion = await self._policy.chat(
                ask.messages, agent, tools=ask.tools or None, sampling=sampling
            )
            reply = self._shown(completion)
        self._requests.note(worked=True)
        self._failures.pop(digest, None)
        self._is_over_long = False
        self.agents.add(agent)
        self._unclaimed[reply.reply_id] = completion
        return reply

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        except asyncio.CancelledError:
            self.unanswered_s = max(self.unanswered_s, time.monotonic() - began)
            raise
        finally:
            self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)

    @contextmanager
    def _refusing(self, digest: bytes) -> Iterator[None]:
        """Translate what the policy raises, and note what is not the request's fault."""
        try:
            yield
        except RequestRefusedError as error:
            self._is_over_long = True
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

    def _shown(self, completion: Completion) -> Reply:
        """Return what the agent gets of a completion, which is recorded whole."""
        self.counts["turns"] += 1
        self.counts["tokens"] += len(completion.token_ids)
        calls, words = passed(self._hook, completion.tool_calls)
        if words:
            self.counts["denied_calls"] += len(words)
            log.info("tool_calls_denied", session=self._name, reasons=words)
        finish: Finish = "stop" if completion.finish_reason == "stop" else "length"
        return Reply(
            reply_id=secrets.token_hex(12),
            created_s=int(time.time()),
            content="\n".join(filter(None, [str(completion.message["content"]), *words])),
            reasoning=completion.reasoning,
            tool_calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=len(completion.token_ids),
        )

    def _refuse_if_over(self) -> None:
        if self._is_closed:
            raise RefusedError(403, "session_closed", "this session is closed: its episode has ended")
        turns, tokens = self._config.most_turns, self._config.most_tokens
        if self.counts["turns"] + self._exchanges.under_way >= turns:
            self._cap = self._cap or "turn_limit"
            raise RefusedError(403, "turn_limit", f"this session has had its {turns} completions")
        if tokens is not None and self.counts["tokens"] >= tokens:
            self._cap = self._cap or "length"
            raise RefusedError(403, "token_limit", f"this session has had its {tokens} sampled tokens")

    def _note_differences(self, ask: Ask, lost: dict[str, tuple[float, float]]) -> None:
        """Log what the agent asked for and does not get: once in a while, since each request repeats it."""
        if not (lost or ask.unmet):
            return
        self.counts["requests_with_differences"] += 1
        if times := self._differences.due(time.monotonic()):
            log.info(
                "sampling_is_the_runs",
                session=self._name,
                times=times,
                asked_and_instead=lost,
                without=list(ask.unmet),
            )


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
    sampling = replace(
        own,
        temperature=float(given["temperature"]),
        top_p=float(given["top_p"]),
        top_k=int(given["top_k"]),
        max_new_tokens=min(tokens, held),
    )
    return sampling, lost
