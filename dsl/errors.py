"""The error that all others are: apart from diagnostics, as a call without a mistake needs none of those."""

from __future__ import annotations


class KgenError(Exception):
    """Base of every error that is the user's to see. Its text is complete: no traceback is needed to act on it."""
