"""The version of kvpass."""

VERSION = "0.1.0"
