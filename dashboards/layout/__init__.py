"""The page: what stands where."""
