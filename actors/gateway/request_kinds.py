"""Tells which agent a request is of, which policy answers it, and whether its answer is trained."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actors.episodes.agents import DEFAULT_AGENT
from actors.gateway.dialects.exchange import Ask
from actors.gateway.dialects.refusal import invalid
from actors.settings.gateway import RequestRule
from bus.policy_names import DEFAULT_POLICY

AGENT_HEADER, POLICY_HEADER, TRAINED_HEADER = "X-Sluice-Agent", "X-Sluice-Policy", "X-Sluice-Trained"
AGENT_NAME = re.compile(r"[\w.-]{1,64}")
SUB_AGENT = "subagent"
CLAUDE_CODE_SUB_AGENT = "x-claude-code-agent-id"
CODEX_SUB_AGENT, CODEX_THREAD = "x-openai-subagent", "thread-id"
"""What Codex sends with requests of a sub-agent alone, and what tells one of them from another."""


@dataclass(frozen=True, slots=True)
class RequestKind:
    """What becomes of a request."""

    agent: str = DEFAULT_AGENT
    policy: str = DEFAULT_POLICY
    is_trained: bool = True
    is_sub_agent: bool = False

    @property
    def is_the_agents_own(self) -> bool:
        """Return whether the answer may be the agent's last word, by which an episode is scored."""
        return self.is_trained and self.policy == DEFAULT_POLICY and not self.is_sub_agent


class SubAgents:
    """Names the sub-agents of an episode in the order of their first requests, as siblings have theirs."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def name_of(self, headers: Mapping[str, str]) -> str | None:
        """Return the name of the sub-agent that sends such headers; None for the agent itself."""
        key = self._key(headers)
        return self._names.get(key, f"{SUB_AGENT}-{len(self._names) + 1}") if key else None

    def note(self, headers: Mapping[str, str]) -> None:
        """Keep the name of who sends such headers, since its request is answered."""
        if (key := self._key(headers)) and (name := self.name_of(headers)):
            self._names[key] = name

    def _key(self, headers: Mapping[str, str]) -> str | None:
        if CODEX_SUB_AGENT in headers:
            return headers.get(CODEX_THREAD, headers[CODEX_SUB_AGENT])
        return headers.get(CLAUDE_CODE_SUB_AGENT)


def kind_of(
    headers: Mapping[str, str], ask: Ask, rules: Sequence[RequestRule], sub_agents: SubAgents
) -> RequestKind:
    """Return what becomes of a request, by its headers and the first rule that fits. Raises `RefusedError`
    for headers that cannot be heeded."""
    sub_agent = sub_agents.name_of(headers)
    agent = headers.get(AGENT_HEADER, sub_agent or DEFAULT_AGENT)
    if not AGENT_NAME.fullmatch(agent):
        shown = json.dumps(agent[:80])
        raise invalid(f"{AGENT_HEADER}: {shown} is no name of at most 64 letters, digits, . _ -")
    trained = headers.get(TRAINED_HEADER, "true").lower()
    if trained not in ("true", "false"):
        raise invalid(f"{TRAINED_HEADER}: {json.dumps(trained[:80])} is neither true nor false")
    found = (rule for rule in rules if _fits(rule, ask, agent))
    rule = next(found, RequestRule())
    return RequestKind(
        agent=rule.as_agent or agent,
        policy=headers.get(POLICY_HEADER, rule.policy or DEFAULT_POLICY),
        is_trained=rule.trained and trained == "true",  # neither of both brings back what the other left out
        is_sub_agent=sub_agent is not None and AGENT_HEADER not in headers,
    )


def _fits(rule: RequestRule, ask: Ask, agent: str) -> bool:
    first = ask.messages[0]
    system = str(first["content"]) if first["role"] == "system" else ""
    wanted = ((rule.model, ask.model), (rule.system, system), (rule.agent, agent))
    return all(pattern is None or _matches(given, pattern) for pattern, given in wanted)


def _matches(given: str, pattern: str) -> bool:
    """Return whether a text is what a pattern says, in which only `*` is special: a model is `a[1m]`."""
    parts = map(re.escape, pattern.split("*"))
    return re.fullmatch(".*".join(parts), given, re.DOTALL) is not None
