"""The tests in ``inside`` run in the guest only, where ``test_rdma_guest.py`` starts them."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("PINYON_RDMA_GUEST") == "1" else ["inside"]
