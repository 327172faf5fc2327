"""An agent that looks prices up, through the openai package: a program that somebody else could have written.

The policy asks it for a price by a line `LOOKUP thing`, until it answers. The program gives no reward and
knows no label. It finds the policy by OPENAI_BASE_URL, which the package reads, and its tasks by the
`tasks_url` that it reads on its standard input; the addresses by which it ends an episode come with its
task."""

import asyncio
import json
import re
import sys
from collections.abc import Mapping

import aiohttp
from openai import AsyncOpenAI, OpenAIError
from openai.types.chat import ChatCompletionMessageParam

EPISODES_AT_ONCE = 256
MOST_LOOKUPS = 3
LOOKUP = re.compile(r"LOOKUP +(\w+)")
SYSTEM = "You tell what things cost. Write LOOKUP and the name of a thing to see its price. Then answer."
EXAMPLES: tuple[ChatCompletionMessageParam, ...] = (
    {"role": "user", "content": "What does the sofa cost?"},
    {"role": "assistant", "content": "LOOKUP sofa"},
    {"role": "user", "content": "sofa: 83"},
    {"role": "assistant", "content": "It costs 83."},
    {"role": "user", "content": "What do the vase and the rug cost together?"},
    {"role": "assistant", "content": "LOOKUP vase"},
    {"role": "user", "content": "vase: 14"},
    {"role": "assistant", "content": "LOOKUP rug"},
    {"role": "user", "content": "vase: 14, rug: 52"},
    {"role": "assistant", "content": "They cost 14 + 52 = 66."},
    {"role": "user", "content": "What do the cart and the oven cost together?"},
    {"role": "assistant", "content": "LOOKUP cart"},
    {"role": "user", "content": "cart: 31"},
    {"role": "assistant", "content": "LOOKUP oven"},
    {"role": "user", "content": "cart: 31, oven: 8"},
    {"role": "assistant", "content": "They cost 31 + 8 = 39."},
)


async def episode(policy: AsyncOpenAI, question: str, prices: Mapping[str, int]) -> None:
    """Let the policy look prices up until it answers, or has asked too often."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": SYSTEM},
        *EXAMPLES,
        {"role": "user", "content": question},
    ]
    told: dict[str, int | str] = {}
    for _ in range(MOST_LOOKUPS + 1):
        completion = await policy.chat.completions.create(model="any", messages=messages)
        said = completion.choices[0].message.content or ""
        asked = LOOKUP.search(said)
        if asked is None:
            return
        told[asked[1]] = prices.get(asked[1], "not sold here")
        messages.append({"role": "assistant", "content": said})
        # All that was told so far: a small model adds what stands beside each other.
        messages.append(
            {"role": "user", "content": ", ".join(f"{name}: {price}" for name, price in told.items())}
        )


async def take_tasks(policy: AsyncOpenAI, http: aiohttp.ClientSession, tasks_url: str) -> None:
    """Lead one episode after the other."""
    while True:
        async with http.post(tasks_url) as taken:
            if taken.status == 503:  # no task now
                continue
            taken.raise_for_status()
            task = await taken.json()
        ended = {}
        try:
            prices = task["metadata"]["prices"]
            await episode(policy.with_options(api_key=task["session"]), task["prompt"], prices)
        except OpenAIError as error:  # such as a session that is closed, since its group was given up
            ended = {"failed": str(error)}
        await http.post(task["end_url"], json=ended)


async def main() -> None:
    """Lead many episodes at once."""
    tasks_url = json.load(sys.stdin)["tasks_url"]
    connections = aiohttp.TCPConnector(limit=0)
    async with (
        AsyncOpenAI() as policy,
        aiohttp.ClientSession(connector=connections) as http,
        asyncio.TaskGroup() as episodes,
    ):
        for _ in range(EPISODES_AT_ONCE):
            episodes.create_task(take_tasks(policy, http, tasks_url))


if __name__ == "__main__":
    asyncio.run(main())
