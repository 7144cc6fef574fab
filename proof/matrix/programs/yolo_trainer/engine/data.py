"""Pictures of shapes, put together four at a time while that is on, and a loader that never ends."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, count, augment, seed):
        chance = np.random.default_rng(seed)
        self.labels = [
            {"cls": int(chance.integers(3)), "box": chance.uniform(0.25, 0.75, 4) * [1, 1, 0.5, 0.5]}
            for _ in range(count)
        ]
        self.augment, self.mosaic = augment, augment
        self.buffer = []  # the last indices that were read: partners for the next

    def __len__(self):
        return len(self.labels)

    def draw(self, label):
        image = np.random.default_rng(int(label["box"][0] * 1e6)).random((3, 32, 32)).astype(np.float32) * 0.3
        x, y, w, h = label["box"] * 32
        image[label["cls"], int(y - h / 2) : int(y + h / 2) + 1, int(x - w / 2) : int(x + w / 2) + 1] = 1.0
        return image

    def close_mosaic(self):
        self.mosaic = False

    def __getitem__(self, index):
        label = self.labels[index]
        image = self.draw(label)
        self.buffer.append(index)
        if len(self.buffer) >= 24:
            self.buffer.pop(0)
        if self.mosaic and random.random() < 0.5:
            image = np.maximum(image, 0.4 * self.draw(self.labels[random.choice(self.buffer)]))
        box = label["box"].copy()
        if self.augment and random.random() < 0.5:
            image, box[0] = image[:, :, ::-1].copy(), 1 - box[0]
        return {
            "img": torch.from_numpy(image),
            "cls": label["cls"],
            "bboxes": torch.tensor(box, dtype=torch.float32),
        }


class _RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class InfiniteDataLoader(DataLoader):
    """Its iterator and workers are made once, and give epoch after epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", _RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)

    def reset(self):
        self.iterator = self._get_iterator()


def seed_worker(worker_id):
    worker_seed = torch.initial_seed() % 2**32
    np.random.seed(worker_seed)
    random.seed(worker_seed)


def build_dataloader(dataset, batch, workers, shuffle):
    generator = torch.Generator()
    generator.manual_seed(6148914691236517205)
    return InfiniteDataLoader(
        dataset,
        batch_size=batch,
        shuffle=shuffle,
        num_workers=workers,
        worker_init_fn=seed_worker,
        generator=generator,
    )
