#!/bin/bash
# The mpirun of the MPI library that Python loads starts the ranks on the nodes of the job, also where srun cannot.
#SBATCH --nodes=2 --ntasks-per-node=1 --time=10
torchmpi run -n "$SLURM_NTASKS" examples/slurm/train.py --folder "runs/$SLURM_JOB_ID" "$@"
