"""Append-only record of what happened in a sandbox. Empty until it is built."""
