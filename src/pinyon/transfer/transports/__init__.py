"""The transports: edges that move bytes. Each runs chains (:mod:`.base`) and is driven by ``TransferEngine`` only."""
