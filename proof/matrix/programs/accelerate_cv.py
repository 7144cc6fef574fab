"""Animals by their pictures' file names: built as accelerate's cv_example.

Pictures in a folder, labels from file names by a pattern, transforms drawn at random, everything prepared by an Accelerator, mixed
precision, OneCycleLR stepped every batch, metrics gathered over processes, a normalisation from the model's configuration.
"""

import argparse
import os
import re

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


def extract_label(fname):
    stem = fname.split(os.path.sep)[-1]
    return re.search(r"^(.*)_\d+\.png$", stem).groups()[0]


def draw(folder):
    chance = np.random.default_rng(1)
    os.makedirs(folder)
    for kind, colour in (("cat", (200, 120, 60)), ("dog", (90, 160, 90)), ("owl", (120, 90, 180))):
        for number in range(80):
            picture = chance.normal(colour, 70, (40, 40, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(picture).save(os.path.join(folder, f"{kind}_{number}.png"))


class PetsDataset(Dataset):
    def __init__(self, file_names, image_transform=None, label_to_id=None):
        self.file_names, self.image_transform, self.label_to_id = file_names, image_transform, label_to_id

    def __len__(self):
        return len(self.file_names)

    def __getitem__(self, idx):
        fname = self.file_names[idx]
        image = Image.open(fname).convert("RGB")
        if self.image_transform is not None:
            image = self.image_transform(image)
        return {"image": image, "label": self.label_to_id[extract_label(fname)]}


class RandomResizedCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        edge = int(torch.empty(1).uniform_(0.6, 1.0).item() * image.width)
        left = int(torch.randint(0, image.width - edge + 1, (1,)))
        top = int(torch.randint(0, image.height - edge + 1, (1,)))
        return image.crop((left, top, left + edge, top + edge)).resize((self.size, self.size))


def to_tensor(image):
    return torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1) / 255


class Small(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.default_cfg = {"mean": (0.5, 0.45, 0.4), "std": (0.25, 0.25, 0.25)}
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 5, 2), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 32, 3, 2), nn.SiLU()
        )
        self.fc = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.fc(self.stem(x).mean(dim=(2, 3)))

    def get_classifier(self):
        return self.fc


def training_function(config, args):
    accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
    lr, num_epochs, seed = config["lr"], int(config["num_epochs"]), int(config["seed"])
    batch_size, size = int(config["batch_size"]), config["image_size"]

    if not os.path.exists(args.data_dir):
        draw(args.data_dir)
    file_names = [
        os.path.join(args.data_dir, f) for f in sorted(os.listdir(args.data_dir)) if f.endswith(".png")
    ]
    id_to_label = sorted({extract_label(fname) for fname in file_names})
    label_to_id = {lbl: i for i, lbl in enumerate(id_to_label)}

    set_seed(seed)
    random_perm = np.random.permutation(len(file_names))
    cut = int(0.8 * len(file_names))
    crop = RandomResizedCrop(size)
    train_dataset = PetsDataset(
        [file_names[i] for i in random_perm[:cut]],
        image_transform=lambda image: to_tensor(crop(image)),
        label_to_id=label_to_id,
    )
    eval_dataset = PetsDataset(
        [file_names[i] for i in random_perm[cut:]],
        image_transform=lambda image: to_tensor(image.resize((size, size))),
        label_to_id=label_to_id,
    )
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=batch_size, num_workers=2)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=batch_size, num_workers=2)

    model = Small(len(label_to_id))
    model = model.to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = True
    for param in model.stem[0].parameters():
        param.requires_grad = False
    mean = torch.tensor(model.default_cfg["mean"])[None, :, None, None].to(accelerator.device)
    std = torch.tensor(model.default_cfg["std"])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=[p for p in model.parameters() if p.requires_grad], lr=lr / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader)
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(num_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            batch = {k: v.to(accelerator.device) for k, v in batch.items()}
            inputs = (batch["image"] - mean) / std
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {loss.item():.5f}")
        model.eval()
        accurate = 0
        num_elems = 0
        for batch in eval_dataloader:
            inputs = (batch["image"] - mean) / std
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        accelerator.print(f"epoch {epoch}: {100 * accurate.item() / num_elems:.2f} %")
    accelerator.end_training()
    state = {"model": accelerator.unwrap_model(model).state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"schedule": lr_scheduler.state_dict(), "random": torch.get_rng_state()}, "model.pt")


def main():
    parser = argparse.ArgumentParser(description="pictures in a folder")
    parser.add_argument("--data_dir", default="images")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    args = parser.parse_args()
    training_function({"lr": 3e-2, "num_epochs": 5, "seed": 42, "batch_size": 16, "image_size": 32}, args)


if __name__ == "__main__":
    main()
