"""The HTTP dialects, a folder for each: its wire objects, its routes, and how it writes answers."""
