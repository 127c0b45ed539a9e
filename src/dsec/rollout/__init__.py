"""A user of the platform: runs recorded or live agents on tasks in sandboxes and grades them."""
