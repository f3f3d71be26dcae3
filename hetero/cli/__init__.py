"""The command line: thin shells over the library, one module a command.

Nothing below imports this. Commands print and write files; they decide nothing that the library does not.
"""

from hetero.cli.app import app, main

__all__ = ["app", "main"]
