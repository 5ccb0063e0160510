"""`python -m masflow` is the command `masflow`."""

from masflow.cli import main

main()
