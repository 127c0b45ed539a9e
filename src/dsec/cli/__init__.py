"""The `dsec` command, a user of the platform: sees the SDK only."""
