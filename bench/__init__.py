"""Benchmarks of hlo_memopt on real training steps; see README.md in this folder."""
