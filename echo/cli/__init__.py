"""One module per command.

If this process starts a command, Ctrl-C is handled before any slow import. The process starts a
command if sys.argv[0] is "-m", which Python sets while it locates the module, or the name of an
installed script.
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
