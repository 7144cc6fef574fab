"""Policy gradient on the cart and pole: built as pytorch/examples' reinforce.

Rewards and log-probabilities are lists that hang on the policy, gathered over an episode of unknown length and emptied after the
update; the environment has a state of its own; a deque of returns; a running reward.
"""

import argparse
from collections import deque
from itertools import count

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="policy gradient")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=150)
parser.add_argument("--log-interval", type=int, default=5)
args = parser.parse_args()

env = gym.make("CartPole-v1")
env.reset(seed=args.seed)
torch.manual_seed(args.seed)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 128)
        self.dropout = nn.Dropout(p=0.6)
        self.outer = nn.Linear(128, 2)
        self.log_probs = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.dropout(self.inner(x)))
        return F.softmax(self.outer(x), dim=1)


policy = Policy()
optimizer = optim.Adam(policy.parameters(), lr=1e-2)
tiny = np.finfo(np.float32).eps.item()


def choose(state):
    state = torch.from_numpy(state).float().unsqueeze(0)
    probs = policy(state)
    m = Categorical(probs)
    action = m.sample()
    policy.log_probs.append(m.log_prob(action))
    return action.item()


def learn():
    later = 0
    losses = []
    returns = deque()
    for r in policy.rewards[::-1]:
        later = r + args.gamma * later
        returns.appendleft(later)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + tiny)
    for log_prob, later in zip(policy.log_probs, returns, strict=True):
        losses.append(-log_prob * later)
    optimizer.zero_grad()
    losses = torch.cat(losses).sum()
    losses.backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.log_probs[:]


def main():
    smoothed = 10
    for episode in count(1):
        state, _ = env.reset()
        total = 0
        for _t in range(1, 200):
            action = choose(state)
            state, reward, terminated, truncated, _ = env.step(action)
            policy.rewards.append(reward)
            total += reward
            if terminated or truncated:
                break
        smoothed = 0.05 * total + (1 - 0.05) * smoothed
        learn()
        if episode % args.log_interval == 0:
            print(f"episode {episode} reward {total:.2f} smoothed {smoothed:.2f}")
        if smoothed > env.spec.reward_threshold or episode >= args.episodes:
            print(f"in the end the smoothed reward is {smoothed}")
            break
    state = {
        "model": policy.state_dict(),
        "optimizer": optimizer.state_dict(),
        "reward": float(smoothed),
    }
    torch.save(
        state | {"random": torch.get_rng_state(), "env": repr(env.unwrapped.np_random.bit_generator.state)},
        "model.pt",
    )


if __name__ == "__main__":
    main()
