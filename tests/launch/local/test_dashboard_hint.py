"""`launch local` tells how to look at its run in a browser."""

from pathlib import Path

from launch.local.local import dashboard_hint
from launch.run_view.served_page import noted_page
from launch.settings.run_config import RunConfig


def test_a_page_that_is_served_is_named_until_it_ends(tmp_path: Path):
    config = RunConfig(run="sort", directory=tmp_path)
    first, second = (noted_page(tmp_path, f"http://127.0.0.1:{port}") for port in (8765, 9999))
    with first, second:  # the second one is not the one that is named
        assert dashboard_hint(config) == "The run in a browser: http://127.0.0.1:8765/#/runs/sort"
    assert dashboard_hint(config).startswith("To look at the run in a browser: launch dashboard --run sort")
    with noted_page(tmp_path / "none", "http://127.0.0.1:8765"):
        assert not (tmp_path / "none").exists()


def test_the_command_names_the_run_and_where_it_lies():
    assert dashboard_hint(RunConfig(run="sort")).endswith(": launch dashboard --run sort")
    elsewhere = RunConfig(run="sort", directory=Path("/my runs"))
    assert dashboard_hint(elsewhere).endswith(": launch dashboard --run sort --directory '/my runs'")
