"""A LightningModule under a Trainer: built as Lightning's own starting example.

The loop is the library's: training and validation steps, logged values, a schedule, a checkpoint callback that keeps the best, and a
logger of CSV files.
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitAutoEncoder(LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))
        self.decoder = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 256))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        z = self.encoder(x + 0.05 * torch.randn_like(x))
        loss = F.mse_loss(self.decoder(z), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


class Told(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx % 5 == 0:
            print(
                f"epoch {trainer.current_epoch} batch {batch_idx} loss {outputs['loss'].item():.6f}",
                flush=True,
            )


if __name__ == "__main__":
    seed_everything(7, workers=True)
    shapes = torch.rand(5, 256)
    dataset = TensorDataset(torch.rand(1200, 5) @ shapes / 5)
    train, val = random_split(dataset, [1000, 200])
    model = LitAutoEncoder()
    trainer = Trainer(
        max_epochs=6,
        accelerator="cpu",
        devices=1,
        deterministic=True,
        logger=CSVLogger("logs", name="run"),
        callbacks=[
            Told(),
            ModelCheckpoint(dirpath="best", monitor="val_loss", save_top_k=2, filename="{epoch}-{step}"),
        ],
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(train, batch_size=20, shuffle=True), DataLoader(val, batch_size=50))
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "step": trainer.global_step,
    }
    state |= {"best": float(trainer.checkpoint_callback.best_model_score), "random": torch.get_rng_state()}
    torch.save(state, "model.pt")
