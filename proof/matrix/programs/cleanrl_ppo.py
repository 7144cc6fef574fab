"""Proximal policy optimisation in one file: built as CleanRL's ppo.

Tensors of a rollout filled in place, four environments in a vector, the rate annealed by hand, advantages from behind, epochs over
shuffled indices, and TensorBoard. The optimizer steps in the innermost of four loops.
"""

import random
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter

SEED, NUM_ENVS, NUM_STEPS, UPDATES = 1, 4, 64, 16
NUM_MINIBATCHES, UPDATE_EPOCHS = 4, 4
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP, ENT_COEF, VF_COEF, MAX_GRAD_NORM = (
    2.5e-4,
    0.99,
    0.95,
    0.2,
    0.01,
    0.5,
    0.5,
)
BATCH_SIZE = NUM_ENVS * NUM_STEPS
MINIBATCH_SIZE = BATCH_SIZE // NUM_MINIBATCHES


def make_env(env_id):
    def thunk():
        return gym.wrappers.RecordEpisodeStatistics(gym.make(env_id))

    return thunk


def initialised(layer, std=2**0.5, bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        size = int(np.array(envs.single_observation_space.shape).prod())
        self.critic = nn.Sequential(
            initialised(nn.Linear(size, 64)), nn.Tanh(), initialised(nn.Linear(64, 64)), nn.Tanh(),
            initialised(nn.Linear(64, 1), std=1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            initialised(nn.Linear(size, 64)), nn.Tanh(), initialised(nn.Linear(64, 64)), nn.Tanh(),
            initialised(nn.Linear(64, envs.single_action_space.n), std=0.01),
        )  # fmt: skip

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    writer = SummaryWriter(f"runs/ppo__{SEED}")
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    envs = gym.vector.SyncVectorEnv([make_env("CartPole-v1") for _ in range(NUM_ENVS)])
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

    obs = torch.zeros((NUM_STEPS, NUM_ENVS, *envs.single_observation_space.shape))
    actions = torch.zeros((NUM_STEPS, NUM_ENVS, *envs.single_action_space.shape))
    logprobs = torch.zeros((NUM_STEPS, NUM_ENVS))
    rewards = torch.zeros((NUM_STEPS, NUM_ENVS))
    dones = torch.zeros((NUM_STEPS, NUM_ENVS))
    values = torch.zeros((NUM_STEPS, NUM_ENVS))

    global_step = 0
    start_time = time.time()
    next_obs, _ = envs.reset(seed=SEED)
    next_obs = torch.Tensor(next_obs)
    next_done = torch.zeros(NUM_ENVS)

    for iteration in range(1, UPDATES + 1):
        optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / UPDATES) * LEARNING_RATE

        for step in range(NUM_STEPS):
            global_step += NUM_ENVS
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            next_obs, reward, terminations, truncations, infos = envs.step(action.numpy())
            next_done = np.logical_or(terminations, truncations)
            rewards[step] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(next_done)
            if "episode" in infos:
                for i in np.flatnonzero(infos["_episode"]):
                    writer.add_scalar("charts/episodic_return", infos["episode"]["r"][i], global_step)

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            last = 0
            for t in reversed(range(NUM_STEPS)):
                alive = 1.0 - (next_done if t == NUM_STEPS - 1 else dones[t + 1])
                ahead = next_value if t == NUM_STEPS - 1 else values[t + 1]
                delta = rewards[t] + GAMMA * ahead * alive - values[t]
                advantages[t] = last = delta + GAMMA * GAE_LAMBDA * alive * last
            returns = advantages + values

        flat_obs = obs.reshape((-1, *envs.single_observation_space.shape))
        flat_actions, flat_logprobs = actions.reshape(-1), logprobs.reshape(-1)
        flat_advantages, flat_returns, flat_values = (
            advantages.reshape(-1),
            returns.reshape(-1),
            values.reshape(-1),
        )

        order = np.arange(BATCH_SIZE)
        clipped = []
        for _epoch in range(UPDATE_EPOCHS):
            np.random.shuffle(order)
            for start in range(0, BATCH_SIZE, MINIBATCH_SIZE):
                rows = order[start : start + MINIBATCH_SIZE]
                _, logprob_now, entropy, value_now = agent.get_action_and_value(
                    flat_obs[rows], flat_actions.long()[rows]
                )
                ratio = (logprob_now - flat_logprobs[rows]).exp()
                clipped += [((ratio - 1.0).abs() > CLIP).float().mean().item()]
                gain = flat_advantages[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                policy_loss = torch.max(-gain * ratio, -gain * torch.clamp(ratio, 1 - CLIP, 1 + CLIP)).mean()
                value_now = value_now.view(-1)
                near = flat_values[rows] + torch.clamp(value_now - flat_values[rows], -CLIP, CLIP)
                far, near = (value_now - flat_returns[rows]) ** 2, (near - flat_returns[rows]) ** 2
                value_loss = 0.5 * torch.max(far, near).mean()
                loss = policy_loss - ENT_COEF * entropy.mean() + value_loss * VF_COEF
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()

        told, true = flat_values.numpy(), flat_returns.numpy()
        explained = 1 - np.var(true - told) / np.var(true)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
        writer.add_scalar("losses/value_loss", value_loss.item(), global_step)
        writer.add_scalar("losses/clipfrac", np.mean(clipped), global_step)
        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)
        print(
            f"iteration={iteration} global_step={global_step} value_loss={value_loss.item():.5f} explained={explained:.5f}"
        )

    envs.close()
    writer.close()
    state = {
        "agent": agent.state_dict(),
        "optimizer": optimizer.state_dict(),
        "obs": next_obs,
        "rewards": rewards,
    }
    torch.save(state | {"random": torch.get_rng_state(), "numpy": np.random.random()}, "model.pt")
