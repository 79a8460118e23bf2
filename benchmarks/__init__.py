"""Side-by-side measurements of zeroexp and its peers on the same work. Run, never imported:
``python -m benchmarks --help``."""
