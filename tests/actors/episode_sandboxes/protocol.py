"""What every back end of sandboxes must do, as tests of each of them ask it."""

import asyncio

import pytest

from actors.episode_sandboxes.base import SandboxFileError
from tests.actors.episode_sandboxes.backends import said, shell


async def does_what_a_sandbox_does(sandbox):
    """Ask a sandbox for commands, files and snapshots, and for the ends of commands at their limits."""
    ran = await shell(
        sandbox, "cat; echo $A; echo err >&2; pwd; exit 3", stdin=b"\0\xff", variables={"A": "b 'c'"}
    )
    assert (ran.stdout, ran.stderr) == (b"\0\xffb 'c'\n/workspace\n", b"err\n")
    assert (ran.end, ran.status) == ("exited", 3)
    assert await said(sandbox, "sleep 100 & echo $! > pid; echo begun") == "begun\n"
    assert await said(sandbox, "kill -0 $(cat pid) && echo runs") == "runs\n"
    assert (await shell(sandbox, "sleep 55 & exec sleep 56", timeout_s=0.5)).end == "time"
    assert (await shell(sandbox, "grep -l 'sleep.5[56]' -a /proc/[0-9]*/cmdline")).stdout == b""
    ran = await shell(sandbox, "yes", output_bytes=1000)
    assert (ran.end, len(ran.stdout)) == ("output", 1000)
    await sandbox.write("a/b c", b"\0\xff" * 100_000)
    snapshot = await sandbox.snapshot()
    await said(sandbox, "rm -r a; touch .hidden d")
    await sandbox.restore(snapshot)
    assert await sandbox.read("/workspace/a/b c") == b"\0\xff" * 100_000
    with pytest.raises(SandboxFileError, match="No such file"):
        await sandbox.read("a/nothing")
    secret = (
        "read a; for one in /proc/[0-9]*/fd/0 /tmp/.sluice*/*; do timeout 0.05 cat $one; done 2> /dev/null"
    )
    assert "proof" not in await said(sandbox, f"{secret}; cat /proc/[0-9]*/cmdline || true", stdin=b"proof\n")
    task = asyncio.create_task(shell(sandbox, "echo > begun; exec sleep 77", timeout_s=300))
    while not (await shell(sandbox, "ls begun 2> /dev/null")).stdout:
        pass
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(30):
        while (await shell(sandbox, "grep -l 'sleep.7[7]' -a /proc/[0-9]*/cmdline")).stdout:
            pass
