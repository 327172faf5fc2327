"""Commands in sandboxes of services, by a shell script alone: each service has another way to begin a command
and to end it, but all of them run a short script and move files. The script holds a command to its limits
inside of the sandbox, so that no connection has to last as long."""

import asyncio
import re
import secrets
import shlex
import socket
import time
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, get_args

import structlog

from actors.episode_sandboxes.base import WORKSPACE, Command, CommandEnd, CommandResult
from actors.episode_sandboxes.containers import KILLED, OF_MEMORY
from actors.episodes.errors import ToolError, ToolFailedError
from actors.settings.episode_sandboxes import SandboxLimits

log = structlog.get_logger()
WAIT_S = 20.0
"""Longest time for which one script waits for the end of a command; then another one is sent."""
GRACE_S = 60.0
"""Longest time after a command's own limit until its end is reported."""
INLINE_BYTES = 1 << 16
"""Output that travels in the answer of a script; more of it travels as a file."""
LOOK_S = 0.05
END_ATTEMPTS = 3
AGAIN_S = 1.0
"""Time after which a service is asked again to end a sandbox."""
GONE = "sluice gone"
ANSWER = re.compile(
    r"^sluice (?P<status>\d+) (?P<end>\w+) (?P<out>\d+) (?P<err>\d+) (?P<killed>\d+)\n"
    r"(?P<inline_out>[^\n]*)\n(?P<inline_err>[^\n]*)\n?$",
    re.MULTILINE,
)
ENDS: Mapping[str, CommandEnd] = {end: end for end in get_args(CommandEnd)}
NEEDED = ("base64", "env", "head", "mkfifo", "sed", "setsid", "tar", "tr", "wc")
PREPARE = """
mkdir -p "$0" && [ -w "$0" ] || echo "$0"
for name; do command -v "$name" > /dev/null || echo "$name"; done
"""
BEGIN = 'mkdir -p "$0"; setsid sh -c "$@" > /dev/null 2>&1 < /dev/null &'
KEEP = """
echo $$ > "$0/run"
limit=$1 seconds=$2; shift 2
mkfifo "$0/0" "$0/1" "$0/2"
[ -e "$0/in" ] || : > "$0/in"
keep() {
  ulimit -c 0; ulimit -f "$((limit / 512 + 1))"
  cat < "$0/$1" > "$0/$2"
  [ "$(wc -c < "$0/$2")" -le "$limit" ] || { echo output > "$0/end"; kill -9 "-$command"; }
}
setsid sh -c '{ ulimit -t "$1"; ulimit -f "$2"; } 2> /dev/null
  cd "$3" || exit 126; shift 3; exec env "$@"' sh "$@" < "$0/0" > "$0/1" 2> "$0/2" &
command=$!
echo $command > "$0/command"
(exec < "$0/in"; rm "$0/in"; exec cat) > "$0/0" &
keep 1 out & out=$!
keep 2 err & err=$!
setsid sh -c 'sleep "$1"; [ ! -e "$0" ] || { echo time > "$0/end"; kill -9 "-$2"; }' "$0" $seconds $command &
timer=$!
wait $command
status=$?
kill -9 $timer "-$timer"
setsid sh -c 'sleep 0.2; kill -9 "$@"' sh $out $err &
wait $out $err
killed=$(cat OF_MEMORY 2> /dev/null | sed -n 's/^oom_kill //p' | head -n 1)
sizes="$(wc -c < "$0/out") $(wc -c < "$0/err")"
echo sluice $status "$(cat "$0/end" 2> /dev/null || echo exited)" $sizes ${killed:-0} > "$0/done.new"
mv "$0/done.new" "$0/done"
""".replace("OF_MEMORY", OF_MEMORY)
"""Keeps what a command writes, and ends it at its limits. It ends also where the command has left something
in the background. The command reads a pipe: its input may be a line that what it starts must not find."""
LOOK = """
looks=0
while [ ! -e "$0/done" ]; do
  [ ! -s "$0/run" ] || kill -0 "$(cat "$0/run")" 2> /dev/null || [ -e "$0/done" ] || rm -rf "$0"
  [ -e "$0" ] || echo GONE
  [ -e "$0" ] && [ "$looks" -lt "$1" ] || exit 0
  sleep LOOK_S
  looks=$((looks + 1))
done
cat "$0/done"
read -r word status end out err rest < "$0/done"
[ "$word" = sluice ] || { echo GONE; exit 0; }
[ "$out" -gt "$2" ] || head -c "$out" "$0/out" | base64 | tr -d '\\n'; echo
[ "$err" -gt "$2" ] || head -c "$err" "$0/err" | base64 | tr -d '\\n'; echo
[ "$out" -gt "$2" ] || [ "$err" -gt "$2" ] || rm -rf "$0"
""".replace("LOOK_S", str(LOOK_S)).replace("GONE", GONE)
"""Waits for a command's end. What runs in the sandbox may end the script that keeps it, or fill the disk."""
END = """
kill -9 "-$(cat "$0/command")" "-$(cat "$0/run")" 2> /dev/null
rm -rf "$0"
"""


class HostedSandbox(Protocol):
    """What the package of a service does for one sandbox. Errors of a sandbox that is gone are
    ToolFailedError, and others ToolError."""

    async def shell(self, script: str, timeout_s: float) -> str:
        """Run a script of /bin/sh for so long at most, and return its output."""

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, and the directories that it needs."""

    async def get(self, path: str) -> bytes:
        """Read a file."""

    async def end(self) -> None:
        """End the sandbox."""


class ScriptedSandbox:
    """Carries out commands in a sandbox of a service."""

    def __init__(self, hosted: HostedSandbox, limits: SandboxLimits) -> None:
        self._hosted = hosted
        self._limits = (str(limits.cpu_s), str(limits.disk_mb * 2048))
        """Seconds, and blocks of 512 bytes in a file."""
        self._killed = 0
        """Processes that the kernel has killed for lack of memory, as far as is known."""

    async def begin(self) -> None:
        """Make the workspace. Raises ToolError for an image that lacks what the scripts need."""
        if missing := (await self._hosted.shell(_script(PREPARE, WORKSPACE, *NEEDED), GRACE_S)).split():
            raise ToolError(f"the image of a sandbox lacks {' and '.join(missing)}")

    async def run(self, command: Command) -> CommandResult:
        """Carry out a command. Raises ToolFailedError where the sandbox has ended, else ToolError."""
        started, place, is_done = time.monotonic(), f"/tmp/.sluice-{secrets.token_hex(8)}", False
        try:
            async with asyncio.timeout(command.timeout_s + GRACE_S):
                found = await self._answer(place, command)
                output = [await self._output(place, name, found) for name in ("out", "err")]
            is_done = max(int(found["out"]), int(found["err"])) <= INLINE_BYTES
        except TimeoutError as error:
            limit_s = command.timeout_s
            raise ToolError(f"the sandbox did not end a command that may take {limit_s:g} s") from error
        finally:
            if not is_done:
                with suppress(ToolError):  # why the command is not done says more
                    await self._hosted.shell(_script(END, place), GRACE_S)
        status, end, before = int(found["status"]), ENDS[found["end"]], self._killed
        self._killed = int(found["killed"])
        if end == "exited" and status == KILLED and self._killed > before:
            end = "memory"
        stdout, stderr = (one[: command.output_bytes] for one in output)
        took_s = time.monotonic() - started
        return CommandResult(stdout=stdout, stderr=stderr, end=end, status=status, took_s=took_s)

    async def reach(self, gateway: str) -> tuple[str, socket.socket | None]:
        """Return the address of the gateway: the service lets connections out to it."""
        return gateway, None

    async def close(self) -> None:
        """End the sandbox; what the service says against it is logged."""
        await end_sandbox(self._hosted)

    async def _answer(self, place: str, command: Command) -> re.Match[str]:
        ends_s = time.monotonic() + command.timeout_s + GRACE_S / 2
        if command.stdin:
            await self._hosted.put(f"{place}/in", command.stdin)
        variables = [f"{name}={value}" for name, value in command.variables.items()]
        limits = (str(command.output_bytes), str(command.timeout_s), *self._limits, command.directory)
        script = _script(BEGIN, place, KEEP, place, *limits, *variables, *command.words)
        look = _script(LOOK, place, f"{WAIT_S / LOOK_S:.0f}", str(INLINE_BYTES))
        while True:
            said = await self._hosted.shell(script + look, WAIT_S + GRACE_S)
            if found := ANSWER.search(said.replace("\r\n", "\n")):
                return found
            if GONE in said or time.monotonic() > ends_s:
                raise ToolFailedError("what ran in the sandbox has stopped the script that watches a command")
            script = ""

    async def _output(self, place: str, name: str, answer: re.Match[str]) -> bytes:
        if int(answer[name]) > INLINE_BYTES:
            return (await self._hosted.get(f"{place}/{name}"))[: int(answer[name])]
        return b64decode(answer[f"inline_{name}"])


async def end_sandbox(hosted: HostedSandbox) -> None:
    """End a sandbox, which costs money until then: a service that fails is asked again; it is logged."""
    reason = ""
    for _ in range(END_ATTEMPTS):
        try:
            async with asyncio.timeout(GRACE_S):
                return await hosted.end()
        except ToolFailedError:  # the sandbox has ended
            return None
        except (ToolError, TimeoutError) as error:
            reason = str(error) or f"no answer within {GRACE_S:g} s"
        await asyncio.sleep(AGAIN_S)
    log.warning("sandbox_is_not_ended", reason=reason)
    return None


def _script(script: str, *words: str) -> str:
    return shlex.join(("/bin/sh", "-c", script, *words)) + "\n"
