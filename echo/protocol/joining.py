"""A node's way in: hello, the settings and files that it inherits, hashes compared, ready.

Model, tokenizer, chat template, stop ids, task source and dataset are compared by hash. A node that
brings none of them inherits the files from the learner (configuration and tokenizer, never code
and never weights) and is right by construction.

Whatever is inherited is signed by the learner, and checked before any of it is used: a relay that
forwards it may be anybody with the run's secret. Files have a name out of a fixed table.
"""

from __future__ import annotations

CODE = "task.code"
"""Among the inherited settings: hash and path of each module of the task on the learner."""
