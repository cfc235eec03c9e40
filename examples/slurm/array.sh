#!/bin/bash
# One job for each learning rate.
#SBATCH --array=0-2 --nodes=1 --ntasks=1 --time=10
rates=(1 0.5 0.2)
srun --mpi="${MPI:-pmix}" python examples/slurm/train.py --lr "${rates[SLURM_ARRAY_TASK_ID]}" \
    --folder "runs/$SLURM_ARRAY_JOB_ID-$SLURM_ARRAY_TASK_ID" "$@"
