"""The store: a folder of Parquet files, on a disk or behind a URL.

store            the class Store: what others use
schema           the columns of a row
parquet, inbox   rows in and out of files
reader           reading while others write; broken files are left out, or moved to `torn/` and back
integrity        verification of files by the digest in their names
compaction       many small files become few large ones
query            DuckDB SQL over the rows and the views of the statistics
atomic, locks    files that are whole or absent; one writer at a time
remote, retries  files behind a URL; outages of its server
retired, measured, spaces, pricing      rules, times, spaces and prices that go with the rows
"""
