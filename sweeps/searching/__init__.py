"""Search instead of enumeration: samplers propose, lanes train together, the store remembers."""
