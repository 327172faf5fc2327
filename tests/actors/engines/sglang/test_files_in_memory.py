"""Files in memory of a SGLang server that is killed, with a small program in a server's place."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from actors.engines.sglang.server import server as servers
from actors.engines.sglang.server.server import ServerProcess, files_in_memory

SHARES = """
import mmap, os, time
for name in ("sgl_shm_mq_{}_test", "another_{}_test"):
    fd = os.open("/dev/shm/" + name.format(os.getpid()), os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(fd, 4096)
    globals()[name] = mmap.mmap(fd, 4096)
time.sleep(600)
"""


async def test_a_server_that_is_killed_leaves_none_of_its_own_and_removes_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = tmp_path / "shares.py"
    program.write_text(SHARES)
    monkeypatch.setattr(servers, "LAUNCHER", program)
    server = await ServerProcess.start(Path(sys.executable), {}, os.environ, tmp_path / "engine.log")
    another = Path(f"/dev/shm/another_{server.pid}_test")
    try:
        async with asyncio.timeout(60):
            while not (found := files_in_memory(server.pid)):  # noqa: ASYNC110  # nothing tells of it
                await asyncio.sleep(0.01)
            while not another.exists():  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.01)
        await server.kill()
        assert not any(file.exists() for file in found)
        assert another.exists()  # noqa: ASYNC240
    finally:
        await server.kill()
        another.unlink(missing_ok=True)  # noqa: ASYNC240
