"""Q-learning with a replay memory: built as PyTorch's DQN tutorial.

A deque of named tuples in an object, a global counter of steps that sets how often to act at random, a target network that follows
slowly, the update in a function that reads globals; one step of the environment per iteration of the inner loop.
"""

import csv
import math
import random
from collections import deque, namedtuple
from itertools import count

import gymnasium as gym
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

BATCH_SIZE, GAMMA, TAU, LR = 64, 0.99, 0.005, 3e-4
EPS_START, EPS_END, EPS_DECAY = 0.9, 0.01, 300
EPISODES = 30

random.seed(42)
torch.manual_seed(42)
env = gym.make("CartPole-v1")
env.reset(seed=42)
env.action_space.seed(42)
Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self, observations, actions):
        super().__init__()
        self.layer1 = nn.Linear(observations, 128)
        self.layer2 = nn.Linear(128, 128)
        self.layer3 = nn.Linear(128, actions)

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


policy_net = DQN(4, env.action_space.n)
target_net = DQN(4, env.action_space.n)
target_net.load_state_dict(policy_net.state_dict())
optimizer = optim.AdamW(policy_net.parameters(), lr=LR, amsgrad=True)
memory = ReplayMemory(500)
steps_done = 0
episode_durations = []


def select_action(state):
    global steps_done
    sample = random.random()
    threshold = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    steps_done += 1
    if sample > threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[env.action_space.sample()]], dtype=torch.long)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE), strict=True))
    alive = torch.tensor([s is not None for s in batch.next_state], dtype=torch.bool)
    next_states = torch.cat([s for s in batch.next_state if s is not None])
    values = policy_net(torch.cat(batch.state)).gather(1, torch.cat(batch.action))
    next_values = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        next_values[alive] = target_net(next_states).max(1).values
    expected = (next_values * GAMMA) + torch.cat(batch.reward)
    loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


with open("episodes.csv", "w", newline="") as log:
    writer = csv.writer(log)
    writer.writerow(["episode", "length"])
    for i_episode in range(EPISODES):
        state, info = env.reset()
        state = torch.tensor(state, dtype=torch.float32).unsqueeze(0)
        for t in count():
            action = select_action(state)
            observation, reward, terminated, truncated, _ = env.step(action.item())
            reward = torch.tensor([reward])
            done = terminated or truncated
            next_state = None if terminated else torch.tensor(observation, dtype=torch.float32).unsqueeze(0)
            memory.push(state, action, next_state, reward)
            state = next_state
            optimize_model()
            followed, led = target_net.state_dict(), policy_net.state_dict()
            for key in led:
                followed[key] = led[key] * TAU + followed[key] * (1 - TAU)
            target_net.load_state_dict(followed)
            if done:
                episode_durations.append(t + 1)
                writer.writerow([i_episode, t + 1])
                log.flush()
                print(f"episode {i_episode} length {t + 1}")
                break

state = {
    "policy": policy_net.state_dict(),
    "target": target_net.state_dict(),
    "optimizer": optimizer.state_dict(),
}
torch.save(
    state | {"durations": episode_durations, "steps": steps_done, "python": random.getstate()}, "model.pt"
)
