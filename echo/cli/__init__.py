"""One module per command.

In a process that was started to run a command, Ctrl-C is handled before any slow import. Such a
process is recognized by sys.argv[0]: it is "-m", which Python sets while it locates the module, or
the name of an installed script.
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
