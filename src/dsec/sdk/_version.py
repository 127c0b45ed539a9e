"""The SDK's own version; a test compares it with pyproject.toml."""

VERSION = "0.1.0"
