"""One module per command.

Where one of them is being started, which Python tells by "-m" while it locates the module and an
installed script by its name, Ctrl-C is handled before anything heavy is imported.
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
