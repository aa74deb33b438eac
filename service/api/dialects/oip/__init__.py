"""The Open Inference Protocol, version 2, with its generate and repository extensions."""
