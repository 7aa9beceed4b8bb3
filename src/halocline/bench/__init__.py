"""Benchmarks: several ways to do one step, measured in turns in one run, so that only ratios matter."""
