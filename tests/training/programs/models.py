"""The weights: `setup` makes them, `text` changes them by `x`, `end` is what is appended to the result.

The names are `w` for the weights, and in torch `model` and `opt`.
"""

from __future__ import annotations

from functools import partial

from tests.training.programs.pieces import Model, table_of


def _model(name: str, setup: str, text: str, end: str, **given: object) -> Model:
    return Model(name=name, setup=setup, text=text, end=f"parts.append(repr({end}))", **given)  # type: ignore[arg-type]


_numpy = partial(_model, kind="numpy", imports="numpy")
_plain = partial(_model, kind="plain", imports="math")
_torch = partial(_model, kind="torch", imports="torch math")

MODELS = table_of(
    (
        _numpy(
            "array",
            "w = numpy.linspace(-1.0, 1.0, 4)",
            "gradient = w - numpy.cos(x + numpy.arange(4))\nw -= 0.1 * gradient",
            "w.tolist()",
            weight=4.0,
        ),
        _numpy(
            "momentum",
            "w, velocity = numpy.ones(3), numpy.zeros(3)",
            "velocity = 0.8 * velocity + (w - numpy.sin(x + numpy.arange(3)))\nw -= 0.1 * velocity",
            "[w.tolist(), velocity.tolist()]",
            weight=2.0,
        ),
        _numpy(
            "array_bound_anew",
            "w = numpy.full(3, 0.5)",
            "gradient = w - numpy.cos(x * numpy.arange(1, 4))\nw = w - 0.1 * gradient",
            "w.tolist()",
        ),
        _numpy(
            "dict_of_arrays",
            "params = {'w': numpy.ones((2, 2)).ravel(), 'b': numpy.zeros(1)}\nw = params['w']",
            """
gradient = params['w'] - numpy.cos(x + params['b'])
params['w'] -= 0.1 * gradient
params['b'] -= 0.05 * gradient.sum()
""",
            "{name: p.tolist() for name, p in params.items()}",
            weight=2.0,
        ),
        _numpy(
            "list_of_arrays",
            "layers = [numpy.ones(3), numpy.zeros(2)]\nw = layers[0]",
            """
gradients = [layers[0] - numpy.sin(x), layers[1] - numpy.cos(x) * layers[0][0]]
for p, g in zip(layers, gradients):
    p -= 0.1 * g
""",
            "[p.tolist() for p in layers]",
        ),
        _numpy(
            "function_that_learns",
            "w = numpy.linspace(0.0, 1.0, 4)",
            "learn(w, x)",
            "w.tolist()",
            top="def learn(w, x):\n    gradient = w - numpy.cos(x + numpy.arange(4))\n    w -= 0.1 * gradient\n",
            weight=2.0,
        ),
        _numpy(
            "optimizer_of_its_own",
            "w, adam = numpy.zeros(3), Adam(3)",
            "adam.descend(w, w - numpy.cos(x + numpy.arange(3)))",
            "[w.tolist(), adam.turns]",
            top="""
class Adam:
    def __init__(self, size):
        self.mean, self.square, self.turns = numpy.zeros(size), numpy.zeros(size), 0

    def descend(self, weights, gradient):
        self.turns += 1
        self.mean += 0.1 * (gradient - self.mean)
        self.square = 0.99 * self.square + 0.01 * gradient**2
        weights -= 0.1 * self.mean / (numpy.sqrt(self.square) + 1e-3)
""",
            weight=2.0,
        ),
        _plain("float", "w = 0.5", "gradient = w - math.cos(x)\nw -= 0.1 * gradient", "w", weight=3.0),
        _plain(
            "list_of_floats",
            "w = [0.25, -0.5]",
            "for k in range(2):\n    w[k] -= 0.1 * (w[k] - math.cos(x + k))",
            "w",
        ),
        _plain(
            "objects_that_go_backward",
            "net = Net()\noptim, w = Optim(net), net.w",
            "loss = net.loss(x)\nloss.backward()\noptim.step()\nw = net.w",
            "[net.w, net.grad, optim.turns]",
            top="""
class Net:
    def __init__(self):
        self.w, self.grad = 0.75, 0.0

    def loss(self, x):
        return Loss(self, x)

class Loss:
    def __init__(self, net, x):
        self.net, self.x = net, x

    def backward(self):
        self.net.grad = self.net.w - math.cos(self.x)

class Optim:
    def __init__(self, net):
        self.net, self.turns = net, 0

    def step(self):
        self.turns += 1
        self.net.w -= 0.2 / (1 + 0.1 * self.turns) * self.net.grad
""",
            weight=2.0,
        ),
        _torch(
            "torch_sgd",
            """
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
w = model[0].weight
""",
            """
loss = ((model(torch.randn(5, 3)) - math.cos(x)) ** 2).mean()
opt.zero_grad()
loss.backward()
opt.step()
""",
            "[p.tolist() for p in model.parameters()]",
            weight=2.0,
        ),
        _torch(
            "torch_adam",
            """
torch.manual_seed(4)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
opt = torch.optim.AdamW(model.parameters(), lr=0.02)
w = model[0].weight
""",
            "opt.zero_grad()\nloss = (model(torch.randn(4, 3)) - x).abs().mean()\nloss.backward()\nopt.step()",
            "[p.tolist() for p in model.parameters()]",
        ),
    )
)
