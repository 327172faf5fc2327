"""A harness of verifiers that asks twice, in this process: the stock ones are fetched from the network."""

import json

from openai import AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


class InProcess(Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        ask = AsyncOpenAI(base_url=endpoint, api_key=secret).chat.completions.create
        first = (await ask(model=ctx.model, messages=messages, tools=TOOLS)).choices[0].message
        messages.append(first.model_dump(exclude_none=True))
        for call in first.tool_calls or ():
            numbers = json.loads(call.function.arguments)
            answer = {"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] + numbers["b"])}
            messages.append(answer)
        second = (await ask(model=ctx.model, messages=messages, tools=TOOLS)).choices[0].message
        return ProgramResult(0, second.content or "", "")


__all__ = ["InProcess"]
