"""The shm transport: copies between processes of one host."""
