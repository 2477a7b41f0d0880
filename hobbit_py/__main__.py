"""`python -m hobbit_py`: the command `hobbit`."""

from hobbit_py.cli import main

main()
