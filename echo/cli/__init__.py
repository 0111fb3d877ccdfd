"""The command line: the front, the parsers, signals and output; `commands` has the commands.

In a process that was started to run a command, Ctrl-C is handled before any slow import. Such a
process is recognized by sys.argv[0]. With `python -m` this is "-m" while Python locates the module.
With an installed script it is the path of the script.
"""

import sys

from echo.cli import interrupts

if sys.argv[:1] == ["-m"] or sys.argv[0].rpartition("/")[2].startswith("echo-"):
    interrupts.install()
