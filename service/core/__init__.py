"""Values that all rooms share: errors, requests and events of the engine, descriptions of models, limits."""
