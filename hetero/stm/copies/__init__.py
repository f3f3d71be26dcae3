"""Device copies: which there are, and who leaves when one more has to come."""
