"""`sublet journal …` and `sublet migrate`."""
