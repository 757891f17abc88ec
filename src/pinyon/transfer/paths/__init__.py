"""Which ways lead to a peer, and which one each piece of a transfer takes."""
