"""`python -m launch` is the `launch` command."""

from launch.cli import main

main()
