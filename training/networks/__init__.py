"""Networks that a recipe can name, and the base models it can continue from."""
