"""Examples: programs that a user of autopar would write."""
