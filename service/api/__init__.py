"""HTTP: one file per dialect, and the application that joins them."""
