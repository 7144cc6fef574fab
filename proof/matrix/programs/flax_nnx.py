"""A module of flax's nnx: built as the nnx mnist tutorial.

Model, optimizer and metrics are objects whose variables a jitted step changes in place; random streams of the model; a history of metrics
in a dictionary of lists; an evaluation every few steps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class CNN(nnx.Module):
    def __init__(self, *, rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.1, rngs=rngs)
        self.linear1 = nnx.Linear(8 * 8 * 8, 64, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.2, rngs=rngs)
        self.linear2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(
            nnx.relu(self.norm(self.dropout1(self.conv1(x)))), window_shape=(2, 2), strides=(2, 2)
        )
        x = nnx.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1))))
        return self.linear2(x)


def loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(
        logits=logits, labels=batch["label"]
    ).mean(), logits


@nnx.jit
def train_step(model, optimizer, metrics, batch):
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def eval_step(model, metrics, batch):
    loss, logits = loss_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def batches(images, labels, size, chance, epochs):
    for _ in range(epochs):
        order = chance.permutation(len(labels))
        for at in range(0, len(labels) - size + 1, size):
            rows = order[at : at + size]
            yield {"image": jnp.asarray(images[rows]), "label": jnp.asarray(labels[rows])}


chance = np.random.default_rng(2)
shapes = chance.random((10, 16, 16, 1))
labels = chance.integers(0, 10, 2200)
images = (shapes[labels] + 0.4 * chance.standard_normal((2200, 16, 16, 1))).astype(np.float32)
train_images, train_labels, test_images, test_labels = (
    images[:1920],
    labels[:1920],
    images[1920:],
    labels[1920:],
)

model = CNN(rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(0.003, 0.9), wrt=nnx.Param)
metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
metrics_history = {"train_loss": [], "train_accuracy": [], "test_loss": [], "test_accuracy": []}
eval_every, train_steps = 20, 200

for step, batch in enumerate(batches(train_images, train_labels, 32, np.random.default_rng(3), 10)):
    model.train()
    train_step(model, optimizer, metrics, batch)
    if step % 4 == 0:
        print(f"step {step} mean loss {float(metrics.compute()['loss']):.6f}")
    if step > 0 and (step % eval_every == 0 or step == train_steps - 1):
        for metric, value in metrics.compute().items():
            metrics_history[f"train_{metric}"].append(float(value))
        metrics.reset()
        model.eval()
        for at in range(0, len(test_labels), 140):
            eval_step(
                model, metrics, {"image": test_images[at : at + 140], "label": test_labels[at : at + 140]}
            )
        for metric, value in metrics.compute().items():
            metrics_history[f"test_{metric}"].append(float(value))
        metrics.reset()
        with open("metrics.csv", "a") as f:
            f.write(f"{step}," + ",".join(f"{v[-1]:.6f}" for v in metrics_history.values()) + "\n")
    if step == train_steps - 1:
        break

found = {}
for kind, thing in (("model", model), ("optimizer", optimizer)):
    for path, value in jax.tree_util.tree_leaves_with_path(nnx.state(thing)):
        data = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        found[kind + jax.tree_util.keystr(path)] = np.asarray(data)
for name, values in metrics_history.items():
    found[name] = np.array(values)
np.savez("model.npz", **{name.replace("/", "_"): value for name, value in found.items()})
