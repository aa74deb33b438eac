"""A fleet of replicas simulated: the product's own scheduler, blocks and routing, driven by measured costs.

    python -m benchmarks.simulation                          the studies of docs/scaling.md
    python -m benchmarks.simulation --plots docs/scaling     what they found last, drawn
    python -m benchmarks.simulation.measure                  what a step costs on this machine
    python -m benchmarks.simulation.replay                   the same trace through real replicas, and simulated

Simulated are time, arithmetic and the network; who computes what, who holds which block and who is chosen are decided
by the code that serves.
"""
