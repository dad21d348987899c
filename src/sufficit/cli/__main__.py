"""Run the command line with `python -m sufficit.cli`."""

from sufficit.cli import main

main()
