"""The cost model fitted to public runs, and what it says of runs that it was not fitted to."""
