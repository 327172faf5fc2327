"""Samples of what a run uses: memory, descriptors and threads of its processes, its directory, its bus."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

from bus.server.nats_server import HTTP_HOST
from soak.local_run import launch_command
from storage.disk.run_directory import RunDirectory
from storage.metrics.records import last_record

HTTP_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Sample:
    """What a run used at one moment."""

    time_s: float
    """Seconds since the first sample."""
    step: int
    """Optimizer steps done."""
    calm: bool
    """Says whether every process goes on living: restarts are over."""
    lives: dict[str, str]
    """For each part, which process it was."""
    values: dict[str, float]
    """The series by name, such as `storage memory_bytes`, `disk replay/segment bytes` or
    `nats TASKS messages`. What could not be asked is missing."""


def last_step(run: RunDirectory) -> int:
    """Return the last optimizer step that the learner has recorded; 0 before the first."""
    record = last_record(run.path / "lineage.jsonl") or {}
    return int(str(record.get("step", 0)))


def sample_processes(supervisor: int) -> tuple[dict[str, str], dict[str, float]]:
    """Return which processes there are under the supervisor, itself included, and what they use.

    Processes of one name count together. Memory is what would be free if the process ended: its unique set
    size, without pages of files that others have mapped too.
    """
    lives: defaultdict[str, list[str]] = defaultdict(list)
    values: defaultdict[str, float] = defaultdict(float)
    for process in _tree(supervisor):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():  # a zombie's is denied
            name = _name(process)
            used = process.memory_full_info()
            descriptors, threads = process.num_fds(), process.num_threads()
            lives[name].append(f"{process.pid}@{process.create_time():.2f}")
            values[f"{name} memory_bytes"] += used.uss
            values[f"{name} descriptors"] += descriptors
            values[f"{name} threads"] += threads
    return {name: " ".join(sorted(who)) for name, who in lives.items()}, dict(values)


def _tree(supervisor: int) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(supervisor)
        yield from (root, *root.children(recursive=True))


def _name(process: psutil.Process) -> str:
    """Return the part that a process is, or whose child: `storage`, `nats-server`, `learner python3`."""
    command = process.cmdline()
    program = Path(command[0]).name if command else process.name()
    if program == "nats-server":
        return program
    own = launch_command(command)
    if own or (parent := process.parent()) is None:
        return own or program
    return f"{launch_command(parent.cmdline()) or 'other'} {program}"


def sample_disk(directory: Path) -> dict[str, float]:
    """Return bytes and number of the files below a run's directory, by sort."""
    values: defaultdict[str, float] = defaultdict(float)
    for path, size_bytes in _files(str(directory)):
        sort = sort_of_file(Path(path).relative_to(directory))
        values[f"disk {sort} bytes"] += size_bytes
        values[f"disk {sort} files"] += 1
    return dict(values)


def sort_of_file(path: Path) -> str:
    """Return the sort of a file of a run by its path in the run's directory.

    A part of a file, such as SQLite's `-wal`, and the file before it, such as `metrics.1.jsonl`, are of its
    sort. The files of a shard are told apart by what they begin with: `replay/segment`, `replay/retired`.
    """
    first, *below = path.parts
    if first == "replay" and len(below) > 1:
        return f"replay/{_stem(below[1])}"
    if first == "bus" and below:
        return f"bus/{_stem(below[0])}"
    return first if below else _stem(first)


def _stem(name: str) -> str:
    found = re.match(r"[A-Za-z]+", name.lstrip("."))
    return found[0] if found else name


def _files(directory: str) -> Iterator[tuple[str, int]]:
    """Yield path and size of each file below; what vanishes meanwhile is left out."""
    below: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                if entry.is_dir(follow_symlinks=False):
                    below.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False).st_size
    for path in below:
        yield from _files(path)


def sample_bus(port: int) -> dict[str, float]:
    """Return what nats-server says of its clients and of each stream; nothing while it does not answer."""
    try:
        server = _asked(port, "varz")
        streams = _asked(port, "jsz?accounts=true&streams=true&consumers=true")
    except (OSError, HTTPException, ValueError):  # it is being restarted
        return {}
    values = {
        "nats connections": float(server["connections"]),
        "nats subscriptions": float(server["subscriptions"]),
        "nats slow consumers": float(server.get("slow_consumers", 0)),
        "nats streams": float(streams.get("streams", 0)),
        "nats consumers": float(streams.get("consumers", 0)),
        "nats store bytes": float(streams.get("storage", 0)),
    }
    return values | dict(_of_streams(streams.get("account_details", [])))


def _asked(port: int, what: str) -> Any:
    with urlopen(f"http://{HTTP_HOST}:{port}/{what}", timeout=HTTP_TIMEOUT_S) as answer:
        return json.load(answer)


def _of_streams(accounts: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    for account in accounts:
        for stream in account.get("stream_detail", ()):
            name = "keys" if stream["name"].startswith("KV_") else stream["name"].rpartition("-")[2]
            yield f"nats {name} messages", float(stream["state"]["messages"])
            yield f"nats {name} bytes", float(stream["state"]["bytes"])
            consumers = stream.get("consumer_detail") or ()
            pending = sum(one.get("num_ack_pending", 0) + one.get("num_pending", 0) for one in consumers)
            pulls = sum(one.get("num_waiting", 0) for one in consumers)
            yield f"nats {name} unacked messages", float(pending)
            yield f"nats {name} waiting pulls", float(pulls)
