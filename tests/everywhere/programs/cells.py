"""Three cells of a notebook, in a shell of their own: two on a leased GPU, and one beside them."""

import json

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in (
    "%load_ext sublet",
    "weights = [i / 7 for i in range(100)]",
    "%%gpu --vram 64MiB --ttl 1m\nimport hashlib\nscaled = [w * 3 for w in weights]\ntotal = sum(scaled)",
    "%%gpu --vram 64MiB --ttl 1m\ndigest = hashlib.sha256(repr(scaled).encode()).hexdigest()",
):
    shell.run_cell(cell).raise_error()
print(json.dumps({"total": shell.user_ns["total"], "digest": shell.user_ns["digest"]}), flush=True)
