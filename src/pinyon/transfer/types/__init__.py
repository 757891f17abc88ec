"""What all rooms of the engine speak of: requests, segments, paths, bounds, errors. Pure values."""
