"""`launch eval`: answers of a model to held-out prompts, kept and gone on with."""

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from actors.settings.evaluation import ChatEndpointConfig
from bus.errors import ConfigError
from launch.checks.trial import try_model
from launch.evaluation.answers_file import GREEDY
from launch.evaluation.evaluate import EvaluationRequest, evaluate
from launch.settings.run_config import RunConfig, resolve
from learner.convert.megatron import hf_to_megatron
from tests.launch.external_environments.played import command_of
from tests.launch.model_directory import directory


class Server:
    """A server of OpenAI's API that adds, at a temperature of 1 half of the odd sums wrongly; without a sum
    it says 2."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.fails_after = 10**6

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if len(self.asked) >= self.fails_after:
            return web.json_response({"error": "gone"}, status=400)
        self.asked.append(body)
        found = re.fullmatch(r"(\d)\+(\d)\?", body["messages"][-1]["content"])
        total = int(found[1]) + int(found[2]) if found else 2
        wrong = body["temperature"] == 1 and total % 2 and len(self.asked) % 2
        message = {"role": "assistant", "content": "never" if wrong else str(total)}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, ChatEndpointConfig]]:
    served, app = Server(), web.Application()
    app.router.add_post("/v1/chat/completions", served.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]
    yield served, ChatEndpointConfig(url=f"http://127.0.0.1:{port}/v1", model="adder")
    await runner.cleanup()


def config_of(directory: Path, **more: object) -> RunConfig:
    rows = [{"prompt": f"{n}+1?", "label": str(n + 1)} for n in range(4)]
    path = directory / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    layer = {
        "data": {"heldout": path},
        "evaluation": {"sets": [{"name": "cold", "prompts": path, "samples": 2, "temperature": 0.5}]},
        "actors": {"environment": {"reward": "exact"}},
        "directory": directory / "runs",
    }
    return resolve({**layer, **more})


def kept(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


async def test_answers_are_scored_kept_and_gone_on_with(
    tmp_path: Path, server: tuple[Server, ChatEndpointConfig]
):
    served, endpoint = server
    request = EvaluationRequest(out=tmp_path / "out", samples=4, greedy=True, at_once=1, endpoint=endpoint)
    said: list[str] = []
    config = config_of(tmp_path)
    served.fails_after = 10
    held_out, _ = await evaluate(config, asyncio.Event(), request, said.append)
    assert held_out.missing == 4 * 5 - 10
    assert "answers are missing: the same command asks for them" in said[-1]
    failures = [one["failure"] for one in kept(request.out) if one["reward"] is None]
    assert f"{10} answers failed, the last: EngineError" in said[-2]
    assert {failure.partition(":")[0] for failure in failures} == {"EngineError"}
    with (request.out / "answers.jsonl").open("a") as file:
        file.write('{"data_set": "heldout", "pro')  # a crash in the middle of a line
    served.fails_after = 10**6
    held_out, cold = await evaluate(config, asyncio.Event(), request, said.append)
    answers = [one for one in kept(request.out) if one["reward"] is not None]
    assert len(answers) == len(served.asked) == 4 * 5 + 4 * 3  # none was asked for twice
    assert {body["temperature"] for body in served.asked} == {0.0, 0.5, 1.0}
    assert held_out.missing == cold.missing == 0
    assert held_out.scores["greedy"].mean == cold.scores["pass@2"].mean == 1.0
    # Of the odd sums 1 and 3 every second answer is wrong.
    assert 0.5 < held_out.scores["reward"].mean < 1.0
    assert held_out.scores["pass@1"].mean == pytest.approx(held_out.scores["reward"].mean)
    assert held_out.scores["pass@4"].mean == 1.0
    assert held_out.scores["pass@1"].low < held_out.scores["pass@1"].mean < held_out.scores["pass@1"].high
    [text] = {one["text"] for one in answers if (one["prompt"], one["sample"]) == (3, -1)}
    assert "[user] 3+1?" in text
    assert text.endswith("4")
    found = json.loads((request.out / "results.json").read_text())
    assert found[1]["scores"]["pass@2"] == cold.scores["pass@2"]._asdict()
    before = len(served.asked)
    more = EvaluationRequest(**{**vars(request), "samples": 5})
    [more_samples, _] = await evaluate(config, asyncio.Event(), more, said.append)
    assert (more_samples.missing, len(served.asked)) == (0, before + 4)
    fewer = EvaluationRequest(**{**vars(request), "samples": 1})
    [one_each, _] = await evaluate(config, asyncio.Event(), fewer, said.append)
    assert one_each.ends == {"completed": 4 + 4}  # the sampled answers that count, and the greedy ones


async def test_answers_of_another_evaluation_are_not_mixed_in_and_nothing_is_not_evaluated(
    tmp_path: Path, server: tuple[Server, ChatEndpointConfig]
):
    _, endpoint = server
    request = EvaluationRequest(out=tmp_path / "out", count=1, endpoint=endpoint)
    await evaluate(config_of(tmp_path), asyncio.Event(), request, print)
    other = config_of(tmp_path, sampling={"temperature": 0.7})
    with pytest.raises(ConfigError, match=r"answers of another evaluation \(sampling differ\)"):
        await evaluate(other, asyncio.Event(), request, print)
    renamed = EvaluationRequest(**{**vars(request), "endpoint": endpoint.model_copy(update={"model": "b"})})
    with pytest.raises(ConfigError, match=r"\(name differ\)"):
        await evaluate(config_of(tmp_path), asyncio.Event(), renamed, print)
    nothing = config_of(tmp_path, evaluation={}, data={"prompts": tmp_path / "sums.jsonl"})
    with pytest.raises(ConfigError, match="no held-out prompts: give"):
        await evaluate(nothing, asyncio.Event(), request, print)
    opponent = {"opponents": {"old": {"path": tmp_path}}, "environment": {"reward": "exact"}}
    with pytest.raises(ConfigError, match="old: episodes with opponents or several policies need a run"):
        await evaluate(config_of(tmp_path, actors=opponent), asyncio.Event(), request, print)
    nobody = EvaluationRequest(out=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"name one by --model\.path or --url"):
        await evaluate(config_of(tmp_path), asyncio.Event(), nobody, print)


async def test_evaluation_ends_at_a_stop_and_goes_on(
    tmp_path: Path, server: tuple[Server, ChatEndpointConfig]
):
    served, endpoint = server
    request = EvaluationRequest(out=tmp_path / "out", samples=2, at_once=1, endpoint=endpoint)
    stop = asyncio.Event()
    stop.set()
    results = await evaluate(config_of(tmp_path), stop, request, print)
    assert [one.missing for one in results] == [8, 8]
    assert not served.asked
    results = await evaluate(config_of(tmp_path), asyncio.Event(), request, print)
    assert [one.missing for one in results] == [0, 0]


async def test_environment_of_others_is_tried_and_evaluated_with_a_server(
    tmp_path: Path, server: tuple[Server, ChatEndpointConfig]
):
    _, endpoint = server
    path = tmp_path / "seeds.jsonl"
    path.write_text('{"prompt": "seed 3", "metadata": {"entry": {"seed": 3}}}\n')
    lake = command_of("gymnasium", "FrozenLake-v1", {"desc": ["SFG", "FFF"], "is_slippery": False})
    agent = {
        "type": "agent", "command": shlex.join([*lake, "play", "2"]), "long_lived": True,
        "reward": "posted", "program_owns_reward": True,
    }  # fmt: skip
    layer = {"data": {"prompts": path, "heldout": path}, "actors": {"environment": agent}, "evaluation": {}}
    config, said = config_of(tmp_path, **layer), []
    await try_model(config, asyncio.Event(), count=1, say=said.append, endpoint=endpoint)
    shown = said[-2].plain
    assert "Answer with the number of your action alone: 0 to 3.\n0" in shown
    assert "--- reward 1, label None, end completed\n    steps 1\n    invalid 0" in shown
    assert re.search(r"--- 2 trajectories, 2 turns; 0 of \d+ tokens are trained; \d\.\d\d s", shown)
    request = EvaluationRequest(out=tmp_path / "out", endpoint=endpoint)
    [found] = await evaluate(config, asyncio.Event(), request, print)
    assert (found.scores["pass@1"].mean, found.scores["part/steps"].mean, found.turns) == (1.0, 1.0, 2.0)


async def test_model_without_a_chat_template_is_refused_before_anything_is_asked(tmp_path: Path):
    model = directory(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    data = {"prompts": tmp_path / "sums.jsonl"}
    config = config_of(tmp_path, model={"path": model}, data=data, sampling={"max_new_tokens": 8})
    refusal = f"{model}: the tokenizer has no chat template.*: take the instruction-tuned model"
    with pytest.raises(ConfigError, match=refusal):
        await try_model(config, asyncio.Event(), count=1, say=print)
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=refusal):
        await evaluate(config, asyncio.Event(), EvaluationRequest(out=out), print)
    assert not out.exists()


async def test_an_export_that_its_run_has_not_written_is_refused_with_what_to_take(tmp_path: Path):
    run = tmp_path / "runs/mine"
    (run / "export").mkdir(parents=True)
    data = {"prompts": tmp_path / "sums.jsonl"}
    config = config_of(tmp_path, model={"path": run / "export"}, data=data, sampling={"max_new_tokens": 8})
    request = EvaluationRequest(out=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"it has no config\.json; give a directory in Hugging Face format"):
        await evaluate(config, asyncio.Event(), request, print)
    (run / "learner.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=rf"run 'mine' has not ended.* --checkpoint {run}` measures its newest"
    ):
        await evaluate(config, asyncio.Event(), request, print)
    (run / "export/config.json").write_text((directory(tmp_path / "model") / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):  # of an earlier build
        await evaluate(config, asyncio.Event(), request, print)


@pytest.mark.slow
async def test_directory_and_checkpoint_of_one_model_answer_alike(tmp_path: Path):
    model = directory(tmp_path / "model")
    hf_to_megatron(model, tmp_path / "run/checkpoints/step_00000003")
    config = config_of(tmp_path, model={"path": model}, sampling={"max_new_tokens": 6})
    of_directory = EvaluationRequest(out=tmp_path / "a", samples=1, greedy=True)
    await evaluate(config, asyncio.Event(), of_directory, print)
    nameless = config_of(tmp_path, sampling={"max_new_tokens": 6})
    of_checkpoint = EvaluationRequest(out=tmp_path / "b", samples=1, greedy=True, checkpoint=tmp_path / "run")
    said: list[str] = []
    await evaluate(nameless, asyncio.Event(), of_checkpoint, said.append)
    assert said[0].startswith(f"{tmp_path / 'run/checkpoints/step_00000003'}; the answers are in")
    texts = [
        {(one["data_set"], one["prompt"]): one["text"] for one in kept(out) if one["sample"] == GREEDY}
        for out in (of_directory.out, of_checkpoint.out)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0].values())) == 4
    nothing = EvaluationRequest(out=tmp_path / "c", checkpoint=model)
    with pytest.raises(ConfigError, match="is no checkpoint, and neither a directory of several"):
        await evaluate(nameless, asyncio.Event(), nothing, print)
