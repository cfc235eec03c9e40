#!/bin/bash
# Two steps at the same time, each with a part of every node.
#SBATCH --nodes=2 --ntasks-per-node=2 --time=10
for lr in 1 0.5; do
    srun --mpi="${MPI:-pmix}" --exact --nodes=2 --ntasks=2 \
        python examples/slurm/train.py --lr "$lr" --folder "runs/$SLURM_JOB_ID-$lr" "$@" &
done
wait
