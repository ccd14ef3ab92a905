"""One NetCDF file: opened with care, its numbers decoded."""
