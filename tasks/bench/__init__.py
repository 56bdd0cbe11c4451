"""How fast populations train, beside the same training one lane at a time."""
