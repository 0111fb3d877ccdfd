"""The commands of `echo-rl`, one module each. The module's function `main` runs the command."""
