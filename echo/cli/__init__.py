"""The command line of `echo-rl`: parsers, signal handling and output.

A process that runs a command handles Ctrl-C before any slow import. sys.argv[0] identifies such a
process. Under `python -m`, sys.argv[0] is "-m" while Python locates the module. Under an installed
script, sys.argv[0] is the script's path.
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
