"""Settings: their definitions and types, the flags, the YAML file, and the keys of clients."""
