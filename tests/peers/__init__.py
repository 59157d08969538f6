"""Real servers, checked from outside: `make checked-servers`."""
