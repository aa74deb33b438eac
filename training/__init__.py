"""Training: data, tasks and objectives, networks, the training loop, recipes and export."""
