"""Actor and critic on the cart and pole: built as pytorch/examples' actor_critic.

As the policy gradient, with named tuples in a list that hangs on the model, a value head, and an update in the outer loop.
"""

import argparse
from collections import namedtuple
from itertools import count

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description="actor and critic")
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--seed", type=int, default=543)
parser.add_argument("--episodes", type=int, default=120)
parser.add_argument("--log-interval", type=int, default=5)
args = parser.parse_args()

env = gym.make("CartPole-v1")
env.reset(seed=args.seed)
torch.manual_seed(args.seed)

Chosen = namedtuple("Chosen", ["log_prob", "value"])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 128)
        self.actor = nn.Linear(128, 2)
        self.critic = nn.Linear(128, 1)
        self.chosen = []
        self.rewards = []

    def forward(self, x):
        x = F.relu(self.inner(x))
        return F.softmax(self.actor(x), dim=-1), self.critic(x)


model = Policy()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
tiny = np.finfo(np.float32).eps.item()


def choose(state):
    state = torch.from_numpy(state).float()
    probs, worth = model(state)
    m = Categorical(probs)
    action = m.sample()
    model.chosen.append(Chosen(m.log_prob(action), worth))
    return action.item()


def learn():
    later = 0
    chosen = model.chosen
    of_actor = []
    of_critic = []
    returns = []
    for r in model.rewards[::-1]:
        later = r + args.gamma * later
        returns.insert(0, later)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + tiny)
    for (log_prob, value), later in zip(chosen, returns, strict=True):
        advantage = later - value.item()
        of_actor.append(-log_prob * advantage)
        of_critic.append(F.smooth_l1_loss(value, torch.tensor([later])))
    optimizer.zero_grad()
    loss = torch.stack(of_actor).sum() + torch.stack(of_critic).sum()
    loss.backward()
    optimizer.step()
    del model.rewards[:]
    del model.chosen[:]


def main():
    smoothed = 10
    for episode in count(1):
        state, _ = env.reset()
        total = 0
        for _t in range(1, 200):
            action = choose(state)
            state, reward, terminated, truncated, _ = env.step(action)
            model.rewards.append(reward)
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
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "reward": float(smoothed),
    }
    torch.save(
        state | {"random": torch.get_rng_state(), "env": repr(env.unwrapped.np_random.bit_generator.state)},
        "model.pt",
    )


if __name__ == "__main__":
    main()
