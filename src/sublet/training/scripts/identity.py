"""What a script is: its code, its arguments, the environment it reads and the versions it runs on; and what
of it changed since a save.

Rules of this file:
- Code is compared as Python compiled it, function by function, without line numbers: a comment is no change.
- Of the environment counts what changes how numbers are computed, and what the program's own code names.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

#: They change the last bits of what is computed.
_ENVIRONMENT = (
    "PYTHONHASHSEED",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "OPENBLAS_NUM_THREADS",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "XLA_FLAGS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "KERAS_BACKEND",
    "TF_DETERMINISTIC_OPS",
)
_PACKAGES = (
    "numpy",
    "scipy",
    "torch",
    "jax",
    "flax",
    "optax",
    "keras",
    "transformers",
    "accelerate",
    "tokenizers",
    "datasets",
    "diffusers",
    "peft",
    "trl",
    "timm",
    "lightning",
    "sklearn",
    "xgboost",
    "lightgbm",
    "pandas",
    "gymnasium",
)

Identity = Mapping[str, Any]


def identity_of(
    files: Mapping[str, str], arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """`files`: name as it is shown, and path. `environment`: as it was before the script ran."""
    code: dict[str, dict[str, str]] = {}
    names = set(_ENVIRONMENT)
    for shown, path in files.items():
        try:
            text = Path(path).read_text()
            code[shown] = {"path": path, **_functions(text, path)}
            names |= _environment_names(text)
        except (OSError, SyntaxError, UnicodeDecodeError):
            code[shown] = {"path": path}
    return {
        "code": code,
        "arguments": list(arguments),
        "environment": {name: environment[name] for name in sorted(names) if name in environment},
        "versions": _versions(),
    }


def digest_of_identity(identity: Identity) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _functions(text: str, path: str) -> dict[str, str]:
    """A digest for each function, and one for what stands outside of them."""
    found: dict[str, Any] = {}
    for code in _codes(compile(text, path, "exec", dont_inherit=True)):
        digest = found.setdefault(code.co_qualname, hashlib.sha256())
        digest.update(repr(_essence(code)).encode())
    return {name: digest.hexdigest()[:16] for name, digest in found.items()}


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _essence(code: CodeType) -> tuple[Any, ...]:
    constants = [c if not isinstance(c, CodeType) else c.co_qualname for c in code.co_consts]
    shown = [sorted(map(repr, c)) if isinstance(c, frozenset) else c for c in constants]
    return code.co_code, shown, code.co_names, code.co_varnames, code.co_freevars, code.co_flags


def _environment_names(text: str) -> set[str]:
    """`os.environ["X"]`, `os.environ.get("X")`, `os.getenv("X")`."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        named: ast.expr | None = None
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            named = node.slice
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called.endswith(("environ.get", "getenv", "environ.pop", "environ.setdefault")):
                named = node.args[0]
        if isinstance(named, ast.Constant) and isinstance(named.value, str):
            found.add(named.value)
    return {name for name in found if not name.startswith("SUBLET_")}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = str(version)
    return found


def changes(before: Identity, now: Identity) -> list[str]:
    """What is not as it was, each in words."""
    return [
        *_code_changes(before["code"], now["code"]),
        *_argument_changes(before["arguments"], now["arguments"]),
        *_value_changes(before["environment"], now["environment"], "", both=False),
        *_value_changes(before["versions"], now["versions"], "", both=True),
    ]


def _code_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for file, old in before.items():
        new = now.get(file)
        if new is None or len(new) <= 1:
            yield f"{file} is gone"
            continue
        for name in sorted((old.keys() | new.keys()) - {"path"}):
            shown = file if name == "<module>" else f"{file}: {name}()"
            if name not in new:
                yield f"{shown} is gone"
            elif name not in old:
                yield f"{shown} is new"
            elif old[name] != new[name]:
                yield f"{shown} changed"


def _argument_changes(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    if list(before) != list(now):
        yield f"the arguments were {_said(before)}, and are {_said(now)}"


def _said(arguments: Iterable[str]) -> str:
    return " ".join(arguments) or "none"


def _value_changes(
    before: Mapping[str, str], now: Mapping[str, str], what: str, *, both: bool
) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old != new and not (both and (old is None or new is None)):
            yield f"{what}{name} was {old or 'not set'}, and is {new or 'not set'}"
