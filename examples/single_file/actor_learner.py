"""Actors, a learner and an evaluator, which never wait for each other's work.

    torchmpi run -n 4 examples/single_file/actor_learner.py

Rank 0 learns a policy, the last rank tests it, and the ranks between them play. The game: a runner on a line of numbers
sees how far away a goal is, and moves by -1, 0 or 1 in each of 8 steps; its reward is the negative distance. Actors
fetch the policy from a parameter server before each trajectory, no more than LEAD trajectories ahead of the learner,
and send it to the learner, which takes it from whoever is first. The learner sends gradients to the server, which takes
Adam steps, and counts them on a second server. The evaluator reads both whenever it is ready.
"""

import time

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import torchmpi as mpi
import torchmpi.parameterserver as ps

STEPS, GAMES, BATCHES, LEAD, RATE = 8, 32, 400, 1, 0.01
TRAJECTORY = (STEPS, GAMES, 3)  # distance seen, action, reward


def play(policy: nn.Module, random: torch.Generator, *, greedy: bool = False) -> Tensor:
    """Play games, and return what was seen, done and earned in each step."""
    distance = torch.randint(-5, 6, (GAMES, 1), generator=random).float()
    steps = []
    for _ in range(STEPS):
        with torch.no_grad():
            scores = policy(distance / 5)
        actions = (
            scores.argmax(1, keepdim=True) if greedy else torch.multinomial(scores.softmax(1), 1, generator=random)
        )
        seen, distance = distance, distance - (actions - 1)
        steps.append(torch.cat([seen, actions.float(), -distance.abs()], 1))
    return torch.stack(steps)


def learn(policy: nn.Module, trajectory: Tensor) -> Tensor:
    """Return the gradient of REINFORCE, as one vector: an action counts for what came nearer by it and afterwards."""
    seen, actions, rewards = trajectory.unbind(2)
    gains = seen.abs() + rewards
    for step in reversed(range(STEPS - 1)):
        gains[step] += 0.5 * gains[step + 1]
    chosen = policy(seen[..., None] / 5).log_softmax(2).gather(2, actions[..., None].long())[..., 0]
    policy.zero_grad()
    (-(gains - gains.mean()) * chosen).mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def main() -> None:
    mpi.start()
    rank, size = mpi.rank(), mpi.size()
    if size < 3:
        raise SystemExit("actor_learner.py needs a learner, an actor and an evaluator: torchmpi run -n 3")
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 3))
    weights = parameters_to_vector(policy.parameters()).detach()
    server, learned = ps.init(weights), ps.init(torch.zeros(1))  # collective: each rank holds a shard

    def fetch() -> None:
        vector_to_parameters(ps.receive(server).wait(), policy.parameters())

    def num_learned() -> int:
        return int(ps.receive(learned).wait())

    random, actors = torch.Generator().manual_seed(rank), range(1, size - 1)
    scores = []
    if rank == 0:
        left = {actor: len(range(actor - 1, BATCHES, len(actors))) for actor in actors}
        waiting = {actor: mpi.recv_async(torch.empty(TRAJECTORY), src=actor) for actor in actors}
        for _ in range(BATCHES):
            while (actor := next((actor for actor in waiting if waiting[actor].done()), None)) is None:
                time.sleep(1e-4)
            trajectory = waiting.pop(actor).wait()
            left[actor] -= 1
            if left[actor]:
                waiting[actor] = mpi.recv_async(torch.empty(TRAJECTORY), src=actor)
            fetch()
            ps.send(server, learn(policy, trajectory), ps.adam(RATE)).wait()
            ps.send(learned, torch.ones(1), "add").wait()
    elif rank in actors:
        for number in range(rank - 1, BATCHES, len(actors)):
            while num_learned() < number - LEAD * len(actors):  # games of a policy of long ago teach little
                time.sleep(1e-4)
            fetch()  # without the learner's help
            mpi.send(play(policy, random), dst=0)
    else:
        while not scores or scores[-1][0] < BATCHES:
            batches = num_learned()  # before the policy, which is then not older
            fetch()
            scores.append((batches, play(policy, random, greedy=True)[-1, :, 2].mean().item()))

    mpi.barrier()
    if rank == size - 1:
        some = scores[:: max(1, len(scores) // 5)] + scores[-1:]
        print("evaluations:", ", ".join(f"{abs(score):.2f} after {batches}" for batches, score in some))
        print(f"actor_learner: {len(actors)} actors, {BATCHES} batches, final distance {abs(scores[-1][1]):.2f}")
        assert scores[-1][1] > -0.5  # 3 at random
    mpi.barrier()
    ps.free(server)
    ps.free(learned)
    mpi.stop()


if __name__ == "__main__":
    main()
