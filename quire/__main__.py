"""`python -m quire` is the command `quire`."""

from quire.cli import main

main()
