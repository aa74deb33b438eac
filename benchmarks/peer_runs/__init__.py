"""What runs inside a peer's own environment, a small script each; benchmarks/peers.py starts them and compares."""
