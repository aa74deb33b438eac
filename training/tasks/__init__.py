"""Tasks trained on labelled examples: their data, their losses and their figures."""
