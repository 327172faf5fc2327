"""`launch keys` exchanges the key of one role, and names what is wrong with its arguments."""

from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.security.credentials import load_credentials
from bus.server.secure_directory import SecureDirectory
from launch.cli.key_commands import revoke_command, rotate_command


@pytest.fixture
def secure(tmp_path: Path) -> SecureDirectory:
    made = SecureDirectory(tmp_path / "keys")
    made.make(["mine"], "nats://127.0.0.1:4222")
    return made


def test_role_gets_another_key_and_loses_the_one_before(
    secure: SecureDirectory, capsys: pytest.CaptureFixture[str]
):
    files = secure.files("mine")
    before = load_credentials(files.creds("judge")).seed
    rotate_command("judge", secure=secure.path, run_name="mine")
    newest = load_credentials(files.creds("judge")).seed
    assert newest != before
    assert len(files.keys.of("judge")) == 2
    revoke_command("judge", secure=secure.path, run_name="mine")
    assert load_credentials(files.creds("judge")).seed == newest
    assert len(files.keys.of("judge")) == 1
    assert "copy the file to the hosts of judge" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("role", "run", "message"),
    [
        ("jugde", "mine", "there is no role 'jugde': name one of operator, storage"),
        ("judge", "yours", "no credentials of run 'yours', but those of mine"),
    ],
)
def test_unknown_role_and_run_are_named(secure: SecureDirectory, role: str, run: str, message: str):
    with pytest.raises(ConfigError, match=message):
        rotate_command(role, secure=secure.path, run_name=run)
    with pytest.raises(ConfigError, match=message):
        revoke_command(role, secure=secure.path, run_name=run)


def test_directory_that_is_none_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--secure .*nowhere is no directory"):
        rotate_command("judge", secure=tmp_path / "nowhere")
