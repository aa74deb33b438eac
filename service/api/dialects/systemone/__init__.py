"""TypeSafe's decisions: POST /v1/systemone."""
