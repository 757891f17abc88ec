"""Which region or replica takes a request: prefix trie, hash rings, selective pushing."""
