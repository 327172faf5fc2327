"""A chat in which the model calls tools until it answers; the answer is scored."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Self

import structlog

from actors.environments.call_styles import (
    CallStyle,
    FoundCall,
    MalformedCall,
    NativeCalls,
    TaggedCalls,
    tagged_results,
)
from actors.episodes.episode import Episode, FailedEpisode
from actors.episodes.errors import EpisodeError, LatestUses, ToolError, ToolFailedError
from actors.episodes.task import ChatMessage, Task
from actors.policy.messages import UNANSWERABLE, Completion, MessagesError
from actors.policy.policy import Policy
from actors.rewards.scoring.answer_scoring import AnswerScoring, answer_to
from actors.settings.tool_chat import ToolsConfig
from actors.tools.base import Arguments, EndsCalls, Tool, ToolResult, function_schema, shortened
from actors.tools.build import build_tools
from actors.tools.episode_tools import EpisodeTools
from actors.tools.prompt_tools import names_of, refused_names
from bus.codec import Json
from bus.process.plugins import RAISED
from bus.trajectory import End
from bus.waiting import cancelled

log = structlog.get_logger()
LOGGED_CHARACTERS = 1000
LOST = ", and what it kept is gone"
COUNTED = ("tool_calls", "tool_failures", "malformed_calls", "tool_bytes")
"""What is counted in an episode, and kept with its trajectories: calls carried out, those of them that failed
by the model's mistake, those that could not be carried out, and bytes that tools answered before any cut."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that a chat has."""

    style: CallStyle
    stops: tuple[str, ...]


@dataclass(slots=True)
class ToolConversation:
    """A chat while it goes on."""

    messages: list[ChatMessage]
    offer: OfferedTools
    tools: EpisodeTools
    inserted: str | None = None
    """Results after which the last completion goes on; None where messages follow it."""
    completions: list[Completion] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tool_time_s: float = 0.0
    end: End | None = None
    """How the conversation ended; None where the finish reason of the last completion says it."""

    @property
    def sampled(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


class ToolChat:
    """Lets a policy call tools over several turns.

    A wrong call is answered with what is wrong with it, and counted; so is one that makes a tool fail which
    works for others. Where a tool never works, or says that what it depends on failed, the rollout fails as
    `tool_error`, since its reward would say nothing about the policy."""

    trajectories_per_episode: int | None = None
    """A chat template may rewrite earlier turns, and then an episode has more than one."""

    def __init__(self, config: ToolsConfig, tools: Mapping[str, Tool], scoring: AnswerScoring) -> None:
        self._config = config
        self._tools = tools
        self._scoring = scoring
        self.reward_times = scoring.times
        self._all = self._offer(tools)
        self._calls_of = {name: LatestUses() for name in tools}
        self._chats = LatestUses()
        """Chats that ended in time."""

    @classmethod
    def from_config(cls, config: ToolsConfig) -> Self:
        """Build tools and reward; raises ConfigError for what cannot work on this host."""
        return cls(config, build_tools(config.tools), AnswerScoring.from_config(config))

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Roll `task` out once. Raises EngineError, RewardError, ToolError or EpisodeError."""
        policy = policy.fresh(task.task_id)
        chat = ToolConversation(self._opening(task), self._offered(task), EpisodeTools(task))
        try:
            return await self._led(task, policy, chat)
        finally:
            await chat.tools.close()

    async def _led(self, task: Task, policy: Policy, chat: ToolConversation) -> Episode:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await self._converse(chat, policy)
        except TimeoutError as error:
            limit, calls_s = self._config.timeout_s, chat.tool_time_s - chat.tools.waited_s
            if calls_s < limit / 2 or not self._chats.work:  # else the calls of the model took it
                self._chats.note(worked=False)
                raise EpisodeError(f"the episode of {task.task_id} took longer than {limit:g} s") from error
            chat.end = "turn_limit"
        else:
            self._chats.note(worked=True)
        last = chat.completions[-1]
        answer = answer_to(task, last.content, last.finish_reason, token_count=chat.sampled)
        found = await chat.tools.examined(self._tools.values())
        answer = replace(answer, metadata={**answer.metadata, **found})
        counts: dict[str, Json] = {name: chat.counts[name] for name in COUNTED}
        return await self._scoring.episode(policy, answer, _metrics(chat), end=chat.end, metadata=counts)

    async def score_group(self, episodes: Mapping[int, Episode]) -> Mapping[int, Episode | FailedEpisode]:
        """Return the episodes of a group with their final rewards; raises RewardError."""
        return await self._scoring.score_group(episodes)

    async def close(self) -> None:
        async with AsyncExitStack() as parts:  # each is closed, whatever another raises
            for tool in self._tools.values():
                parts.push_async_callback(tool.close)
            parts.push_async_callback(self._scoring.close)

    def _offer(self, tools: Mapping[str, Tool]) -> OfferedTools:
        if self._config.calls == "tags":
            stops = tuple(f"</{name}>" for name in tools) if self._config.stop_at_call else ()
            return OfferedTools(TaggedCalls(tools), stops)
        return OfferedTools(NativeCalls(tools, [function_schema(tool) for tool in tools.values()]), ())

    def _offered(self, task: Task) -> OfferedTools:
        """Return the tools that the prompt names, or all. Raises EpisodeError for one that is not there."""
        if not task.tools:
            return self._all
        names = names_of(task.tools)
        if problem := refused_names(names, self._tools):
            raise EpisodeError(f"task {task.task_id}: {problem}")
        return self._offer({name: self._tools[name] for name in names})

    def _opening(self, task: Task) -> list[ChatMessage]:
        messages, system = list(task.messages), self._config.system
        if system is not None and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": system})
        return messages

    async def _converse(self, chat: ToolConversation, policy: Policy) -> None:
        """Let the model speak until it answers, or comes to a limit."""
        while True:
            completion = await self._completion(chat, policy)
            if completion is None:
                return
            chat.completions.append(completion)
            calls = self._calls(chat, completion)
            if not calls:
                return
            if len(chat.completions) == self._config.max_turns:
                chat.end = "turn_limit"
                return
            answered = await self._answers(calls, chat)
            if self._config.results == "inline":
                chat.inserted = tagged_results(answered)
            else:
                chat.messages += [completion.message, *chat.offer.style.results(answered)]

    def _calls(self, chat: ToolConversation, completion: Completion) -> list[FoundCall]:
        """Return what a completion asks of tools; nothing makes it the answer."""
        if completion.finish_reason != "stop":
            return []
        calls = chat.offer.style.calls(completion)
        stopped = any(stop in completion.text for stop in chat.offer.stops)
        if self._config.results == "inline" and not stopped:  # the policy has ended its turn: nothing goes on
            chat.counts["malformed_calls"] += len(calls)
            return []
        return calls

    async def _completion(self, chat: ToolConversation, policy: Policy) -> Completion | None:
        """Return the next completion, or None where budget or context leave no room for one."""
        room = policy.sampling.max_new_tokens
        if self._config.token_budget is not None:
            room = min(room, self._config.token_budget - chat.sampled)
        if room < 1:
            chat.end = "length"
            return None
        asked = policy.sampling
        sampling = replace(asked, max_new_tokens=room, stop=(*asked.stop, *chat.offer.stops))
        try:
            if chat.inserted is not None:
                return await policy.go_on(chat.completions[-1], chat.inserted, sampling=sampling)
            return await policy.chat(chat.messages, tools=chat.offer.style.schemas, sampling=sampling)
        except UNANSWERABLE as error:
            if not chat.completions:
                raise  # the prompt itself cannot be answered
            # The model and its tools have filled the context, or wrote what the template refuses.
            chat.end = None if isinstance(error, MessagesError) else "length"
            return None

    async def _answers(
        self, calls: Sequence[FoundCall], chat: ToolConversation
    ) -> list[tuple[FoundCall, ToolResult]]:
        """Carry out the calls of a turn, one after the other or side by side; each goes with its result."""
        started = monotonic()
        try:
            if not self._config.parallel_calls:
                return [(call, await self._answer(n, call, chat)) for n, call in enumerate(calls)]
            answers = [asyncio.create_task(self._answer(n, call, chat)) for n, call in enumerate(calls)]
            try:
                return list(zip(calls, await asyncio.gather(*answers), strict=True))
            finally:
                await cancelled(*answers)  # a call that fails ends the episode and the other calls
        finally:
            chat.tool_time_s += monotonic() - started

    async def _answer(self, number: int, call: FoundCall, chat: ToolConversation) -> ToolResult:
        if isinstance(call, MalformedCall):
            chat.counts["malformed_calls"] += 1
            return ToolResult(f"error: {call.reason}", failed=True)
        if number >= self._config.calls_per_turn:
            chat.counts["malformed_calls"] += 1
            limit = self._config.calls_per_turn
            return ToolResult(f"error: only {limit} calls are carried out at a time", failed=True)
        chat.counts["tool_calls"] += 1
        result = await self._result(call.tool, call.arguments, chat.tools)
        chat.counts["tool_failures"] += result.failed
        chat.counts["tool_bytes"] += len(result.text.encode(errors="replace"))
        return replace(result, text=shortened(result.text, self._config.output_characters))

    async def _result(self, tool: Tool, arguments: Arguments, tools: EpisodeTools) -> ToolResult:
        """Call a tool; where it works for others, its failure is a result that says so, without the words of
        the error, which may tell of the host. Raises ToolError for what is not the model's mistake."""
        try:
            result = await self._called(tool, arguments, tools)
        except ToolFailedError as error:
            kept = tools.give_up(tool)
            calls = self._calls_of[tool.name]
            calls.note(worked=False)
            if not calls.work:
                raise
            log.info("tool_failed_on_a_call", tool=tool.name, reason=str(error)[:LOGGED_CHARACTERS])
            return ToolResult(f"error: the tool failed on these arguments{LOST if kept else ''}", failed=True)
        self._calls_of[tool.name].note(worked=True)
        return result

    async def _called(self, tool: Tool, arguments: Arguments, tools: EpisodeTools) -> ToolResult:
        limit = self._config.tool_timeout_s
        await tools.room_for(tool)
        try:
            async with asyncio.timeout(limit) as clock:
                result = await tools.call(tool, arguments)
        except ToolError:
            raise
        except RAISED as error:  # a tool of the user's own may raise anything
            if clock.expired() and isinstance(tool, EndsCalls) and tool.wall_s < limit:
                raise ToolError(f"a call of {tool.name!r} waited for {limit:g} s: set its at_once") from error
            said = f"took longer than {limit:g} s" if clock.expired() else f"raised {error!r}"
            raise ToolFailedError(f"the tool {tool.name!r} {said}") from error
        if not (isinstance(result, ToolResult) and isinstance(result.text, str)):
            raise ToolFailedError(
                f"the tool {tool.name!r} returned {type(result).__name__}, not a ToolResult"
            )
        return result


def _metrics(chat: ToolConversation) -> dict[str, float]:
    truncated = chat.end == "length" or chat.completions[-1].finish_reason == "length"
    return {
        "rollout/completion_tokens": float(chat.sampled),
        "rollout/truncated": float(truncated),
        "rollout/turns": float(len(chat.completions)),
        "rollout/tool_time_s": chat.tool_time_s,
        **{f"rollout/{name}": float(chat.counts[name]) for name in COUNTED},
    }
