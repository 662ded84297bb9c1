"""The only file that imports private PyTorch APIs (checked with torch 2.11 and 2.13)."""

from __future__ import annotations

from torch._dynamo.exc import ShortenTraceback as ShortenTraceback
