"""Routes for operators: health, metrics, administration, and web pages."""
