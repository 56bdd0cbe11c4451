"""`fp4dse bench sweep`: what the harness itself costs, from planning to the end of a simulated sweep."""
