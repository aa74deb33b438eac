"""What makes a checkpoint: data, objectives, one training loop, recipes."""
