"""`python -m launch` is the `launch` command."""

from launch.cli.main import main

main()
