"""Small scripts that run inside a peer's own environment; benchmarks/peers.py starts them and compares results."""
