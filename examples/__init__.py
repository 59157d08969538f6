"""Programs and code to copy; not part of the package."""
