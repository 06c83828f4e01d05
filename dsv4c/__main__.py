"""``python -m dsv4c`` is ``dsv4c``."""

from dsv4c.cli.main import main

main()
