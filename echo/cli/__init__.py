"""One module per command.

When a command is being started, Ctrl-C is handled before anything heavy is imported. Python shows
that by "-m" while it locates the module, an installed script by its name.
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
