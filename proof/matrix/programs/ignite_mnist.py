"""Engines with handlers: built as pytorch-ignite's mnist example.

The loop is the library's: a trainer and two evaluators, handlers attached as decorators and closures, a progress log, a running average,
early stopping, checkpoints of the best, and a schedule stepped at the end of each epoch.
"""

import torch
import torch.nn.functional as F
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping
from ignite.metrics import Accuracy, Loss, RunningAverage
from ignite.utils import manual_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.dropout(F.relu(self.fc1(x.flatten(1))), training=self.training)
        return F.log_softmax(self.fc2(x), dim=-1)


def get_data_loaders(train_batch_size, val_batch_size):
    shapes = torch.rand(10, 1, 28, 28)
    labels = torch.randint(0, 10, (1600,))
    images = shapes[labels] + 0.5 * torch.randn(1600, 1, 28, 28)
    train = TensorDataset(images[:1280], labels[:1280])
    valid = TensorDataset(images[1280:], labels[1280:])
    return DataLoader(train, batch_size=train_batch_size, shuffle=True), DataLoader(
        valid, batch_size=val_batch_size
    )


def run(train_batch_size=32, val_batch_size=100, epochs=4, lr=0.05, momentum=0.5, log_interval=4):
    train_loader, val_loader = get_data_loaders(train_batch_size, val_batch_size)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    criterion = nn.NLLLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    RunningAverage(output_transform=lambda x: x).attach(trainer, "running")
    val_metrics = {"accuracy": Accuracy(), "nll": Loss(criterion)}
    evaluator = create_supervised_evaluator(model, metrics=val_metrics)
    seen = []

    @trainer.on(Events.ITERATION_COMPLETED(every=log_interval))
    def log_training_loss(engine):
        print(
            f"Epoch[{engine.state.epoch}] Iteration[{engine.state.iteration}] running {engine.state.metrics['running']:.5f}"
        )

    @trainer.on(Events.EPOCH_COMPLETED)
    def log_validation_results(engine):
        evaluator.run(val_loader)
        metrics = evaluator.state.metrics
        seen.append(dict(metrics))
        print(
            f"Validation of epoch {engine.state.epoch}: accuracy {metrics['accuracy']:.4f} loss {metrics['nll']:.5f}"
        )
        with open("validation.log", "a") as f:
            f.write(f"{engine.state.epoch} {metrics['accuracy']:.4f} {metrics['nll']:.5f}\n")
        scheduler.step()

    saver = Checkpoint(
        {"model": model, "optimizer": optimizer},
        DiskSaver("checkpoints", create_dir=True, require_empty=False),
        score_function=lambda engine: engine.state.metrics["accuracy"],
        score_name="accuracy",
        n_saved=2,
        global_step_transform=lambda *_: trainer.state.epoch,
    )
    evaluator.add_event_handler(Events.COMPLETED, saver)
    stopper = EarlyStopping(
        patience=6, score_function=lambda engine: -engine.state.metrics["nll"], trainer=trainer
    )
    evaluator.add_event_handler(Events.COMPLETED, stopper)
    trainer.run(train_loader, max_epochs=epochs)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": scheduler.state_dict(),
    }
    state |= {"seen": seen, "stopper": stopper.state_dict(), "iteration": trainer.state.iteration}
    torch.save(state | {"random": torch.get_rng_state()}, "model.pt")


if __name__ == "__main__":
    manual_seed(6)
    run()
