"""The record of a step: plain data, no torch."""
