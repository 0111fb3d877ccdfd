"""The commands of `echo-rl`, one module each: its `main` gets the command line after the name."""
