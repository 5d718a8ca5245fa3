"""The log: Arrow streams and TensorBoard events on disk."""
