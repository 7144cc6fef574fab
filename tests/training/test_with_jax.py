"""JAX arrays and keys in a state. In a file that comes last: its threads and the forks of other tests do not go together."""

from __future__ import annotations

import pytest

from tests.training.test_capture import restore, saved


def test_jax_arrays_and_keys() -> None:
    jax = pytest.importorskip("jax")
    parts = {
        "params": {"w": jax.numpy.arange(3.0), "layers": [jax.numpy.ones(2)]},
        "key": jax.random.key(5),
        "old key": jax.random.PRNGKey(5),
        "impl": jax.random.key(5, impl="rbg"),
    }
    tree = saved(parts)
    other = {
        "params": {"w": jax.numpy.zeros(3), "layers": [jax.numpy.zeros(2)]},
        "key": jax.random.key(0),
        "old key": jax.random.PRNGKey(0),
        "impl": jax.random.key(0, impl="rbg"),
    }
    restore(other, tree)
    assert other["params"]["w"].tolist() == [0, 1, 2]
    assert other["params"]["layers"][0].tolist() == [1, 1]
    assert isinstance(other["params"]["w"], jax.Array)
    for name in ("key", "old key", "impl"):
        assert jax.random.normal(other[name]) == jax.random.normal(parts[name])
