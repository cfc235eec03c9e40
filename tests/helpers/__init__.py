"""What tests of several folders use; ``tests`` is on the path of pytest (setup.cfg)."""

import os

# The table that the user has measured would change the choice of backends, and print a line if it was measured under
# another MPI. Tests, and the jobs that they start, read and write only files that they name themselves.
os.environ["TORCHMPI_TUNING_FILE"] = "none"
