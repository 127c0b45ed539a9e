# Generated from ../_async by tools/unasync.py; do not edit.
"""The synchronous SDK, generated from `_sync` by tools/unasync.py."""
