"""What can hold a sandbox. Start at `interface.py`; everything above it is one code path."""
