"""`python -m proof`: everything that is claimed never to break, tried for an hour; see docs/explain/proof.md."""
