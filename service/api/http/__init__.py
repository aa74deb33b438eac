"""HTTP/1.1 on a socket: heads, bodies, connections and their limits."""
