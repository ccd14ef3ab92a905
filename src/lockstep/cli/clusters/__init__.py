"""Subcommands about machines and clusters: doctor, slurm, comm-profile, plan."""
