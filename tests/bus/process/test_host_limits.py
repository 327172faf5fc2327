"""Limits of cores and memory, and the kernel's counts of killed processes, from files like a kernel's."""

import os
from pathlib import Path

import psutil
import pytest

from bus.process import host_limits
from bus.process.host_limits import MemoryKills, cpu_threads, memory_bytes, usable_cores

V2 = "sys/fs/cgroup/cgroup.controllers"
KERNELS = {
    "cgroup v2": ("0::/run", "", "run", "memory.events", "memory.max"),
    "container": ("0::/elsewhere", "", "", "memory.events", "memory.max"),
    "cgroup v1": (
        "4:memory:/run\n3:cpu,cpuacct:/run",
        "memory",
        "run",
        "memory.oom_control",
        "memory.limit_in_bytes",
    ),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, str, str]:
    lines, kind, group, counter, limit = KERNELS[request.param]
    directory = tmp_path / "sys/fs/cgroup" / kind / group
    cpu = tmp_path / "sys/fs/cgroup" / ("cpu" if kind else "") / group
    for file, text in {
        tmp_path / "proc/self/cgroup": f"5:pids:/\n{lines}\n",
        tmp_path / "proc/vmstat": "pgfault 12\noom_kill 7\n",
        directory / counter: "under_oom 0\noom_kill 3\n",
        directory / limit: f"{1 << 30}\n",
        **(
            {cpu / "cpu.cfs_quota_us": "150000", cpu / "cpu.cfs_period_us": "100000"}
            if kind
            else {cpu / "cpu.max": "150000 100000\n", tmp_path / V2: "cpu memory\n"}
        ),
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path, directory, counter, limit


def test_a_kill_by_the_kernel_for_memory_is_told_from_others(kernel):
    root, group, counter, _ = kernel
    kills = MemoryKills(root)
    assert kills.ending(-9, "lower it") == "signal SIGKILL"  # somebody else's
    (root / "proc/vmstat").write_text("oom_kill 8\n")
    said = kills.ending(-9, "lower it")
    assert "killed a process of this host for lack of memory: lower it, or give" in said
    (group / counter).write_text("oom_kill 4\n")
    assert "killed it for lack of memory: give it more" in kills.ending(-9)
    assert kills.ending(-15) == "signal SIGTERM"
    assert kills.ending(3) == "status 3"
    assert MemoryKills(root).ending(-9) == "signal SIGKILL"  # it began after that one


def test_the_limits_of_a_cgroup_bound_memory_and_cores(kernel):
    root, group, _, limit = kernel
    assert memory_bytes(root) == 1 << 30
    assert usable_cores(root) == 1  # of 1.5
    (group / limit).write_text("max\n" if limit == "memory.max" else f"{(1 << 63) - 4096}\n")
    assert memory_bytes(root) == psutil.virtual_memory().total


def test_without_files_of_the_kernel_the_limits_are_those_of_the_host(tmp_path: Path):
    assert MemoryKills(tmp_path).ending(-9, "lower it") == "signal SIGKILL"
    assert memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_a_large_model_is_computed_by_all_cores_which_processes_share(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_limits, "usable_cores", lambda: 8)
    large = host_limits.LEAST_BYTES
    assert [cpu_threads(None, large), cpu_threads(None, large, processes=4)] == [8, 2]
    assert cpu_threads(None, large, processes=16) == 1
    assert cpu_threads(None, large - 1) == 1
    assert cpu_threads(3, large) == cpu_threads(3, 0) == 3
