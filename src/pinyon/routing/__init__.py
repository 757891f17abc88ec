"""The load balancer's own decisions: which requests wait, and which instances serve them if no conductor answers."""
