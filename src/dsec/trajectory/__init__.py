"""Append-only record of what happened in a sandbox: every operation that reached it, in order.

`format` is what a file looks like (spec/formats.md), `writer` adds to one, `reader` shows it as
`dsec.wire.sandbox.Recorded`, `index` finds an entry by its caller's id, `inherit` begins a child's
with its parent's, `diff` compares two, `export` turns them into JSON lines or Parquet.

It knows files and shapes: no sandboxes, no event loop. All that touches a file blocks.
"""
