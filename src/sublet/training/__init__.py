"""`sublet.train`: the loop, its saves, its data and ranks; Hugging Face and Lightning."""
