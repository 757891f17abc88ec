"""The processes of the suite; each one is a package here."""
