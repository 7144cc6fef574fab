"""Q-learning in one file: built as CleanRL's dqn.

A vector of one recorded environment, a replay buffer of NumPy arrays that draws with NumPy's global state, a linear schedule of
chance, a target network copied now and then, and TensorBoard, all in one loop over global steps at the top level.
"""

import os
import random
import time
from dataclasses import asdict, dataclass

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]
    seed: int = 1
    env_id: str = "CartPole-v1"
    total_timesteps: int = 2600
    learning_rate: float = 2.5e-4
    num_envs: int = 1
    buffer_size: int = 1000
    gamma: float = 0.99
    target_network_frequency: int = 200
    batch_size: int = 128
    start_e: float = 1.0
    end_e: float = 0.05
    exploration_fraction: float = 0.5
    learning_starts: int = 400
    train_frequency: int = 4


class ReplayBuffer:
    """A ring of transitions."""

    def __init__(self, size, observation_space):
        self.observations = np.zeros((size, *observation_space.shape), dtype=observation_space.dtype)
        self.next_observations = np.zeros_like(self.observations)
        self.actions = np.zeros(size, dtype=np.int64)
        self.rewards = np.zeros(size, dtype=np.float32)
        self.dones = np.zeros(size, dtype=np.float32)
        self.size, self.pos, self.full = size, 0, False

    def add(self, obs, next_obs, action, reward, done):
        for row in range(len(obs)):
            self.observations[self.pos] = obs[row]
            self.next_observations[self.pos] = next_obs[row]
            self.actions[self.pos] = action[row]
            self.rewards[self.pos] = reward[row]
            self.dones[self.pos] = done[row]
            self.pos += 1
            if self.pos == self.size:
                self.full, self.pos = True, 0

    def sample(self, count):
        rows = np.random.randint(0, self.size if self.full else self.pos, size=count)
        names = ("observations", "actions", "next_observations", "rewards", "dones")
        return [torch.from_numpy(getattr(self, name)[rows]) for name in names]


def make_env(env_id, seed):
    def thunk():
        env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env.action_space.seed(seed)
        return env

    return thunk


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        size = int(np.array(env.single_observation_space.shape).prod())
        self.network = nn.Sequential(
            nn.Linear(size, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, env.single_action_space.n),
        )

    def forward(self, x):
        return self.network(x)


def linear_schedule(start_e, end_e, duration, t):
    return max((end_e - start_e) / duration * t + start_e, end_e)


if __name__ == "__main__":
    args = Args()
    run_name = f"{args.env_id}__{args.exp_name}__{args.seed}"
    writer = SummaryWriter(f"runs/{run_name}")
    writer.add_text("settings", "\n".join(f"{key}: {value}" for key, value in asdict(args).items()))
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True

    envs = gym.vector.SyncVectorEnv([make_env(args.env_id, args.seed + i) for i in range(args.num_envs)])
    q_network = QNetwork(envs)
    optimizer = optim.Adam(q_network.parameters(), lr=args.learning_rate)
    target_network = QNetwork(envs)
    target_network.load_state_dict(q_network.state_dict())
    rb = ReplayBuffer(args.buffer_size, envs.single_observation_space)
    start_time = time.time()

    obs, _ = envs.reset(seed=args.seed)
    for global_step in range(args.total_timesteps):
        epsilon = linear_schedule(
            args.start_e, args.end_e, args.exploration_fraction * args.total_timesteps, global_step
        )
        if random.random() < epsilon:
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            q_values = q_network(torch.Tensor(obs))
            actions = torch.argmax(q_values, dim=1).numpy()

        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        if "episode" in infos:
            episodic = float(infos["episode"]["r"][0])
            print(f"global_step={global_step}, episodic_return={episodic}")
            writer.add_scalar("charts/episodic_return", episodic, global_step)
            writer.add_scalar("charts/episodic_length", int(infos["episode"]["l"][0]), global_step)

        rb.add(obs, next_obs, actions, rewards, terminations)
        obs = next_obs

        if global_step > args.learning_starts:
            if global_step % args.train_frequency == 0:
                seen, did, came, got, over = rb.sample(args.batch_size)
                with torch.no_grad():
                    target_max, _ = target_network(came).max(dim=1)
                    td_target = got + args.gamma * target_max * (1 - over)
                old_val = q_network(seen).gather(1, did.unsqueeze(1)).squeeze()
                loss = F.mse_loss(td_target, old_val)
                if global_step % 100 == 0:
                    writer.add_scalar("losses/td_loss", loss.item(), global_step)
                    writer.add_scalar("losses/q_values", old_val.mean().item(), global_step)
                    writer.add_scalar(
                        "charts/SPS", int(global_step / (time.time() - start_time)), global_step
                    )
                    print(f"global_step={global_step} loss={loss.item():.6f}")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if global_step % args.target_network_frequency == 0:
                target_network.load_state_dict(q_network.state_dict())

    envs.close()
    writer.close()
    state = {
        "q": q_network.state_dict(),
        "target": target_network.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    state |= {
        "rewards": rb.rewards,
        "pos": rb.pos,
        "obs": obs,
        "python": random.getstate(),
        "numpy": np.random.random(),
    }
    torch.save(state, "model.pt")
