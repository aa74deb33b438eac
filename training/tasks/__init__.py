"""Tasks that are learned from labelled examples: what is chosen, and how it is measured."""
