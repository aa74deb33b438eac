"""The training loop: steps, schedule, journal, saved runs, and changes to a network for training."""
