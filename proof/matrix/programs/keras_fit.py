"""Keras 3 on torch: built as Keras' simple convolutional example.

The loop is the library's: compile() and fit() with a validation split, dropout, and callbacks for checkpoints, a CSV log, a slower
rate on a plateau and early stopping.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(812)
num_classes, input_shape = 10, (20, 20, 1)
chance = np.random.default_rng(0)
shapes = chance.random((num_classes, *input_shape))
labels = chance.integers(0, num_classes, 1200)
x_train = (shapes[labels] + 0.3 * chance.standard_normal((1200, *input_shape))).astype("float32")
y_train = keras.utils.to_categorical(labels, num_classes)

model = keras.Sequential(
    [
        keras.Input(shape=input_shape),
        layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.BatchNormalization(),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(num_classes, activation="softmax"),
    ]
)


class Told(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch % 5 == 0:
            print(f"epoch {self.epoch} batch {batch} loss {logs['loss']:.5f}")


model.compile(loss="categorical_crossentropy", optimizer=keras.optimizers.Adam(0.002), metrics=["accuracy"])
history = model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=5,
    validation_split=0.1,
    shuffle=True,
    verbose=0,
    callbacks=[
        Told(),
        keras.callbacks.CSVLogger("training.csv"),
        keras.callbacks.ModelCheckpoint(
            "best.weights.h5", monitor="val_loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=4, restore_best_weights=False),
    ],
)
weights = {f"weight{i}": w for i, w in enumerate(model.get_weights())}
slots = {
    f"slot{i}": np.array(keras.ops.convert_to_numpy(v.value)) for i, v in enumerate(model.optimizer.variables)
}
seen = {f"history_{k}": np.array(v, dtype=np.float64) for k, v in history.history.items()}
np.savez("model.npz", **weights, **slots, **seen)
