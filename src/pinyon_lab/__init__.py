"""The laboratory: traces, replay, caches replayed, a simulator, and each paper's figures.

It runs the modules that production runs (``pinyon``), which never import it."""
