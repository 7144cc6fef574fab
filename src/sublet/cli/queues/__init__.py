"""`sublet queue …` and `sublet work`."""
