"""Boosted trees by xgboost.train: built as XGBoost's Python walk-through.

The loop is the library's: rounds under evaluation sets, a custom metric, a callback that saves and tells, row and column sampling by seed,
a schedule of the rate, and early stopping.
"""

import json

import numpy as np
import xgboost as xgb

chance = np.random.default_rng(3)
X = chance.standard_normal((9000, 30))
y = ((X[:, 0] * X[:, 1] + np.sin(X[:, 2] * 2) + 0.5 * chance.standard_normal(9000)) > 0).astype(int)
dtrain, dvalid = xgb.DMatrix(X[:7000], y[:7000]), xgb.DMatrix(X[7000:], y[7000:])


class Told(xgb.callback.TrainingCallback):
    def after_iteration(self, model, epoch, evals_log):
        if epoch % 5 == 0:
            print(f"round {epoch} logloss {evals_log['valid']['logloss'][-1]:.6f}")
        if epoch % 50 == 49:
            model.save_model(f"round{epoch}.json")
        return False


def half_errors(predt, data):
    wrong = (predt > 0.5) != data.get_label()
    return "half_errors", float(wrong.mean() / 2)


params = {
    "max_depth": 7,
    "eta": 0.05,
    "objective": "binary:logistic",
    "subsample": 0.7,
    "colsample_bytree": 0.6,
}
params |= {"seed": 9, "nthread": 1, "tree_method": "hist", "eval_metric": "logloss"}
evals_result = {}
bst = xgb.train(
    params,
    dtrain,
    num_boost_round=220,
    evals=[(dtrain, "train"), (dvalid, "valid")],
    custom_metric=half_errors,
    evals_result=evals_result,
    verbose_eval=False,
    callbacks=[
        Told(),
        xgb.callback.LearningRateScheduler(lambda r: 0.05 * 0.995**r),
        xgb.callback.EarlyStopping(rounds=80, data_name="valid", metric_name="logloss", save_best=False),
    ],
)
bst.save_model("booster.json")
found = {
    "model": json.loads(bst.save_raw("json").decode()),
    "results": evals_result,
    "best": bst.best_iteration,
}
with open("model.json", "w") as f:
    json.dump(found, f)
