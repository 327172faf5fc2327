"""A host narrows which modules a run may import."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.errors import ConfigError
from bus.process import plugins
from bus.process.plugins import ImportPolicy, load_function, restrict_imports

REWARD = "def reward(answer): return 1.0\n"
RAN = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()\n"


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The one directory that modules may lie in; the working directory beside it has others."""
    directory, elsewhere = tmp_path / "allowed", tmp_path / "elsewhere"
    directory.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(plugins, "_policy", ImportPolicy())
    before = set(sys.modules)
    restrict_imports(ImportPolicy((directory,)))
    yield directory
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_module_and_package_of_the_directory_are_imported(allowed: Path):
    (allowed / "plain_plugin.py").write_text(REWARD)
    (allowed / "packed_plugin/inner").mkdir(parents=True)
    (allowed / "packed_plugin/__init__.py").write_text("")
    (allowed / "packed_plugin/inner/module.py").write_text(REWARD)  # inner has no __init__.py
    for name in ("plain_plugin:reward", "packed_plugin.inner.module:reward"):
        assert load_function("reward", name, {})("x") == 1.0


def test_built_in_function_needs_no_directory(allowed: Path):
    assert load_function("reward", "length", {"length": len}) is len


@pytest.mark.parametrize(
    "name",
    ["subprocess:run", "os:system", "builtins:exec", "sys:exit", "__main__:main",
     "bus.process.child_process:module_command", "nowhere_at_all:reward",
     "..outside:reward", "../elsewhere/outside:reward", ":reward", "a..b:reward"],
)  # fmt: skip
def test_nothing_else_is_imported(allowed: Path, name: str):
    with pytest.raises(ConfigError, match=r"this host allows a run only what lies in|is no name of a module"):
        load_function("reward", name, {})


def test_module_of_the_working_directory_is_not_run_and_is_named_with_its_place(allowed: Path):
    outside = Path.cwd() / "outside_plugin.py"
    outside.write_text(RAN + REWARD)
    sys.path.append(str(Path.cwd()))
    with pytest.raises(ConfigError, match=rf"'outside_plugin' lies in {outside}, .*with --plugins-from"):
        load_function("reward", "outside_plugin:reward", {})
    assert not outside.with_suffix(".ran").exists()


@pytest.mark.parametrize("kind", ["file", "package", "part of a package", "namespace"])
def test_links_do_not_lead_out_of_the_directory(allowed: Path, kind: str):
    outside = Path.cwd() / "target"
    outside.mkdir()
    (outside / "linked.py").write_text(RAN + REWARD)
    name = "linked"
    if kind == "file":
        (allowed / "linked.py").symlink_to(outside / "linked.py")
    else:
        name = "pack.linked"
        if kind == "part of a package":
            (allowed / "pack").mkdir()
            (allowed / "pack/__init__.py").write_text("")
            (allowed / "pack/linked.py").symlink_to(outside / "linked.py")
        else:
            if kind == "package":
                (outside / "__init__.py").write_text(RAN)
            (allowed / "pack").symlink_to(outside)
    with pytest.raises(ConfigError, match="this host allows a run only"):
        load_function("reward", f"{name}:reward", {})
    assert not list(outside.glob("*.ran"))


def test_directory_that_is_a_link_itself_is_followed(allowed: Path):
    (allowed / "plain_plugin.py").write_text(REWARD)
    link = allowed.parent / "link"
    link.symlink_to(allowed)
    restrict_imports(ImportPolicy((link / "../link",)))
    assert load_function("reward", "plain_plugin:reward", {})("x") == 1.0


def test_module_of_the_same_name_elsewhere_is_not_taken_for_that_of_the_directory(allowed: Path):
    (allowed / "json.py").write_text("def loads(text): return 1.0\n")
    with pytest.raises(ConfigError, match="'json' lies in "):
        load_function("reward", "json:loads", {})


def test_function_that_a_module_only_imported_is_refused(allowed: Path):
    (allowed / "plain_plugin.py").write_text(
        "from subprocess import run\nfrom functools import partial\nbound = partial(run)\n" + REWARD
    )
    for name in ("run", "bound"):
        with pytest.raises(ConfigError, match="which this host allows no run"):
            load_function("reward", f"plain_plugin:{name}", {})


@pytest.mark.parametrize(
    ("code", "error"), [("1 / 0", "ZeroDivisionError"), ("import sys; sys.exit(0)", "SystemExit")]
)
def test_module_that_fails_is_named(allowed: Path, code: str, error: str):
    (allowed / "broken_plugin.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"importing 'broken_plugin' failed: {error}"):
        load_function("reward", "broken_plugin:reward", {})
