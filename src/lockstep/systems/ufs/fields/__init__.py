"""Reading NetCDF files: from a grid's fields to the rows of a dataset."""
