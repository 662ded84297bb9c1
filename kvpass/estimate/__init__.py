"""What caches hold, and how fast a step can be, from a config alone."""
