"""The servers. Each runs in an environment of its own, and prints the URL of its endpoint."""
