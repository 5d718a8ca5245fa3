"""Pure functions on a `Run`: formats, ratios, what-if, replay, diagnosis."""
