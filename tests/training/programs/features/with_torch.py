"""State around a model of torch: its modules, its optimizer, its data and what lies beside them. The model is `model`, its optimizer `opt`."""

from __future__ import annotations

from functools import partial

from tests.training.programs.features import feature

#: In the scope of the model, so that `model` and `opt` are those that train.
beside_the_model = partial(feature, __name__, weights="torch", inline=True)
torch_object = partial(feature, __name__, weights="torch")

torch_object(
    "module_attributes",
    top="""
class MyLayer(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)
        self.calls, self.seen = 0, {"sum": 0.5}
        self.register_buffer("average", torch.zeros(1))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, value):
        self.calls += 1
        self.seen["sum"] = self.seen["sum"] * 0.9 + self.calls % 3
        self.average.mul_(0.9).add_(value.mean() * 0.1)
        self.hidden = self.hidden * 0.8 + 0.1
        return super().forward(value)
""",
    setup="my_layer = MyLayer()",
    step="""
with torch.no_grad():
    my_out = my_layer(torch.full((1, 2), float(step % 4)))
my_v = float(my_out) + my_layer.seen["sum"] + float(my_layer.average) + float(my_layer.hidden[0])
""",
)
beside_the_model(
    "forward_hook_that_counts",
    top="""
def my_hook_of(log):
    def hook(module, inputs, output):
        log.append(len(log))
        return output + 0.01 * (len(log) % 5)

    return hook
""",
    setup="my_log = []\nmy_handle = model.register_forward_hook(my_hook_of(my_log))",
    step="""
my_v = len(my_log) % 7
if step == 6:
    my_handle.remove()
    my_handle = model.register_forward_hook(my_hook_of(my_log))
""",
    reset="my_log.clear()",
)
beside_the_model(
    "hook_registered_midway",
    top="""
class MyClip:
    def __init__(self):
        self.n = 0

    def __call__(self, grad):
        self.n += 1
        return grad * (1 + 0.1 * (self.n % 3))
""",
    setup="my_clip = MyClip()",
    step="if step == 4:\n    model[0].weight.register_hook(my_clip)\nmy_v = my_clip.n % 6",
    reset="my_clip.n = 20",
)
beside_the_model(
    "parameter_group_added",
    setup="my_extra = torch.nn.Parameter(torch.ones(2))",
    step="""
if step == «3..5»:
    opt.add_param_group({'params': [my_extra], 'lr': 0.01, 'mark': step})
my_extra.grad = torch.full((2,), float(step % 3))
my_v = float(my_extra.sum().detach())
""",
    reset="my_extra.data.fill_(3.0)",
)
torch_object(
    "optimizer_with_a_counter",
    top="""
class MyOptimizer(torch.optim.SGD):
    turns = 0

    def step(self, closure=None):
        self.turns += 1
        self.param_groups[0]["lr"] *= 0.95
        self.defaults["seen"] = self.turns
        return super().step(closure)
""",
    setup="""
my_value = torch.nn.Parameter(torch.ones(3))
my_opt = MyOptimizer([my_value], lr=0.1, momentum=0.5)
""",
    step="""
my_value.grad = my_value.detach() * 0.5 + step % 3
my_opt.step()
my_v = float(my_value.detach().sum()) + my_opt.turns % 4 + my_opt.defaults['seen'] * 0.1
""",
)
beside_the_model(
    "scheduler_with_a_closure",
    top="""
def my_ramp(log):
    def factor(n):
        log.append(n)
        return 1 / (1 + 0.05 * len(log))

    return factor
""",
    setup="my_log = []\nmy_scheduler = torch.optim.lr_scheduler.LambdaLR(opt, my_ramp(my_log))",
    step="""
with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    my_scheduler.step()
my_v = my_scheduler.get_last_lr()[0] * 20 + len(my_log) % 3
""",
    imports="warnings",
    reset="my_log.clear()",
)
beside_the_model(
    "scheduler_made_late",
    imports="warnings",
    setup="my_scheduler = None",
    step="""
if step == 5:
    my_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
if my_scheduler is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        my_scheduler.step()
my_v = opt.param_groups[0]["lr"] * 20
""",
    reset="my_scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)",
)
beside_the_model(
    "average_model_made_late",
    imports="copy",
    setup="my_average = None",
    step="""
if step == 4:
    my_average = copy.deepcopy(model)
if my_average is not None:
    with torch.no_grad():
        for my_a, my_p in zip(my_average.parameters(), model.parameters()):
            my_a.lerp_(my_p, 0.2)
my_v = float(my_average[0].weight.sum().detach()) if my_average is not None else 0.5
""",
    reset="my_average = copy.deepcopy(model)\ntorch.nn.init.ones_(my_average[0].weight)",
)
beside_the_model(
    "average_by_foreach",
    setup="my_shadow = [p.detach().clone() for p in model.parameters()]",
    step="""
torch._foreach_lerp_(my_shadow, [p.detach() for p in model.parameters()], 0.1)
my_v = float(my_shadow[0].sum())
""",
)
beside_the_model(
    "views_of_the_parameters",
    setup="my_view, my_flat = model[0].weight.data[:1], model[0].weight.data.view(-1)",
    step="my_view.mul_(0.98)\nmy_flat[step % 12] += 0.05\nmy_v = float(my_view.sum()) + float(my_flat[-1])",
    reset="my_view, my_flat = torch.zeros(3), torch.zeros(12)",
)
torch_object(
    "tied_weights",
    setup="""
my_one, my_two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
my_two.weight = my_one.weight
my_pair = torch.nn.ModuleList([my_one, my_two])
""",
    step="""
my_one.weight.data.mul_(0.9).add_(step % 3)
my_v = float(my_pair[1].weight.detach().sum()) % 9 + (my_one.weight is my_two.weight)
""",
)
torch_object(
    "loader_iterator_in_an_object",
    top="""
class MyStream:
    def __init__(self, data):
        self.loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
        self.it = iter(self.loader)

    def batch(self):
        try:
            return next(self.it)
        except StopIteration:
            self.it = iter(self.loader)
            return next(self.it)
""",
    imports="torch.utils.data",
    setup="my_stream = MyStream(torch.arange(11.0))",
    step="my_v = float(my_stream.batch()[0]) % 7",
)
torch_object(
    "sampler_with_a_counter",
    imports="torch.utils.data",
    top="""
class MySampler(torch.utils.data.Sampler):
    def __init__(self, n):
        self.n, self.rounds = n, 0

    def __iter__(self):
        self.rounds += 1
        return iter([(k * (self.rounds + 1)) % self.n for k in range(self.n)])

    def __len__(self):
        return self.n
""",
    setup="my_loader = torch.utils.data.DataLoader(torch.arange(5.0), batch_size=2, sampler=MySampler(5))",
    step="my_v = sum(float(b.sum()) * (k + 1) for k, b in enumerate(my_loader)) % 11",
)
torch_object(
    "dataset_with_its_own_random_state",
    imports="torch.utils.data numpy",
    top="""
class MyData(torch.utils.data.Dataset):
    def __init__(self):
        self.rng, self.reads = numpy.random.default_rng(5), 0

    def __len__(self):
        return 6

    def __getitem__(self, at):
        self.reads += 1
        return at + float(self.rng.random()) + self.reads % 2
""",
    setup="my_loader = torch.utils.data.DataLoader(MyData(), batch_size=3)",
    step="my_v = float(next(iter(my_loader))[1])",
)
torch_object(
    "weighted_sampler_changed_in_the_loop",
    imports="torch.utils.data",
    setup="my_sampler = torch.utils.data.WeightedRandomSampler([1.0] * 5, 4, generator=torch.Generator().manual_seed(3))",
    step="my_drawn = list(my_sampler)\nmy_sampler.weights[my_drawn[0]] *= 0.25\nmy_v = sum(my_drawn) % 7",
)
torch_object(
    "own_torch_generator",
    setup="my_gen = torch.Generator().manual_seed(«1..99»)",
    step="my_v = float(torch.randn(1, generator=my_gen)) + float(torch.rand(()))",
)
torch_object(
    "dropout_and_batch_norm",
    setup="my_net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2))",
    step="""
my_net.train(step % 4 != 3)
my_v = float(my_net(torch.arange(6.0).view(3, 2) * (step % 3)).detach()[0, 1]) + float(my_net[1].running_mean[0]) + float(my_net[1].num_batches_tracked) * 0.1
""",
)
beside_the_model(
    "training_mode_and_frozen_parts",
    setup="model.train()",
    step="""
if step % 4 == 1:
    model[2].weight.requires_grad_(not model[2].weight.requires_grad)
if step == 5:
    model.eval()
my_v = model.training * 1.5 + model[2].weight.requires_grad
""",
    reset="model.train()\nmodel[2].weight.requires_grad_(step % 4 == 2)",
)
beside_the_model(
    "gradients_kept_over_steps",
    setup="my_kept = [torch.zeros_like(p) for p in model.parameters()]",
    step="""
for my_k, my_p in zip(my_kept, model.parameters()):
    if my_p.grad is not None:
        my_k.add_(my_p.grad)
my_v = float(my_kept[0].sum()) % 5
""",
)
torch_object(
    "pruned_and_parametrized",
    imports="torch.nn.utils.parametrizations torch.nn.utils.prune",
    setup="""
my_net = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 2))
my_other = torch.nn.Linear(3, 2)
""",
    step="""
if step == 5:
    torch.nn.utils.prune.l1_unstructured(my_other, "weight", 2)
with torch.no_grad():
    my_net.parametrizations.weight.original0.mul_(0.9)
    next(my_other.parameters()).add_(0.1)
    my_v = float(my_net(torch.ones(3))[0] + my_other(torch.ones(3))[1]) + len(list(my_other.buffers()))
""",
)
torch_object(
    "tensor_with_an_attribute",
    setup="my_t = torch.ones(3)\nmy_t.note = {'n': 1}",
    step="my_t.note['n'] = my_t.note['n'] * 3 % 31\nmy_t.mul_(0.9)\nmy_v = my_t.note['n'] % 9 + float(my_t[0])",
)
torch_object(
    "list_of_parameters_that_grows",
    setup="my_list = torch.nn.ParameterList([torch.ones(1)])\nmy_table = torch.nn.ModuleDict()",
    step="""
if step % 4 == 2:
    my_list.append(torch.nn.Parameter(torch.full((1,), float(step))))
    my_table[f'l{step}'] = torch.nn.Linear(1, 1)
my_v = float(sum(p.detach().sum() for p in my_list)) % 9 + float(sum(p.detach().sum() for p in my_table.parameters()))
""",
)
torch_object(
    "odd_tensors",
    setup="""
my_b, my_c, my_s = torch.ones(4, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64), torch.eye(3).to_sparse()
my_t = torch.arange(6.0).view(2, 3).t()
""",
    step="""
my_b *= 1.1
my_c = my_c * (0.6 + 0.8j)
my_s = my_s * 0.9
my_t[0, 1] += step % 3
my_v = float(my_b[0]) % 5 + float(my_c.real[0]) + float(my_s.to_dense()[0, 0]) + float(my_t.sum()) % 3 + my_t.is_contiguous()
""",
)
torch_object(
    "function_with_state_in_its_class",
    top="""
class MyScale(torch.autograd.Function):
    uses = 0

    @staticmethod
    def forward(context, value):
        MyScale.uses += 1
        return value * (1 + 0.1 * (MyScale.uses % 4))

    @staticmethod
    def backward(context, grad):
        MyScale.uses += 2
        return grad * 0.5
""",
    setup="my_value = torch.ones(1, requires_grad=True)",
    step="MyScale.apply(my_value).sum().backward()\nmy_v = float(my_value.grad) % 5 + MyScale.uses % 7",
    reset="MyScale.uses = 3",
)
torch_object(
    "graph_carried_from_step_to_step",
    setup="my_p = torch.ones(2, requires_grad=True)\nmy_hidden = my_p * 1.0",
    step="""
my_hidden = torch.tanh(my_hidden * my_p + step % 3)
if step % 4 == 3:
    my_p.grad = None
    my_hidden.sum().backward()
    my_hidden = my_hidden.detach()
my_v = float(my_hidden.detach().sum()) + (float(my_p.grad.sum()) if my_p.grad is not None else 0.25)
""",
    reset="my_p = torch.ones(2, requires_grad=True)\nmy_hidden = my_p * -3.0",
    refusable="it carries a graph of gradients",
)
torch_object(
    "switches_of_torch",
    step="""
if step == 5:
    torch.use_deterministic_algorithms(True)
my_v = 0.5 + torch.are_deterministic_algorithms_enabled()
""",
    end="torch.use_deterministic_algorithms(False)",
    reset="torch.use_deterministic_algorithms(step <= 5)",
    refusable="it changes a setting of torch in the loop",
)
torch_object(
    "averaged_model_and_scaler",
    imports="torch.optim.swa_utils",
    setup="my_net = torch.nn.Linear(2, 1)\nmy_average = torch.optim.swa_utils.AveragedModel(my_net)",
    step="""
my_net.weight.data.add_(0.1 * (step % 3))
my_average.update_parameters(my_net)
my_v = float(my_average.module.weight.sum().detach()) + float(my_average.n_averaged) * 0.1
""",
)
torch_object(
    "lbfgs_by_a_closure",
    setup="""
my_p = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
my_opt = torch.optim.LBFGS([my_p], lr=0.1, max_iter=2, history_size=3)
""",
    top="""
def my_evaluate(opt, p, shift):
    def closure():
        opt.zero_grad()
        loss = ((p - shift) ** 4).sum()
        loss.backward()
        return loss

    return closure
""",
    step="my_opt.step(my_evaluate(my_opt, my_p, float(step % 3)))\nmy_v = float(my_p.detach().sum())",
)
torch_object(
    "recurrent_state_and_embedding",
    setup="""
my_cell, my_embed = torch.nn.GRUCell(2, 3), torch.nn.Embedding(5, 2, max_norm=1.0)
my_h = torch.zeros(1, 3)
""",
    step="""
with torch.no_grad():
    my_h = my_cell(my_embed(torch.tensor([step * 3 % 5])), my_h)
my_v = float(my_h.sum()) * 2
""",
)
torch_object(
    "replay_memory_of_tensors",
    imports="collections random",
    setup="my_memory = collections.deque(maxlen=6)\nmy_memory.append((torch.ones(2), 0, None))",
    step="""
my_memory.append((torch.full((2,), float(step % 4)), step, my_memory[-1][0]))
my_t, my_a, my_n = random.choice(my_memory)
my_v = float(my_t.sum()) + my_a % 3 + (my_n is not None)
""",
)
