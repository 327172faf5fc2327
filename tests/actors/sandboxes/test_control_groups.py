"""Control groups of version 2: how they are found, made, joined and removed, on a kernel's own mount of them.

Where the controllers of processors and memory belong to version 1, that of huge pages stands for them, and
the files of those two are like a kernel's."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from actors.episode_sandboxes.cpu_groups import _hold
from actors.programs.memory_groups import MemoryGroup, _most_taken
from actors.sandboxes import control_groups
from actors.sandboxes.control_groups import ControlGroup, ControlGroups
from bus.process.host_limits import own_groups

CONTROLLER = "hugetlb"
JOIN = "import os, sys; os.write(int(sys.argv[1]), b'0'); print(open('/proc/self/cgroup').read())"


def limited(group: Path) -> None:
    """Refuse a group that the controller does not bound."""
    if not [*group.glob(f"{CONTROLLER}.*.max")]:
        raise FileNotFoundError(f"{group} is not bounded")


def kernel(root: Path, groups: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this process be of these groups; return where their mount is to be."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "sys/fs").mkdir(parents=True)
    monkeypatch.setattr(control_groups, "own_groups", partial(own_groups, root=root))
    return root / "sys/fs/cgroup"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A group of this process's on a real mount of version 2, below its first one."""
    mounts = [Path(one.mountpoint) for one in psutil.disk_partitions(all=True) if one.fstype == "cgroup2"]
    if not mounts or CONTROLLER not in (mounts[0] / "cgroup.controllers").read_text().split():
        pytest.skip(f"needs cgroup2 with the controller {CONTROLLER}")
    group, passed_on = mounts[0] / f"sluice-test-{os.getpid()}", mounts[0] / "cgroup.subtree_control"
    before = passed_on.read_text().split()
    try:
        passed_on.write_text(f"+{CONTROLLER}")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs control groups that this user may make: {error}")
    place = kernel(tmp_path, f"0::/{group.name}\n", monkeypatch)
    place.symlink_to(mounts[0])
    yield place / group.name
    group.rmdir()
    if CONTROLLER not in before:
        passed_on.write_text(f"-{CONTROLLER}")


@pytest.mark.parametrize("holds_a_process", [False, True])
def test_groups_are_made_below_ones_own_or_beside_it_where_it_holds_processes(own: Path, holds_a_process):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as holder:
        if holds_a_process:
            (own / "cgroup.procs").write_text(str(holder.pid))
        group = ControlGroups.found(CONTROLLER, limited).made(limited)
        assert group.path.parent == (own.parent if holds_a_process else own)
        with group.joining() as joining:
            joined = subprocess.run(
                [sys.executable, "-S", "-c", JOIN, str(joining.fileno())],
                pass_fds=[joining.fileno()], capture_output=True, text=True, check=True, timeout=20,
            )  # fmt: skip
        assert f"0::/{group.path.relative_to(own.parent)}\n" in joined.stdout
        group.remove()
        assert not group.path.exists()
        holder.communicate()


def test_a_group_that_holds_a_process_is_left_to_the_next_actor(own: Path):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as holder:
        (own / "cgroup.procs").write_text(str(holder.pid))
        ControlGroup(own).remove()
        assert own.exists()
        holder.communicate()


def test_the_first_group_of_a_container_is_all_that_it_may_change(monkeypatch, tmp_path):
    mount = kernel(tmp_path, "0::/\n", monkeypatch)
    mount.mkdir()
    assert [*control_groups._candidates("memory")] == [], "this directory is no mount of groups"
    (mount / "cgroup.controllers").write_text("cpu memory\n")
    assert [*control_groups._candidates("memory")] == [mount]
    assert (mount / "cgroup.subtree_control").read_text() == "+memory"


def test_limits_and_counts_of_version_2_have_its_files(tmp_path):
    for name, text in {
        "cgroup.controllers": "cpu memory\n",
        "cpu.max": "max 100000\n",
        "memory.peak": "5000\n",
        "memory.events": "low 0\nhigh 0\nmax 0\noom 1\noom_kill 1\noom_group_kill 0\n",
    }.items():
        (tmp_path / name).write_text(text)
    _hold(tmp_path, cpus=1.5)
    assert (tmp_path / "cpu.max").read_text() == "150000 100000"
    shares = {share: MemoryGroup(ControlGroup(tmp_path), share).was_short() for share in (4999, 5000)}
    assert shares == {4999: False, 5000: True}
    (tmp_path / "memory.events").write_text("oom 1\noom_kill 0\n")
    assert not MemoryGroup(ControlGroup(tmp_path), 5000).was_short()
    (tmp_path / "memory.peak").unlink()
    with pytest.raises(FileNotFoundError, match=r"no memory\.peak.*Linux 5\.19"):
        _most_taken(tmp_path)
