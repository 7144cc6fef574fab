"""Overrules globals of the script that runs this with exec: `--name=value` or a file of assignments."""

import ast
import sys

for argument in sys.argv[1:]:
    if "=" not in argument:
        with open(argument) as file:
            exec(file.read())
        continue
    name, _, text = argument.removeprefix("--").partition("=")
    if name not in globals():
        raise ValueError(f"there is no setting {name}")
    try:
        globals()[name] = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        globals()[name] = text
