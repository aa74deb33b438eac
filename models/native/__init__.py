"""The same network as one compiled call a step, on a CPU."""
