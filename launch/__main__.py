"""The `launch` command; `python -m launch` is the same."""

from launch.process.own_packages import search_own_packages_first


def main() -> None:
    """Run the command that the process's arguments name."""
    search_own_packages_first()
    from launch.cli.main import main as run_command  # not before: a user's bus.py would be imported for ours

    run_command()


if __name__ == "__main__":
    main()
