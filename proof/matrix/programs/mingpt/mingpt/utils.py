"""Settings as a tree of attributes, seeds, and the folder of a run."""

import json
import os
import random

import numpy as np
import torch


class CfgNode:
    def __init__(self, **kwargs):
        self.__dict__.update(kwargs)

    def to_dict(self):
        return {k: v.to_dict() if isinstance(v, CfgNode) else v for k, v in self.__dict__.items()}

    def merge_from_args(self, args):
        """`--model.n_layer=4` sets that leaf."""
        for arg in args:
            path, _, value = arg.removeprefix("--").partition("=")
            *above, leaf = path.split(".")
            node = self
            for name in above:
                node = getattr(node, name)
            setattr(node, leaf, json.loads(value))


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def setup_logging(config):
    os.makedirs(config.system.work_dir, exist_ok=True)
    with open(os.path.join(config.system.work_dir, "config.json"), "w") as f:
        f.write(json.dumps(config.to_dict(), indent=1))
