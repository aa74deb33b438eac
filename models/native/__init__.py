"""The native executor: a network as one compiled call a step, on a CPU."""
