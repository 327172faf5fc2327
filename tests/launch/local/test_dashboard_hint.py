"""`launch local` tells how to look at its run in a browser."""

from pathlib import Path

from launch.local.local import dashboard_hint
from launch.settings.run_config import RunConfig


def test_the_command_names_the_run_and_where_it_lies():
    assert dashboard_hint(RunConfig(run="sort")).endswith(": launch dashboard --run sort")
    elsewhere = RunConfig(run="sort", directory=Path("/my runs"))
    assert dashboard_hint(elsewhere).endswith(": launch dashboard --run sort --directory '/my runs'")
