"""Echo: reinforcement-learning post-training with one learner and many remote workers."""

__version__ = "0.1.0"
