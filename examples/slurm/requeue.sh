#!/bin/bash
# Before the time limit all ranks get USR1, train.py saves a checkpoint and ends with 75, and the job is queued again.
#SBATCH --nodes=2 --ntasks-per-node=1 --time=1 --signal=USR1@50 --requeue --open-mode=append
srun --mpi="${MPI:-pmix}" python examples/slurm/train.py --folder "runs/$SLURM_JOB_ID" "$@"
status=$?
[ $status != 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit $status
