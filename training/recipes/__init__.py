"""Recipes: TOML files that describe a training run, and the commands that run them."""
