"""Real servers, checked from outside: `make peers`."""
