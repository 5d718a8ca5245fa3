"""One-pass gradient statistics and their backends."""
