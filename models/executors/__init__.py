"""Executors of a step: the contract, its checks, and the one of torch."""
