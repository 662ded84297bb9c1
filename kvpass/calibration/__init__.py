"""Plans from texts: what the cached keys and values of a model look like decides how they are
stored."""
