"""DSec: sandboxes for AI agents. The names here are the SDK (libdsec)."""
