"""The command line of `echo-rl`: parsers, signal handling and output.

In a process that runs a command, the import of this package installs the signal handlers, before
any slow import. In other programs the import changes no handlers. sys.argv[0] identifies a process
that runs a command. Under `python -m`, it is "-m" while Python locates the module. Under an
installed script, it is the script's path, and the script's name begins with "echo-".
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
