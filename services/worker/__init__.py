"""An engine instance process: engine loop, prefill, decode, KV streaming."""
