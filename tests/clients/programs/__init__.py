"""One program per client. Each runs in an environment of its own and imports nothing of this package.

A program reads jobs from its standard input, does them at the same time, each in a session of its own, and prints a
line of JSON for each: what it received.
"""
