"""What each client that people use makes of broken connections and of refusals: `make clients`."""
