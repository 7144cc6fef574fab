"""Pictures of a folder, each with its small version."""

from os import listdir
from os.path import join

import torch.utils.data as data
from PIL import Image


def load_img(filepath):
    y, _, _ = Image.open(filepath).convert("YCbCr").split()
    return y


class DatasetFromFolder(data.Dataset):
    def __init__(self, image_dir, input_transform=None, target_transform=None):
        super().__init__()
        self.image_filenames = [join(image_dir, x) for x in sorted(listdir(image_dir)) if x.endswith(".png")]
        self.input_transform = input_transform
        self.target_transform = target_transform

    def __getitem__(self, index):
        input = load_img(self.image_filenames[index])
        target = input.copy()
        if self.input_transform:
            input = self.input_transform(input)
        if self.target_transform:
            target = self.target_transform(target)
        return input, target

    def __len__(self):
        return len(self.image_filenames)
