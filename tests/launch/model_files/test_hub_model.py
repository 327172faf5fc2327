"""Tests models named as on the Hugging Face hub, with its client and a server that speaks its API."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from launch.model_files.hub_model import is_hub_name
from tests.hub_server import COMMIT, NEWER, Repo, serving

NAME = "org/tiny"
FILES = {
    "config.json": b'{"max_position_embeddings": 64}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "original/consolidated.safetensors": b"the same in another format",
    "consolidated.00.safetensors": b"the same in another format",
    "README.md": b"# tiny",
}


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    with serving(Repo(NAME, FILES)) as server:
        yield server


def asked(expression: str, home: Path, port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    """Evaluate an expression in a process of its own, since the hub's client reads its address on import."""
    program = f"""
from pathlib import Path
from launch.model_files.hub_revision import pin, pinned
from launch.model_files.model_directory import model_directory, model_here
from storage.disk.run_directory import RunDirectory
RUN = RunDirectory(Path({str(home)!r}), "run")
print({expression})
"""
    own = {"HF_HOME": str(home), "HF_ENDPOINT": f"http://127.0.0.1:{port}", **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=os.environ | own, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_a_model_is_fetched_once_and_then_found_without_the_hub(hub: ThreadingHTTPServer, tmp_path: Path):
    there, gone = hub.server_port, 1
    for name in (NAME, "models/no--name"):
        before = asked(f"model_here(Path('{name}'), RUN)", tmp_path, there)
        assert before.stdout.strip() == "None", before.stderr
    fetched = asked(f"model_directory(Path('{NAME}@main'))", tmp_path, there)
    directory = Path(fetched.stdout.strip())
    assert directory.name == COMMIT, fetched.stderr
    wanted = {name for name in FILES if "consolidated" not in name and not name.endswith(".md")}
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert found == wanted
    for expression in (f"model_directory(Path('{NAME}'))", f"model_here(Path('{NAME}'), RUN)"):
        again = asked(expression, tmp_path, gone)
        assert again.stdout.strip() == str(directory), again.stderr


@pytest.mark.slow
def test_a_run_goes_on_with_the_commit_that_it_began_with(hub: ThreadingHTTPServer, tmp_path: Path):
    there, gone, newer = hub.server_port, 1, NEWER
    began = asked(f"model_directory(pin(Path('{NAME}'), RUN)).name", tmp_path, there)
    assert began.stdout.splitlines()[-1] == COMMIT, began.stderr
    assert "model_pinned" in began.stdout
    hub.newest = newer
    moved = asked(f"model_directory(Path('{NAME}')).name", tmp_path, there)
    assert moved.stdout.strip() == newer, moved.stderr
    again = asked(f"model_directory(pin(Path('{NAME}'), RUN)).name", tmp_path, there)
    assert again.stdout.splitlines()[-1] == COMMIT, again.stderr
    assert re.search(f"model_has_changed.*{COMMIT}.*{newer}", again.stdout)
    for expression in (
        "model_directory(pin(PATH, RUN)).name",
        "model_here(PATH, RUN).name",
        "pinned(PATH, RUN)",
    ):
        alone = asked(expression.replace("PATH", f"Path('{NAME}')"), tmp_path, gone)
        assert alone.stdout.splitlines()[-1] in (COMMIT, f"{NAME}@{COMMIT}"), alone.stderr
    other = asked(f"pinned(Path('{NAME}@v2'), RUN)", tmp_path, gone)
    assert other.stdout.strip() == f"{NAME}@v2", "another name was asked for"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_that_begins_without_the_hub_notes_the_files_that_are_here(
    hub: ThreadingHTTPServer, tmp_path: Path
):
    nothing = asked(f"pin(Path('{NAME}'), RUN)", tmp_path, 1)
    assert nothing.stdout.splitlines()[-1] == NAME, nothing.stderr
    asked(f"model_directory(Path('{NAME}'))", tmp_path, hub.server_port)
    found = asked(f"pin(Path('{NAME}'), RUN)", tmp_path, 1)
    assert found.stdout.splitlines()[-1] == f"{NAME}@{COMMIT}", found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "environment", "reason"),
    [("org/none", {}, "404"), (NAME, {"HF_HUB_OFFLINE": "1"}, "outgoing traffic has been disabled")],
)
def test_a_model_that_the_hub_does_not_give_is_an_error_with_its_remedy(
    name: str, environment: dict[str, str], reason: str, hub: ThreadingHTTPServer, tmp_path: Path
):
    failed = asked(f"model_directory(Path('{name}'))", tmp_path, hub.server_port, **environment)
    said = failed.stderr.splitlines()[-1]
    assert said.startswith(f"bus.errors.ConfigError: model.path: {name} is no directory here"), failed.stderr
    assert reason in said
    assert said.endswith("(a gated model needs HF_TOKEN)")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Qwen/Qwen3-0.6B", True), ("Qwen/Qwen3-0.6B@refs/pr/1", True), ("my-model", False),
        ("/models/qwen", False), ("../models/qwen", False), ("runs/2026/model", False),
    ],
)  # fmt: skip
def test_only_a_path_of_two_parts_may_be_a_name(text: str, named: bool):
    assert is_hub_name(Path(text)) == named


def test_a_directory_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "Qwen" / "Qwen3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name(Path("Qwen/Qwen3"))
