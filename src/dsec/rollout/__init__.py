"""A user of the platform: runs recorded agents on tasks in sandboxes and grades what they leave.

May know the SDK, and nothing below it. Start with `tasks` (what a task is; the format's page is
docs/reference/task-format.md), then `outcomes` (what may come of a rollout), `rollout` (one rollout
from sandbox to reward), `suite` (many at once) and `report` (the numbers, pure). `sources` fetches
pinned source distributions, `grading` is uploaded into the verify sandbox and imports nothing of
this package, `display` and `demo` are for people.
"""
