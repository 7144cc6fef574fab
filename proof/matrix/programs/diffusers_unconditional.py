"""Pictures from noise: built as diffusers' train_unconditional.py.

An Accelerator with hooks for saving its state, a U-Net and an averaged copy of it (EMAModel), a noise scheduler, gradients accumulated by
the accelerator, a progress bar, a global step, a checkpoint of everything every so many steps with old ones removed, and pictures drawn by a
pipeline after some epochs, under weights that are swapped with the averaged ones and back.
"""

import argparse
import logging
import math
import os
import shutil

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description="pictures from noise")
    parser.add_argument("--output_dir", default="ddpm")
    parser.add_argument("--resolution", type=int, default=16)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--save_images_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--lr_warmup_steps", type=int, default=10)
    parser.add_argument("--checkpointing_steps", type=int, default=20)
    parser.add_argument("--checkpoints_total_limit", type=int, default=2)
    parser.add_argument("--ddpm_num_steps", type=int, default=100)
    parser.add_argument("--ddpm_num_inference_steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=19)
    return parser.parse_args()


class Rings(Dataset):
    def __init__(self, count, size):
        chance = np.random.default_rng(0)
        rows, columns = np.mgrid[0:size, 0:size]
        centres, radius = chance.uniform(5, 11, (count, 2, 1, 1)), chance.uniform(2, 5, (count, 1, 1))
        away = np.sqrt((rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2)
        self.images = torch.tensor(np.exp(-((away - radius) ** 2)) * 2 - 1, dtype=torch.float32).unsqueeze(1)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return {"input": image.flip(2) if torch.rand(()) < 0.5 else image}


def main(args):
    project = ProjectConfiguration(project_dir=args.output_dir)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=args.gradient_accumulation_steps, project_config=project
    )
    set_seed(args.seed)

    def save_model_hook(models, weights, output_dir):
        ema_model.save_pretrained(os.path.join(output_dir, "unet_ema"))
        for model in models:
            model.save_pretrained(os.path.join(output_dir, "unet"))
            weights.pop()

    accelerator.register_save_state_pre_hook(save_model_hook)
    os.makedirs(args.output_dir, exist_ok=True)
    model = UNet2DModel(
        sample_size=args.resolution, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), dropout=0.1,
    )  # fmt: skip
    ema_model = EMAModel(
        model.parameters(),
        decay=0.99,
        use_ema_warmup=True,
        inv_gamma=1.0,
        power=0.75,
        model_cls=UNet2DModel,
        model_config=model.config,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=args.ddpm_num_steps)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6
    )
    train_dataloader = DataLoader(Rings(256, args.resolution), batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=len(train_dataloader) * args.num_epochs,
    )
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    ema_model.to(accelerator.device)

    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    global_step = 0
    for epoch in range(args.num_epochs):
        model.train()
        progress_bar = tqdm(total=num_update_steps_per_epoch, disable=None)
        progress_bar.set_description(f"Epoch {epoch}")
        for step, batch in enumerate(train_dataloader):
            clean_images = batch["input"]
            noise = torch.randn(clean_images.shape, dtype=clean_images.dtype, device=clean_images.device)
            bsz = clean_images.shape[0]
            timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (bsz,)).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with accelerator.accumulate(model):
                model_output = model(noisy_images, timesteps).sample
                loss = F.mse_loss(model_output.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema_model.step(model.parameters())
                progress_bar.update(1)
                global_step += 1
                if global_step % args.checkpointing_steps == 0:
                    checkpoints = [d for d in os.listdir(args.output_dir) if d.startswith("checkpoint")]
                    checkpoints = sorted(checkpoints, key=lambda x: int(x.split("-")[1]))
                    for old in checkpoints[: max(0, len(checkpoints) - args.checkpoints_total_limit + 1)]:
                        shutil.rmtree(os.path.join(args.output_dir, old))
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            logs = {
                "loss": loss.detach().item(),
                "lr": lr_scheduler.get_last_lr()[0],
                "ema": ema_model.cur_decay_value,
            }
            progress_bar.set_postfix(**logs)
            if step % 4 == 0:
                print(f"epoch {epoch} step {step} loss {logs['loss']:.6f} ema {logs['ema']}", flush=True)
        progress_bar.close()

        if epoch % args.save_images_epochs == args.save_images_epochs - 1 or epoch == args.num_epochs - 1:
            unet = accelerator.unwrap_model(model)
            ema_model.store(unet.parameters())
            ema_model.copy_to(unet.parameters())
            pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
            pipeline.set_progress_bar_config(disable=True)
            generator = torch.Generator(device="cpu").manual_seed(0)
            images = pipeline(
                generator=generator,
                batch_size=4,
                num_inference_steps=args.ddpm_num_inference_steps,
                output_type="np",
            ).images
            np.save(os.path.join(args.output_dir, f"samples_{epoch}.npy"), images)
            ema_model.restore(unet.parameters())
            pipeline.save_pretrained(os.path.join(args.output_dir, "pipeline"))
    accelerator.end_training()
    state = {
        "model": accelerator.unwrap_model(model).state_dict(),
        "ema": ema_model.state_dict(),
        "step": global_step,
    }
    state |= {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(state, "model.pt")


if __name__ == "__main__":
    main(parse_args())
