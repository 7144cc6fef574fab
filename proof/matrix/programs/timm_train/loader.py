"""Pictures, and a loader around the loader that brings them to the device, normalised and partly erased."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self, count, training, seed):
        chance = np.random.default_rng(seed)
        self.label = chance.integers(0, 5, count)
        shapes = np.random.default_rng(0).random((5, 3, 32, 32))
        self.data = ((shapes[self.label] * 0.6 + 0.4 * chance.random((count, 3, 32, 32))) * 255).astype(
            np.uint8
        )
        self.training = training

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        image = self.data[index]
        if self.training:
            if random.random() < 0.5:
                image = image[:, :, ::-1]
            image = np.roll(image, np.random.randint(-3, 4), axis=1)
        return image.copy(), self.label[index]


def fast_collate(batch):
    return torch.from_numpy(np.stack([image for image, _ in batch])), torch.tensor(
        [int(label) for _, label in batch]
    )


class RandomErasing:
    def __init__(self, probability, chance):
        self.probability, self.chance = probability, chance

    def __call__(self, batch):
        for image in batch:
            if self.chance.random() > self.probability:
                continue
            top, left = self.chance.randrange(20), self.chance.randrange(20)
            image[:, top : top + 10, left : left + 10] = torch.empty(3, 10, 10).normal_()
        return batch


class PrefetchLoader:
    def __init__(self, loader, re_prob, seed):
        self.loader = loader
        self.mean, self.std = (
            torch.tensor([127.5] * 3).view(1, 3, 1, 1),
            torch.tensor([64.0] * 3).view(1, 3, 1, 1),
        )
        self.random_erasing = RandomErasing(re_prob, random.Random(seed)) if re_prob > 0 else None

    def __iter__(self):
        first, input, target = True, None, None
        for next_input, next_target in self.loader:
            next_input = next_input.float().sub_(self.mean).div_(self.std)
            if self.random_erasing is not None:
                next_input = self.random_erasing(next_input)
            if not first:
                yield input, target
            first = False
            input, target = next_input, next_target
        yield input, target

    def __len__(self):
        return len(self.loader)


def create_loader(count, batch_size, is_training, num_workers, re_prob=0.0, seed=0):
    loader = DataLoader(
        Pictures(count, is_training, seed),
        batch_size=batch_size,
        shuffle=is_training,
        num_workers=num_workers,
        collate_fn=fast_collate,
        drop_last=is_training,
        persistent_workers=True,
    )
    return PrefetchLoader(loader, re_prob if is_training else 0.0, seed)
