"""Data sets, and vocabularies learned from them."""
