"""What launches need of one host: processes, cores, and the supervisors of its ranks."""
