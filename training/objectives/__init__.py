"""Objectives for networks trained from scratch: causal, masked, translation; and scores of translations."""
