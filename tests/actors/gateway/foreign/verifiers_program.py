"""A task of verifiers with a reward of its own, rolled out by its agent in this process."""

import asyncio
import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import verifiers.v1 as vf

given = {**json.loads(Path(os.environ["SLUICE_TASK"]).read_text()), **json.load(sys.stdin)}


class Sum(vf.Task):
    """Wants the label as the last answer."""

    @vf.reward
    async def exact(self, trace) -> float:
        return float((trace.assistant_messages[-1].content or "") == given["label"])


async def rollout():
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(
        model="gpt-5", harness={"id": "verifiers_harness"}, runtime=vf.SubprocessConfig(), client=client
    )
    async with vf.make_agent(config) as agent:
        return await agent.run(Sum(vf.TaskData(idx=0, prompt=given["prompt"])))


trace = asyncio.run(rollout())
assert trace.ok, trace.last_error
urlopen(Request(given["reward_url"], json.dumps(trace.reward).encode()), timeout=30).read()
