"""Side-by-side measurements. ``python -m bench`` runs all, ``python -m bench NAME`` one. See docs/use/benchmarks.md.
