"""Where a request runs: block index, cost model, admission, policies."""
