"""The control plane process: membership, cache events, placement and admission."""
