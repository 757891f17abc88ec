"""The books of a paged KV pool: which block holds which key, who holds blocks, who reads them, and until when."""

from pinyon.paging.block_pool import BlockPool
from pinyon.paging.key_changes import KeyChanges
from pinyon.paging.leases import LeaseTable
from pinyon.paging.reservations import Reservation, Reservations
from pinyon.paging.second_tier import SecondTier, Swap

__all__ = ["BlockPool", "KeyChanges", "LeaseTable", "Reservation", "Reservations", "SecondTier", "Swap"]
