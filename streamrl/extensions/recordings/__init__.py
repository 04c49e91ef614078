"""Works on recorded runs: replays, audits, forks and exports them, and shows their dead letters."""
