"""The edges that move bytes. Each transport runs chains (:mod:`.base`) and is driven by ``TransferEngine`` only."""
