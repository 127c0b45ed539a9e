"""The asynchronous SDK, written by hand; `_sync` is generated from it by tools/unasync.py."""
