"""Deterministic policy gradient in one file: built as CleanRL's ddpg_continuous_action.

An actor and a critic, each with a target that follows by Polyak averaging of `.data`; noise of NumPy or torch on the actions; a replay
buffer; the actor is updated every second step only; TensorBoard; an environment with continuous actions.
"""

import random
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.tensorboard import SummaryWriter

SEED, TOTAL, LEARNING_STARTS, BATCH_SIZE, POLICY_FREQUENCY = 1, 900, 150, 128, 2
LEARNING_RATE, GAMMA, TAU, EXPLORATION_NOISE = 3e-4, 0.99, 0.005, 0.1


class QNetwork(nn.Module):
    def __init__(self, env):
        super().__init__()
        size = np.prod(env.single_observation_space.shape) + np.prod(env.single_action_space.shape)
        self.fc1, self.fc2, self.fc3 = nn.Linear(int(size), 128), nn.Linear(128, 128), nn.Linear(128, 1)

    def forward(self, x, a):
        x = F.relu(self.fc1(torch.cat([x, a], 1)))
        return self.fc3(F.relu(self.fc2(x)))


class Actor(nn.Module):
    def __init__(self, env):
        super().__init__()
        self.fc1 = nn.Linear(int(np.prod(env.single_observation_space.shape)), 128)
        self.fc2 = nn.Linear(128, 128)
        self.fc_mu = nn.Linear(128, int(np.prod(env.single_action_space.shape)))
        high, low = env.single_action_space.high, env.single_action_space.low
        self.register_buffer("action_scale", torch.tensor((high - low) / 2.0, dtype=torch.float32))
        self.register_buffer("action_bias", torch.tensor((high + low) / 2.0, dtype=torch.float32))

    def forward(self, x):
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        return torch.tanh(self.fc_mu(x)) * self.action_scale + self.action_bias


class Buffer:
    def __init__(self, size):
        self.rows, self.size, self.next = [None] * size, size, 0
        self.chance = np.random.default_rng(SEED)

    def add(self, *row):
        self.rows[self.next % self.size] = row
        self.next += 1

    def sample(self, count):
        picked = self.chance.integers(0, min(self.next, self.size), count)
        columns = zip(*(self.rows[i] for i in picked), strict=True)
        return [torch.tensor(np.concatenate(column), dtype=torch.float32) for column in columns]


def make_env(seed):
    def thunk():
        env = gym.wrappers.RecordEpisodeStatistics(gym.make("Pendulum-v1", max_episode_steps=100))
        env.action_space.seed(seed)
        return env

    return thunk


if __name__ == "__main__":
    writer = SummaryWriter("runs/ddpg")
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    envs = gym.vector.SyncVectorEnv([make_env(SEED)])
    actor, qf1 = Actor(envs), QNetwork(envs)
    qf1_target, target_actor = QNetwork(envs), Actor(envs)
    target_actor.load_state_dict(actor.state_dict())
    qf1_target.load_state_dict(qf1.state_dict())
    q_optimizer = optim.Adam(list(qf1.parameters()), lr=LEARNING_RATE)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=LEARNING_RATE)
    rb = Buffer(600)
    start_time = time.time()

    obs, _ = envs.reset(seed=SEED)
    for global_step in range(TOTAL):
        if global_step < LEARNING_STARTS:
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            with torch.no_grad():
                actions = actor(torch.Tensor(obs))
                actions += torch.normal(0, actor.action_scale * EXPLORATION_NOISE)
                actions = actions.numpy().clip(envs.single_action_space.low, envs.single_action_space.high)
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        if "episode" in infos:
            print(f"global_step={global_step}, episodic_return={float(infos['episode']['r'][0]):.3f}")
            writer.add_scalar("charts/episodic_return", infos["episode"]["r"][0], global_step)
        rb.add(obs, next_obs, actions, rewards, terminations)
        obs = next_obs

        if global_step > LEARNING_STARTS:
            seen, came, did, got, over = rb.sample(BATCH_SIZE)
            with torch.no_grad():
                after = qf1_target(came, target_actor(came)).view(-1)
                wanted = got.flatten() + (1 - over.flatten()) * GAMMA * after
            believed = qf1(seen, did).view(-1)
            qf1_loss = F.mse_loss(believed, wanted)
            q_optimizer.zero_grad()
            qf1_loss.backward()
            q_optimizer.step()

            if global_step % POLICY_FREQUENCY == 0:
                actor_loss = -qf1(seen, actor(seen)).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                for param, target_param in zip(actor.parameters(), target_actor.parameters(), strict=True):
                    target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)
                for param, target_param in zip(qf1.parameters(), qf1_target.parameters(), strict=True):
                    target_param.data.copy_(TAU * param.data + (1 - TAU) * target_param.data)

            if global_step % 20 == 0:
                writer.add_scalar("losses/qf1_loss", qf1_loss.item(), global_step)
                writer.add_scalar("losses/actor_loss", actor_loss.item(), global_step)
                writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)
                print(
                    f"global_step={global_step} qf1_loss={qf1_loss.item():.5f} actor_loss={actor_loss.item():.5f}"
                )

    envs.close()
    writer.close()
    state = {"actor": actor.state_dict(), "qf1": qf1.state_dict(), "target_actor": target_actor.state_dict()}
    state |= {"qf1_target": qf1_target.state_dict(), "q_opt": q_optimizer.state_dict(), "obs": obs}
    torch.save(state | {"buffer": rb.chance.bit_generator.state, "random": torch.get_rng_state()}, "model.pt")
