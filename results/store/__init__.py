"""The store: Parquet files, how they are written, verified, joined and read, and what stands beside them."""
