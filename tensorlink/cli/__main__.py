"""`python -m tensorlink.cli`."""

from tensorlink.cli import main

main()
