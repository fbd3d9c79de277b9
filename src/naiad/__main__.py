"""`python -m naiad`: the command `naiad`."""

from naiad.cli import main

main()
