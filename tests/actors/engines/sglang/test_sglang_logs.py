"""The log files of SGLang's servers, with a small program in a server's place."""

import asyncio
import os
import platform
import sys
from pathlib import Path

import pytest

from actors.engines.sglang.server import server as servers
from actors.engines.sglang.server.server import OwnServer, ServerProcess
from actors.settings.engines import SglangEngineConfig
from storage.disk import log_files

TALKS = """
import time
while True:
    print("x" * 99, flush=True)
    time.sleep(0.001)
"""


@pytest.fixture
def talking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program in a server's place; its log is to be short."""
    program = tmp_path / "talks.py"
    program.write_text(TALKS)
    monkeypatch.setattr(servers, "LAUNCHER", program)
    monkeypatch.setattr(log_files, "LOG_BYTES", 5000)
    return program


def names(*paths: list[Path]) -> set[str]:
    return {path.name for several in paths for path in several}


async def test_a_server_that_talks_for_long_keeps_two_short_logs(tmp_path: Path, talking: Path):
    log = tmp_path / "logs" / "engine.log"
    server = OwnServer(SglangEngineConfig(), tmp_path, log, 0)
    server.process = await ServerProcess.start(Path(sys.executable), {}, os.environ, log)
    before, begun = log.with_name("engine.log.1"), set()
    async with asyncio.timeout(60):
        while len(begun) < 3:
            assert await server.ended(within_s=0.02) == ""
            begun |= {before.stat().st_mtime_ns} if before.exists() else set()
        while not server.process.tail():  # nothing yet since the log was emptied
            await server.ended(within_s=0.02)
    await server.kill()
    assert sorted(path.name for path in log.parent.iterdir()) == ["engine.log", "engine.log.1"]
    assert server.process.tail().startswith("x")


async def test_logs_of_engines_long_gone_are_removed_and_those_of_other_hosts_stay(
    tmp_path: Path, talking: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(servers, "LOGS_KEPT", 3)
    here = [tmp_path / f"engine-0-actor-{platform.node()}-{n}.log" for n in range(6)]
    elsewhere = [tmp_path / f"engine-0-actor-another-{n}.log" for n in range(6)]
    for age, path in enumerate([*here, *elsewhere]):
        path.touch()
        os.utime(path, (age, age))
    process = await ServerProcess.start(Path(sys.executable), {}, os.environ, here[5])
    await process.kill()
    assert {path.name for path in await asyncio.to_thread(tmp_path.iterdir)} >= names(here[3:], elsewhere)
    assert not names(here[:3]) & {path.name for path in await asyncio.to_thread(tmp_path.iterdir)}


async def test_the_log_says_what_a_server_does_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The lines are SGLang's own, of 0.5.19 and 0.5.23."""
    said = {
        "INFO: starting": "loading its libraries",
        "[10:00:00] Init torch distributed begin.": "preparing its devices",
        "[10:00:02] Load weight begin. avail mem=138.74 GB": "loading the model",
        "Loading safetensors checkpoint shards: 50%": "loading the model",
        "[10:00:09] Load weight end. elapsed=7.1 s": "allocating its cache",
        "[10:00:10] Entering DeepGEMM JIT Pre-Compile session. It may take a long time": "compiling kernels",
        "[10:00:50] Capture decode CUDA graph begin. This can take": "capturing CUDA graphs",
        "Capturing batches (bs=8 avail_mem=20.10 GB)": "capturing CUDA graphs",
        "[10:01:00] INFO: Application startup complete.": "answering its first request",
    }
    program, log = tmp_path / "echoes.py", tmp_path / "logs/engine.log"
    program.write_text("import sys\nfor line in sys.stdin: print(line, end='', flush=True)\n")
    monkeypatch.setattr(servers, "LAUNCHER", program)
    process = await ServerProcess.start(Path(sys.executable), {}, os.environ, log)
    for line, words in said.items():
        process._process.stdin.write(f"{line}\n".encode())
        async with asyncio.timeout(60):
            while line not in process.tail():  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.01)
        assert process.phase() == words, line
    await process.kill()
