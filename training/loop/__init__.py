"""The training loop: steps, schedule, journal, saved runs, and what is wrapped around a network."""
