"""HTTP in, control call, HTTP out; operations on a sandbox are passed through to its edge."""
