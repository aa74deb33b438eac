"""Makes the site: pages written from the code, links that lead out of docs/, and a check that runs all commands."""
