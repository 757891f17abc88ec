"""Pure values that all rooms of the engine share: requests, segments, paths, bounds, errors."""
