"""Text too large for memory: built as scikit-learn's out-of-core classification example.

A generator of documents, batches cut from it with islice, a hashing vectorizer, several classifiers with partial_fit in a dictionary,
statistics in nested dictionaries, and times that are measured but not used.
"""

import itertools
import json
import random
import time

import joblib
import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import Perceptron, SGDClassifier
from sklearn.naive_bayes import MultinomialNB
from sklearn.neural_network import MLPClassifier

random.seed(1)
np.random.seed(1)


def stream_documents():
    """Documents without end, about one of two subjects."""
    chance = random.Random(12)
    common = [f"word{i}" for i in range(400)]
    subject = {0: common[:60], 1: common[40:100]}
    while True:
        about = chance.randrange(2)
        words = chance.choices(common, k=40) + chance.choices(subject[about], k=8)
        chance.shuffle(words)
        yield " ".join(words), about


def get_minibatch(doc_iter, size):
    data = list(itertools.islice(doc_iter, size))
    X_text, y = zip(*data, strict=True)
    return X_text, np.asarray(y, dtype=int)


def iter_minibatches(doc_iter, size):
    X_text, y = get_minibatch(doc_iter, size)
    while len(X_text):
        yield X_text, y
        X_text, y = get_minibatch(doc_iter, size)


vectorizer = HashingVectorizer(n_features=2**12, alternate_sign=False)
data_stream = stream_documents()
all_classes = np.array([0, 1])
partial_fit_classifiers = {
    "SGD": SGDClassifier(max_iter=5, random_state=3),
    "Perceptron": Perceptron(),
    "Bayes": MultinomialNB(alpha=0.01),
    "Network": MLPClassifier(hidden_layer_sizes=(24,), random_state=np.random.RandomState(5)),
}
test_text, y_test = get_minibatch(data_stream, 300)
X_test = vectorizer.transform(test_text)
cls_stats = {
    name: {"n_train": 0, "accuracy": 0.0, "history": [], "t0": time.time()}
    for name in partial_fit_classifiers
}

for i, (X_train_text, y_train) in enumerate(iter_minibatches(data_stream, 100)):
    tick = time.time()
    X_train = vectorizer.transform(X_train_text)
    noise = np.random.permutation(len(y_train))[:3]
    y_train[noise] = 1 - y_train[noise]
    for cls_name, cls in partial_fit_classifiers.items():
        cls.partial_fit(X_train, y_train, classes=all_classes)
        cls_stats[cls_name]["n_train"] += X_train.shape[0]
        cls_stats[cls_name]["accuracy"] = cls.score(X_test, y_test)
        cls_stats[cls_name]["history"].append(
            (cls_stats[cls_name]["accuracy"], cls_stats[cls_name]["n_train"])
        )
    if i % 2 == 0:
        scores = ", ".join(f"{name} {stats['accuracy']:.4f}" for name, stats in cls_stats.items())
        print(f"batch {i}: {scores} in {time.time() - tick:.3f} s")
    if i % 20 == 19:
        joblib.dump(partial_fit_classifiers, "classifiers.joblib")
    if i == 119:
        break

found = {
    name: {"history": stats["history"], "n_train": stats["n_train"]} for name, stats in cls_stats.items()
}
for name, cls in partial_fit_classifiers.items():
    weights = cls.coefs_ if name == "Network" else [cls.feature_log_prob_ if name == "Bayes" else cls.coef_]
    found[name]["weights"] = [np.asarray(w).tolist() for w in weights]
found["random"] = [random.random(), np.random.random()]
with open("model.json", "w") as f:
    json.dump(found, f)
