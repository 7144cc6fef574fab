"""Random small training programs that judge whether a resumed program ends as an undisturbed one: exact, or refused.

`make_program(seed)` makes one, `judge` kills and resumes it, `python -m tests.training.programs --seeds 1..2000` judges many.
"""
