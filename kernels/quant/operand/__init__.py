"""One operand of a product, quantized for all lanes at once: `kinds.make_slot` gives the slot that does it."""
