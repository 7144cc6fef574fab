"""A network in JAX with optax: built as the optax and JAX tutorials' training loop.

Parameters are a tree of arrays, replaced by each step; the key is split in the loop; a jitted update; a schedule and clipping in a chain;
data from a NumPy generator; the state is pickled now and then.
"""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax

chance = np.random.default_rng(0)
truth = chance.standard_normal((64, 10)).astype(np.float32)
images = chance.standard_normal((4000, 64)).astype(np.float32)
labels = (images @ truth).argmax(1)


def init_params(key, sizes=(64, 512, 512, 10)):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * jnp.sqrt(2.0 / m), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def predict(params, x, key, rate=0.1):
    for i, layer in enumerate(params[:-1]):
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
        if key is not None:
            x = x * jax.random.bernoulli(jax.random.fold_in(key, i), 1 - rate, x.shape) / (1 - rate)
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params, x, y, key):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x, key), y).mean()


schedule = optax.warmup_cosine_decay_schedule(1e-5, 2e-3, 20, 240)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))


@jax.jit
def update(params, opt_state, x, y, key):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y, key)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def data_stream(batch_size):
    order = np.random.default_rng(7)
    while True:
        perm = order.permutation(len(images))
        for i in range(len(images) // batch_size):
            rows = perm[i * batch_size : (i + 1) * batch_size]
            yield images[rows], labels[rows]


key = jax.random.PRNGKey(42)
key, sub = jax.random.split(key)
params = init_params(sub)
opt_state = optimizer.init(params)
average = params
batches = data_stream(128)
losses = []
for step in range(240):
    x, y = next(batches)
    key, sub = jax.random.split(key)
    params, opt_state, loss = update(params, opt_state, x, y, sub)
    average = jax.tree.map(lambda a, p: 0.98 * a + 0.02 * p, average, params)
    losses.append(loss)
    if step % 5 == 0:
        print(f"step {step} loss {loss:.6f}")
    if step % 60 == 59:
        accuracy = jnp.mean(predict(average, images, None).argmax(1) == labels)
        print(f"accuracy after {step}: {accuracy:.4f}")
        with open("checkpoint.pkl", "wb") as f:
            pickle.dump(jax.device_get((params, opt_state)), f)

leaves = jax.tree.leaves((params, opt_state, average))
np.savez(
    "model.npz",
    *[np.asarray(leaf) for leaf in leaves],
    key=np.asarray(key),
    losses=np.array(losses, dtype=np.float32),
)
