"""The host side of the Triton templates: support, sizes, launches, inspection."""
