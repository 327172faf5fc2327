"""This host: its GPUs, disk, ports, limits and environment variables."""

import os
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bus.errors import nearest
from bus.server.nats_server import free_port, port_problem
from launch.doctor.findings import Finding, FindingLevel, brief
from launch.settings.environment_variables import KNOWN_VARIABLES
from launch.settings.run_config import PARTS, RunConfig

LITTLE_BYTES, TOO_LITTLE_BYTES = 10 << 30, 1 << 30
"""Free space of a disk from which a warning and an error is due."""
SLOW_FSYNC_S = 0.02
"""Median time of an fsync from which a warning is due: storage waits for several with each group."""
FSYNCS = 20
FEW_FILES = 4096
"""Open files that a process may have, below which a warning is due: each engine and actor takes some."""
PREFIX = "SLUICE_"


def check_gpu(config: RunConfig) -> Iterator[Finding]:
    """Tell which GPUs torch sees. Loads torch, which takes seconds."""
    try:
        import torch
    except (ImportError, OSError) as error:  # such as a shared library that is not there
        yield Finding(
            "gpu", "error", f"torch does not load: {brief(error)}",
            "install torch again, for this host: https://pytorch.org/get-started/locally",
        )  # fmt: skip
        return
    driver = shutil.which("nvidia-smi") is not None
    if torch.cuda.is_available():
        yield _gpus()
    elif driver and torch.version.cuda is None:
        yield Finding(
            "gpu", "warning", f"torch {torch.__version__} is for the CPU, and this host has an NVIDIA GPU",
            "install torch for CUDA: https://pytorch.org/get-started/locally",
        )  # fmt: skip
    elif driver:
        yield Finding(
            "gpu", "warning", f"torch {torch.__version__} for CUDA {torch.version.cuda} sees no GPU",
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES; the driver may be older than this CUDA",
        )  # fmt: skip
    elif not config.actors.engine.in_process:
        yield Finding(
            "gpu", "warning", "none, and actors.engine.type is sglang",
            "an SGLang server on the CPU needs a build of its own: see docs/engines.md",
        )  # fmt: skip
    else:
        yield Finding("gpu", "ok", f"none: torch {torch.__version__} uses the CPU")


def _gpus() -> Finding:
    """Tell the names of the GPUs, and the memory of the first."""
    import torch

    try:
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        free, total = torch.cuda.mem_get_info(0)
    except RuntimeError as error:  # CUDA's own: another process has all memory, or the driver is broken
        return Finding(
            "gpu", "error", f"torch sees GPUs that it cannot use: {brief(error)}",
            "look at nvidia-smi: end the process that has the GPU, or choose another by CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    memory = f"{free / 2**30:.0f} of {total / 2**30:.0f} GiB free on the first"
    level: FindingLevel = "ok" if free > total / 2 else "warning"
    remedy = "" if level == "ok" else "another process has most of it: nvidia-smi names it"
    return Finding("gpu", level, f"{len(names)}: {', '.join(dict.fromkeys(names))}, {memory}", remedy)


def check_disk(directory: Path) -> Iterator[Finding]:
    """Tell the free space where runs lie, and how long the disk takes to keep something. Leaves nothing."""
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    level: FindingLevel = "error" if free < TOO_LITTLE_BYTES else "warning" if free < LITTLE_BYTES else "ok"
    remedy = "" if level == "ok" else "free some, or choose another --directory: a full disk stops the bus"
    yield Finding("disk", level, f"{free / 2**30:.1f} GiB free in {there}", remedy)
    try:
        fsync_s = _fsync_s(there)
    except OSError as error:
        yield Finding(
            "disk", "error", f"{there} cannot be written: {error.strerror}",
            "choose another --directory, or change its owner or mode",
        )  # fmt: skip
        return
    slow = fsync_s > SLOW_FSYNC_S
    yield Finding(
        "fsync", "warning" if slow else "ok", f"{1000 * fsync_s:.2g} ms in {there}, median of {FSYNCS}",
        "put --directory on a local SSD: every stored group waits for this" if slow else "",
    )  # fmt: skip


def _fsync_s(directory: Path) -> float:
    """Return the median time in seconds that the disk takes to keep a page."""
    times = []
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tmp-doctor-") as file:
        for _ in range(FSYNCS):
            file.write(bytes(4096))
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def check_ports(config: RunConfig) -> Iterator[Finding]:
    wanted = dict(_ports(config))
    taken = []
    for what, (host, port) in wanted.items():
        if reason := port_problem(host, port):
            taken.append(what)
            yield Finding(
                "ports",
                "error",
                f"{what} {host}:{port}: {reason}",
                f"stop what uses it, or set another {what.partition(' ')[0]}",
            )
    free = ", ".join(f"{what} {port}" for what, (_, port) in wanted.items() if what not in taken)
    if free:
        yield Finding("ports", "ok", f"free: {free}")
    elif not wanted:
        yield Finding("ports", "ok", f"the settings name none; free for a bus: {free_port('127.0.0.1')}")


def _ports(config: RunConfig) -> Iterator[tuple[str, tuple[str, int]]]:
    monitoring, gateway = config.monitoring, config.actors.environment.public_gateway
    if monitoring.port:
        for offset, part in enumerate(PARTS):
            yield f"monitoring.port of {part}", (monitoring.host, monitoring.port + offset)
    if monitoring.nats_port:
        yield "monitoring.nats_port", ("127.0.0.1", monitoring.nats_port)
    if gateway is not None and gateway.port:
        yield "gateway.port", (gateway.host, gateway.port)


def check_limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} at most for each process"
    if soft == resource.RLIM_INFINITY or soft >= FEW_FILES:
        yield Finding("open files", "ok", found)
    elif hard == resource.RLIM_INFINITY or hard >= FEW_FILES:
        wanted = FEW_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)
        yield Finding("open files", "warning", found, f"ulimit -n {wanted} before a start")
    else:
        allow = f"allow {FEW_FILES} before a start: a container by --ulimit nofile, a service by LimitNOFILE"
        yield Finding("open files", "warning", f"{found}, and it may not ask for more than {hard}", allow)


def check_variables() -> Iterator[Finding]:
    """Tell which variables of ours are set, and which are not ours although they look so."""
    named = sorted(name for name in os.environ if name.startswith(PREFIX))
    known = [name for name in named if name in KNOWN_VARIABLES]
    yield Finding("variables", "ok", f"set: {', '.join(known)}" if known else f"no {PREFIX}... is set")
    for name in named:
        if name not in KNOWN_VARIABLES:
            hint = nearest(name, KNOWN_VARIABLES) or f"there are: {', '.join(KNOWN_VARIABLES)}"
            yield Finding("variables", "warning", f"{name} means nothing here", hint.strip())
