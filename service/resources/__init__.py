"""What the process may use of its machine: memory, cores, open files, and the memory of requests."""
