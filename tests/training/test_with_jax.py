"""JAX arrays and keys in a state. In a file that comes last: its threads and the forks of other tests do not go together."""

from __future__ import annotations

import pytest

from sublet.training.program_state.kinds import NAMED, Unknown
from sublet.training.program_state.live import TRACE_STATE, is_trace_state
from sublet.training.program_state.sorting import Sorting
from sublet.training.scripts.tracing import is_traced
from tests.conftest import needed
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


def test_a_function_that_jax_follows_makes_no_step() -> None:
    jax = pytest.importorskip("jax")
    seen = [is_traced()]
    jax.jit(lambda x: (seen.append(is_traced()), x)[1])(1.0)
    assert seen == [False, True]
    assert not is_traced()


def test_what_jax_gives_by_another_name_is_found_by_it() -> None:
    jax = pytest.importorskip("jax")
    needed("jax.extend.core")
    trace = jax.extend.core.get_opaque_trace_state(convention="nnx")
    sorting = Sorting(lambda module: False)
    assert sorting.kind_of(jax.Array) is NAMED
    assert is_trace_state(type(trace))
    make, arguments = TRACE_STATE.reduce(trace)
    assert make(*arguments) == trace
    inside = []
    jax.jit(lambda x: (inside.append(jax.extend.core.get_opaque_trace_state(convention="nnx")), x)[1])(1.0)
    with pytest.raises(Unknown, match="inside a function that JAX follows"):
        TRACE_STATE.reduce(inside[0])
