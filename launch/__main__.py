"""The `launch` command; `python -m launch` is the same."""

import sys

from launch.process.own_packages import search_own_packages_first


def main() -> None:
    """Run the command that the process's arguments name."""
    search_own_packages_first()
    try:
        from launch.cli.main import main as run_command  # not before: a user's bus.py would be taken for ours

        run_command()
    except KeyboardInterrupt:  # before the process has its own way to stop
        sys.exit(130)


if __name__ == "__main__":
    main()
