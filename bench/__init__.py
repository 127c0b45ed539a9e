"""Benchmarks: each compares sides interleaved in one run, because the machines are noisy."""
