"""Side-by-side measurements. ``python -m bench`` runs all, ``python -m bench NAME`` one; see docs/use/benchmarks.md."""
