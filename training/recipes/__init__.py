"""Recipes: TOML files that say what is trained on what, and the commands that follow them."""
