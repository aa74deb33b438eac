"""The HTTP dialects.  Each folder has the wire objects, routes and writers of one API."""
