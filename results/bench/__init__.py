"""How long the store, the statistics and the report take at the sizes that they are made for."""
