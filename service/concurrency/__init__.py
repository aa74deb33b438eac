"""Work on threads, processes and the event loop: fair queues, bounded threads, results that cross threads."""
