"""Replicas of engines behind one address: the replica set, routing, and the connections between processes."""
