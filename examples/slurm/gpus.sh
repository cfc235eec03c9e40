#!/bin/bash
# One GPU for each rank. All ranks see the GPUs of their node, and start() takes the one with the number of the local rank;
# with --gpus-per-task=1 each rank would see only its own, and NCCL could not use the direct links between them.
#SBATCH --nodes=2 --ntasks-per-node=2 --gres=gpu:2 --time=10
srun --mpi="${MPI:-pmix}" python examples/slurm/train.py --folder "runs/$SLURM_JOB_ID" "$@"
