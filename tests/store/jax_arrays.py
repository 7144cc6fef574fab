"""Arrays of JAX, as they are. Run by `test_jax.py`, in a process of its own."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest

from sublet.core.errors import Unsavable
from tests.store.rig import JOB, Shelf

jax = import_module("jax")


def test_they_come_back_as_they_were(shelf: Shelf) -> None:
    jnp = import_module("jax.numpy")
    state = {
        "w": jnp.arange(3_000_000, dtype=jnp.float32) / 7,
        "b": (jnp.arange(12, dtype=jnp.bfloat16).reshape(3, 4) / 3).T,
        "f8": jnp.arange(6, dtype=jnp.float8_e4m3fn),
        "step": jnp.asarray(3),
        "flags": jnp.asarray([True, False]),
        "none": jnp.zeros((0, 4)),
        "rng": jax.random.key_data(jax.random.key(7)),
        "old rng": jax.random.PRNGKey(7),
    }
    shelf.save(state, 0)
    found = shelf.load()
    assert found.keys() == state.keys()
    for name, array in state.items():
        assert isinstance(found[name], jax.Array), name
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()
    key = jax.random.wrap_key_data(found["rng"])
    assert jax.random.normal(key, (3,)).tolist() == jax.random.normal(jax.random.key(7), (3,)).tolist()


def test_into_what_cannot_be_written_to(shelf: Shelf) -> None:
    """They are replaced, and what replaces them is theirs: the next save does not change it."""
    jnp = import_module("jax.numpy")
    shelf.save({"w": jnp.full(3_000_000, 1.0)}, 0)
    store = shelf.open()
    live = {"w": jnp.zeros(3_000_000)}
    store.load(JOB, into=live)
    store.save(JOB, {"w": jnp.full(3_000_000, 2.0)}, expected_version=1, lease=shelf.lease)
    assert float(live["w"].sum()) == 3_000_000


def test_a_typed_key_says_what_to_do(shelf: Shelf) -> None:
    with pytest.raises(Unsavable, match=r"state\['rng'\].*key") as caught:
        shelf.save({"rng": jax.random.key(1)}, 0)
    assert "key_data" in caught.value.remedy
