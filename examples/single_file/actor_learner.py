"""Actors and a learner: rank 0 learns a policy, the other ranks play with it. Neither waits for the other.

    torchmpi run -n 3 examples/single_file/actor_learner.py

The game: a number of 4 bits is shown, and action 1 is right if it is odd. Actors fetch the policy from a parameter
server when they need it, and send their games to the learner as messages. The learner sends gradients to the server,
which takes Adam steps.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchmpi as mpi
import torchmpi.parameterserver as ps

BITS, GAMES, BATCHES, RATE = 4, 64, 480, 0.03
BATCH = (GAMES, BITS + 2)  # a row: the bits, the action, the reward


def play(policy: nn.Module, random: torch.Generator) -> Tensor:
    """Play games with the policy, and return what was seen, done and won."""
    bits = torch.randint(2, (GAMES, BITS), generator=random).float()
    with torch.no_grad():
        actions = torch.multinomial(policy(bits).softmax(1), 1, generator=random)
    rewards = (actions == bits[:, -1:]).float()
    return torch.cat([bits, actions, rewards], 1)


def learn(policy: nn.Module, games: Tensor) -> Tensor:
    """Return the gradient of REINFORCE, as one vector."""
    bits, actions, rewards = games.split([BITS, 1, 1], 1)
    chosen = policy(bits).log_softmax(1).gather(1, actions.long())
    policy.zero_grad()
    (-(rewards - rewards.mean()) * chosen).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    if size < 2:
        raise SystemExit("actor_learner.py needs a learner and an actor: torchmpi run -n 2")
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(BITS, 16), nn.Tanh(), nn.Linear(16, 2))
    weights = parameters_to_vector(policy.parameters()).detach()
    server = ps.init(weights)  # collective: each rank holds a shard

    actors = range(1, size)
    if rank == 0:
        for number in range(BATCHES):
            games = mpi.recv(torch.empty(BATCH), src=actors[number % len(actors)])
            vector_to_parameters(ps.receive(server).wait(), policy.parameters())
            ps.send(server, learn(policy, games), ps.adam(RATE)).wait()
    else:
        random = torch.Generator().manual_seed(rank)
        for number in range(BATCHES):
            if actors[number % len(actors)] == rank:
                vector_to_parameters(ps.receive(server).wait(), policy.parameters())  # without the learner's help
                mpi.send(play(policy, random), dst=0)

    mpi.barrier()
    vector_to_parameters(ps.receive(server).wait(), policy.parameters())
    games = play(policy, torch.Generator().manual_seed(100 + rank))
    won = mpi.allreduce(games[:, -1].mean(), op="avg").item()
    if rank == 0:
        print(f"actor_learner: {size - 1} actors, {BATCHES} batches, {won:.0%} of the games won")
    assert won > 0.85  # 50 % at random
    mpi.barrier()
    ps.free(server)
    mpi.stop()


if __name__ == "__main__":
    main()
