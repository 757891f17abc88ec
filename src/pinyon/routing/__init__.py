"""The load balancer's own decisions: who waits and who goes on, and which instances when no conductor answers."""
