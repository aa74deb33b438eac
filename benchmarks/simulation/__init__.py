"""Simulation of a fleet of replicas: the product's own scheduler, blocks and routing, with measured costs.

    python -m benchmarks.simulation                          the studies of docs/scaling.md
    python -m benchmarks.simulation --plots docs/scaling     figures of the latest results
    python -m benchmarks.simulation.measure                  the costs of a step on this machine
    python -m benchmarks.simulation.replay                   the same trace through real replicas, and simulated

Time, arithmetic and the network are simulated. The scheduling of steps, the allocation of blocks and the choice of
replicas are decided by the code that serves.
"""
