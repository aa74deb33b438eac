"""Routes for operators: health, metrics, administration, and the pages for people."""
