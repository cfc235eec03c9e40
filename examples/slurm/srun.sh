#!/bin/bash
# srun starts the ranks. pmix: Open MPI; pmi2: MPICH; none: any, or no MPI library, with TCP between the nodes.
#SBATCH --nodes=2 --ntasks-per-node=1 --time=10
srun --mpi="${MPI:-pmix}" python examples/slurm/train.py --folder "runs/$SLURM_JOB_ID" "$@"
