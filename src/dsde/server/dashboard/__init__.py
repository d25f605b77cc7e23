"""The page at /dashboard: what it shows (`board`, `throughput`, `words`) and the files a browser gets."""
