"""``python -m codistill``."""

from codistill.cli import main

main()
