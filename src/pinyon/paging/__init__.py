"""Which block of a paged pool holds which key, and who reads it until when."""

from pinyon.paging.block_pool import BlockPool
from pinyon.paging.key_changes import KeyChanges
from pinyon.paging.leases import LeaseTable

__all__ = ["BlockPool", "KeyChanges", "LeaseTable"]
