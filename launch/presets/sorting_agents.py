"""Agents that sort together through the openai package, as a program that somebody else could have written.

It knows Sluice by addresses alone: OPENAI_BASE_URL, which the package reads, the `tasks_url` that it reads on
its standard input, and those that come with each task. It takes tasks until it is ended."""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import aiohttp
from openai import AsyncOpenAI, OpenAIError

EPISODES_AT_ONCE = 32


async def episode(policy: AsyncOpenAI, question: str, label: str) -> dict[str, Any]:
    """Have two agents draft, two more rewrite, and one select; return their rewards."""
    drafts = await asked_of(policy, ("solver-1", "solver-2"), question)
    rewritten = await asked_of(policy, ("rewriter-1", "rewriter-2"), f"{question} drafts {lettered(drafts)}")
    choice = await asked_of(policy, ("selector",), f"{question} which {lettered(rewritten)}")
    chosen = dict(zip("ab", rewritten.values(), strict=True)).get(choice["selector"])
    rewards = {agent: float(answer == label) for agent, answer in {**drafts, **rewritten}.items()}
    outcome = float(chosen == label)
    return {"reward": {**rewards, "selector": outcome}, "outcome": outcome}


async def asked_of(policy: AsyncOpenAI, agents: Sequence[str], content: str) -> dict[str, str]:
    answers = await asyncio.gather(*(ask(policy, agent, content) for agent in agents))
    return dict(zip(agents, answers, strict=True))


async def ask(policy: AsyncOpenAI, agent: str, content: str) -> str:
    completion = await policy.chat.completions.create(
        model="any", messages=[{"role": "user", "content": content}], extra_headers={"X-Sluice-Agent": agent}
    )
    return completion.choices[0].message.content or ""


def lettered(answers: dict[str, str]) -> str:
    """Return the answers after letters, by which another agent can name them."""
    return " ".join(f"{letter} {answer}" for letter, answer in zip("ab", answers.values(), strict=True))


async def take_tasks(policy: AsyncOpenAI, http: aiohttp.ClientSession, tasks_url: str) -> None:
    """Lead one episode after the other."""
    while True:
        async with http.post(tasks_url) as taken:
            if taken.status == 503:  # no task now
                continue
            taken.raise_for_status()
            task = await taken.json()
        try:
            ended = await episode(policy.with_options(api_key=task["session"]), task["prompt"], task["label"])
        except OpenAIError as error:  # such as a session that is closed, since its group was given up
            await http.post(task["end_url"], json={"failed": str(error)})
        else:
            await http.post(task["reward_url"], json=ended)


async def main() -> None:
    """Lead many episodes at once."""
    tasks_url = json.load(sys.stdin)["tasks_url"]
    async with AsyncOpenAI() as policy, aiohttp.ClientSession() as http, asyncio.TaskGroup() as episodes:
        for _ in range(EPISODES_AT_ONCE):
            episodes.create_task(take_tasks(policy, http, tasks_url))


if __name__ == "__main__":
    asyncio.run(main())
