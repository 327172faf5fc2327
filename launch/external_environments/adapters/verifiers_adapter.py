"""Environments of verifiers: those with `load_environment` (verifiers 0.1), and tasksets (verifiers 0.4).
Each leads its own episodes and scores them with its own code. A taskset that brings no harness is answered in
this process, without a program for each episode."""

import asyncio
import importlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from adapter_process import Policy, Rows, divided

KEY_VARIABLE = "SLUICE_SESSION"
"""Environment variable that clients read their key from. The address of an episode tells it already."""
HARNESS = "sluice_adapter"
"""Name under which this file is imported, by which verifiers finds the harness below."""


def _split(rows: Iterable[Any], training: int, heldout: int, row: Callable[[Any], Mapping[str, Any]]) -> Rows:
    return divided([row(one) for one in itertools.islice(rows, training + heldout)], heldout)


class Loop:
    """An event loop in a thread of its own, in which all episodes are led."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def result(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Loaded:
    """An environment that its package makes by `load_environment`, of verifiers 0.1."""

    def __init__(self, module: Any, settings: Mapping[str, Any]) -> None:
        self._environment = module.load_environment(**settings)
        self._loop = Loop()

    def rows(self, training: int, heldout: int) -> Rows:
        environment = self._environment
        if getattr(environment, "eval_dataset", None) is None:
            return _split(environment.get_dataset(), training, heldout, self._row)
        return map(self._row, environment.get_dataset()), map(self._row, environment.get_eval_dataset())

    def _row(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = entry.get("answer")
        label = answer if isinstance(answer, str) else None if answer is None else json.dumps(answer)
        return {"prompt": entry["prompt"], "label": label, "entry": dict(entry)}

    def play(self, entry: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
        from verifiers.types import ClientConfig

        client = ClientConfig(api_base_url=policy.openai_base_url, api_key_var=KEY_VARIABLE, max_retries=0)
        out = self._loop.result(self._environment.run_rollout(dict(entry), client, "policy", {}))
        if out.get("error"):
            raise RuntimeError(f"its environment failed: {out['error']}")
        return _reward(out["reward"], out["metrics"])


class Tasks:
    """A taskset, of verifiers 0.4."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.utils.loaders import (
            default_harness_id,
            harness_config_type,
            load_environment,
            resolve_env_config,
        )

        given = {**settings, "taskset": {"id": name, **settings.get("taskset", {})}}
        config = resolve_env_config(given)
        roles = agent_config_fields(config)
        if len(roles) != 1:
            raise ValueError(f"{name} has the agents {', '.join(roles)}: one with a single agent is played")
        [(role, agent)] = roles.items()
        update: dict[str, Any] = {}
        if "runtime" not in agent.model_fields_set:
            update["runtime"] = SubprocessConfig()
        if agent.harness is None and default_harness_id(name) == "bash":
            update["harness"] = harness_config_type(HARNESS)(id=HARNESS)
        config = config.model_copy(update={role: agent.model_copy(update=update)})
        self._environment: Any = load_environment(config)
        taskset = self._environment.taskset
        if taskset.toolsets(taskset.config) or taskset.task_type().toolsets(taskset.config.task):
            raise ValueError(
                f"{name} has tool servers, which verifiers installs as it plays: it is not played"
            )
        self._loop = Loop()
        self._serving: AsyncExitStack | None = None
        self._starting = threading.Lock()

    def rows(self, training: int, heldout: int) -> Rows:
        return _split(self._environment.taskset, training, heldout, self._row)

    def _row(self, task: Any) -> Mapping[str, Any]:
        data = task.data.model_dump(mode="json")
        return {"prompt": task.data.prompt_text or str(data.get("name") or data["idx"]), "entry": data}

    def play(self, entry: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
        with self._starting:
            if self._serving is None:
                self._serving = self._loop.result(self._served())
        episode = self._loop.result(self._episode(entry, policy))
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        [trace] = episode.traces
        rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
        return _reward(trace.reward, {**trace.metrics, **rewards})

    async def _served(self) -> AsyncExitStack:
        stack = AsyncExitStack()
        await stack.enter_async_context(self._environment.serving())
        return stack

    async def _episode(self, entry: Mapping[str, Any], policy: Policy) -> Any:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        kind = type(self._environment.taskset).task_type()
        task = kind(kind.data_type().model_validate(entry), self._environment.taskset.config.task)
        client = EvalClientConfig(base_url=policy.openai_base_url, api_key_var=KEY_VARIABLE)
        return await self._environment.run_episode(task, ModelContext(model="policy", client=client))


def _reward(reward: float, parts: Mapping[str, float | None]) -> Mapping[str, Any]:
    numbers = ((name[:64], float(part)) for name, part in parts.items() if part is not None)
    return {"reward": float(reward), "components": dict(itertools.islice(numbers, 64))}


def open_source(name: str, settings: Mapping[str, Any]) -> Loaded | Tasks:
    """Open an environment, as `package`, `owner/name@version` or `package[extra]:module`."""
    os.environ[KEY_VARIABLE] = "the-address-tells"
    package, _, module = name.partition(":")
    module = module or re.split(r"[^\w.-]", package.rpartition("/")[2])[0].replace("-", "_")
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return Tasks(module, settings)  # an environment that verifiers brings
    return Loaded(loaded, settings) if hasattr(loaded, "load_environment") else Tasks(module, settings)


try:
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness, HarnessConfig
    from verifiers.v1.runtimes import ProgramResult
except ImportError:  # verifiers 0.1 has none of this
    pass
else:

    class InProcess(Harness[HarnessConfig]):  # type: ignore[misc]  # mypy does not see verifiers
        """Asks for one answer to what was said so far, in this process."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:  # fmt: skip
            """Lead a chat to its next answer."""
            from openai import AsyncOpenAI

            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or ()
            messages += [one if isinstance(one, dict) else message_to_wire(one) for one in given]
            async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None) as client:
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            return ProgramResult(0, answer.choices[0].message.content or "", "")

    __all__ = ["InProcess"]
