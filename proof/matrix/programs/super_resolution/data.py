"""Where the pictures come from: drawn once into a folder, as a download would leave them."""

from os import makedirs
from os.path import exists, join

import numpy as np
import torch
from dataset import DatasetFromFolder
from PIL import Image


def draw(dest="dataset"):
    if not exists(dest):
        chance = np.random.default_rng(5)
        for part, count in (("train", 120), ("test", 20)):
            makedirs(join(dest, part))
            for number in range(count):
                coarse = chance.integers(0, 255, (9, 9, 3)).astype(np.uint8)
                picture = Image.fromarray(coarse).resize((72, 72), Image.BICUBIC)
                picture.save(join(dest, part, f"{number:03d}.png"))
    return dest


class Compose:
    def __init__(self, steps):
        self.steps = steps

    def __call__(self, image):
        for step in self.steps:
            image = step(image)
        return image


class CenterCrop:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        return image.resize((self.size, self.size), Image.BILINEAR)


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image, dtype=np.float32)).div(255).unsqueeze(0)


def get_set(part, upscale_factor):
    crop_size = 64 - (64 % upscale_factor)
    return DatasetFromFolder(
        join(draw(), part),
        input_transform=Compose([CenterCrop(crop_size), Resize(crop_size // upscale_factor), ToTensor()]),
        target_transform=Compose([CenterCrop(crop_size), ToTensor()]),
    )


def get_training_set(upscale_factor):
    return get_set("train", upscale_factor)


def get_test_set(upscale_factor):
    return get_set("test", upscale_factor)
