"""The paths to a peer, and the choice of one for each piece of a transfer."""
