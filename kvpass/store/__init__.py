"""Caches in files, without pickle: one by one, or a folder of prefixes that processes share."""
