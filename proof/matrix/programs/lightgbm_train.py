"""Boosted trees by lightgbm.train: built as LightGBM's advanced example.

The loop is the library's: rounds with bagging by seed, an evaluation log, a rate that falls by a callback, snapshots of the model; then
training goes on from the model with other parameters.
"""

import json

import lightgbm as lgb
import numpy as np

chance = np.random.default_rng(5)
X = chance.standard_normal((8000, 25))
y = X[:, 0] * 2 + np.abs(X[:, 1]) + np.cos(3 * X[:, 2]) + 0.3 * chance.standard_normal(8000)
lgb_train = lgb.Dataset(X[:6500], y[:6500], free_raw_data=False)
lgb_eval = lgb.Dataset(X[6500:], y[6500:], reference=lgb_train, free_raw_data=False)
params = {
    "objective": "regression",
    "metric": "l2",
    "num_leaves": 63,
    "learning_rate": 0.05,
    "feature_fraction": 0.8,
}
params |= {
    "bagging_fraction": 0.7,
    "bagging_freq": 2,
    "seed": 4,
    "deterministic": True,
    "num_threads": 1,
    "verbose": -1,
}
params |= {"force_col_wise": True}


def told(env):
    if env.iteration % 5 == 0:
        print(f"round {env.iteration} l2 {env.evaluation_result_list[0][2]:.6f}")
    if env.iteration % 50 == 49:
        env.model.save_model(f"round{env.iteration}.txt")


evals_result = {}
gbm = lgb.train(
    params,
    lgb_train,
    num_boost_round=150,
    valid_sets=[lgb_eval],
    callbacks=[told, lgb.record_evaluation(evals_result), lgb.early_stopping(60, verbose=False)],
)
gbm.save_model("first.txt")
print("goes on from a file, with a falling rate")
second_result = {}
gbm = lgb.train(
    params | {"bagging_fraction": 0.5},
    lgb_train,
    num_boost_round=80,
    init_model="first.txt",
    valid_sets=[lgb_eval],
    callbacks=[
        told,
        lgb.reset_parameter(learning_rate=lambda i: 0.05 * 0.99**i),
        lgb.record_evaluation(second_result),
    ],
)
with open("model.json", "w") as f:
    json.dump({"model": gbm.model_to_string(), "results": [evals_result, second_result]}, f)
